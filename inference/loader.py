"""vLLM load format `sealed`: weights that exist in the clear only in this process's memory.

Runs in every engine process that loads weights. Each authenticates itself to the vault with the worker's
certificate, takes the data key over the wire, and decrypts ciphertext from shared storage straight into
the tensors that vLLM's weight iterator yields. No key is in a configuration, flag, variable or file.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from sealmesh.inference.last_words import say
from sealmesh.inference.sealed_options import LOAD_FORMAT, SealedLoadOptions
from sealmesh.security.keys.signing import load_verifying_key
from sealmesh.security.memory import RawMemory
from sealmesh.security.sealed.reader import TensorInfo
from sealmesh.security.vault.client import VaultClient, open_remote_model
from sealmesh.telemetry.runtime.errors import SealmeshError
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

__all__ = ["SealedModelLoader", "register_loader"]

_log = logging.getLogger("sealmesh.worker.loader")
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class SealedModelLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's default loader, its tensors taken from a sealed model.

    What the default loader checks stays checked: parameters that no tensor filled fail the load.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        # The base class refuses options that it does not know.
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}
        super().__init__(plain)
        self.load_config = load_config
        self._options = SealedLoadOptions.parse(load_config.model_loader_extra_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to fetch: ciphertext is read where it lies."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fills the model.

        Raises:
            SealmeshError: INTEGRITY_FAILURE naming file, tensor and chunk; KEY_DENIED;
                DEPENDENCY_UNAVAILABLE when the vault does not answer. Nothing decrypted is left behind.
        """
        try:
            super().load_weights(model, model_config)
        except SealmeshError as exc:
            say(exc.reason, exc.message)
            raise
        except ValueError as exc:
            say("CONFIGURATION_INVALID", f"the weights of {self._options.model} do not fit: {exc}")
            raise

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """(name, tensor) of every tensor, each yielded once all of its tags have verified."""
        if getattr(model, "secondary_weights", ()):
            raise ValueError("it takes weights from a second place, which cannot be sealed")
        options = self._options
        started = self.counter_before_loading_weights = time.perf_counter()
        total = 0
        pinned = [load_verifying_key(Path(options.verifying_key))]
        with (
            VaultClient(options.vault_address, options.tls_files()) as vault,
            open_remote_model(
                vault,
                options.model,
                pinned=pinned,
                model_dir=Path(options.location) if options.location else None,
            ) as sealed,
        ):
            names = [info.name for info in sealed.tensors() if not self._is_elsewhere(info.name)]
            stream = sealed.stream_tensors(
                _allocate,
                names=names,
                threads=options.threads or None,
                lookahead_bytes=options.lookahead_bytes,
            )
            with closing(stream) as tensors:  # type: ignore[type-var]  # it is a generator
                for info, tensor in tensors:
                    total += info.size_bytes
                    yield info.name, tensor
            engine = sealed.engine.name
        _log.info(
            "%d tensors, %d bytes decrypted and loaded in %.2f s (%s)",
            len(names),
            total,
            time.perf_counter() - started,
            engine,
        )

    def _is_elsewhere(self, name: str) -> bool:
        """Whether the tensor belongs to an expert of another rank (expert parallelism)."""
        local = getattr(self, "local_expert_ids", None)
        if local is None:
            return False
        from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

        return bool(should_skip_weight(name, local))


def register_loader() -> None:
    """Registers the load format with vLLM; once per process."""
    register_model_loader(LOAD_FORMAT)(SealedModelLoader)


def _allocate(info: TensorInfo) -> tuple[torch.Tensor, RawMemory]:
    dtype = _DTYPES.get(info.dtype)
    if dtype is None:
        raise ValueError(f"tensor {info.name} has the number format {info.dtype}, which torch has not")
    tensor = torch.empty(info.shape, dtype=dtype, device="cpu")
    return tensor, RawMemory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
