"""A model folder as the engine sees it: what it must hold, how large its weights are, which ones they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from sealmesh.inference.devices import Device
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = [
    "check_plain_folder",
    "computation_dtype",
    "converted_bytes",
    "own_dtype",
    "plain_weights_digest",
    "weight_bytes",
]

# Bytes of an element, by the names that safetensors and config.json use.
_WIDTHS: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "float32": 4, "float16": 2, "bfloat16": 2,
}  # fmt: skip
_FLOATS: Final = ("F64", "F32", "F16", "BF16")


def check_plain_folder(folder: Path) -> None:
    """Refuses a folder that no engine could load.

    Raises:
        SealmeshError: CONFIGURATION_INVALID: the folder or its config.json or weights are missing.
    """
    if not folder.is_dir():
        raise _invalid(f"model folder {folder} does not exist: set worker.model_dir to a model folder")
    config = folder / "config.json"
    if not config.is_file():
        raise _invalid(f"{folder} is no model folder: it has no config.json")
    try:
        document = json.loads(config.read_bytes())
    except ValueError as exc:
        raise _invalid(f"{config} is not valid JSON: {exc}") from None
    if not isinstance(document, dict) or not document.get("architectures"):
        raise _invalid(f"{config} names no architecture")
    if not any(folder.glob("*.safetensors")):
        raise _invalid(f"{folder} holds no weights: it has no *.safetensors file")


def computation_dtype(folder: Path, device: Device) -> str:
    """The vLLM dtype in which a device computes the model of a folder when none is asked for."""
    own = own_dtype(folder)
    return own if own == "auto" else device.dtype(own)


def has_latent_attention(folder: Path) -> bool:
    """Whether the model keeps a latent vector instead of keys and values (DeepSeek's MLA)."""
    return bool(json.loads((folder / "config.json").read_bytes()).get("kv_lora_rank"))


def own_dtype(folder: Path) -> str:
    """Number format that config.json names, for example "bfloat16"; empty when it names none.

    "auto" for a quantised model, whose kernels decide.
    """
    document = json.loads((folder / "config.json").read_bytes())
    if document.get("quantization_config"):
        return "auto"
    # transformers 4 wrote torch_dtype.
    named = document.get("dtype") or document.get("torch_dtype") or ""
    return named if isinstance(named, str) else ""


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes that the weights of a plain folder take once floating-point ones are converted to `dtype`.

    Args:
        folder: model folder with safetensors files.
        dtype: vLLM dtype name; "auto" keeps every tensor's own.
    """
    return sum(converted_bytes(tensor.dtype, tensor.size_bytes, dtype) for tensor in _tensors(folder))


def converted_bytes(own: str, size_bytes: int, dtype: str) -> int:
    """Size of a tensor once it is converted.

    Args:
        own: its number format as safetensors names it.
        size_bytes: its size in that format.
        dtype: vLLM dtype name; only floating-point tensors are converted, and none by "auto".
    """
    width = _WIDTHS.get(dtype)
    return size_bytes if width is None or own not in _FLOATS else size_bytes // _WIDTHS[own] * width


def plain_weights_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of config.json and all weight files, as hex.

    Stands in for the digest of the sealed manifest, so that stored KV blocks of one model are never taken
    for those of another. Reads every byte.
    """
    total = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            total.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


class _Tensor(NamedTuple):
    dtype: str
    size_bytes: int


def _tensors(folder: Path) -> Iterator[_Tensor]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                if length > 100 << 20:
                    raise ValueError(f"its header claims {length} bytes")
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                found = [
                    _Tensor(str(entry["dtype"]), _length(entry["data_offsets"])) for entry in header.values()
                ]
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise _invalid(f"{path} is not a safetensors file: {exc}") from None
        yield from found


def _length(offsets: list[int]) -> int:
    start, end = offsets
    return end - start


def _invalid(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)
