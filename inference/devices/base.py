"""What the worker asks of a device family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["COMMON_ENVIRONMENT", "Device", "DeviceError", "Footprint"]

COMMON_ENVIRONMENT: Mapping[str, str] = {
    # Everything is local: no look-ups on a hub, no usage reports.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # vLLM 0.23 seeds its block hashes from it and at random without it: stored blocks would never be found.
    "PYTHONHASHSEED": "0",
    # The engine process is started anew, not forked: the worker has threads by then.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
}


class DeviceError(Exception):
    """The device cannot serve as asked; the message says why and which setting to change."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a worker is going to take, in bytes."""

    weights: int
    """Size of the weights in the computation's number format."""
    kv_cache: int
    """Space for the KV cache."""


class Device(Protocol):
    """A device family."""

    @property
    def name(self) -> str:
        """As in GetModelInfoResponse.device and the name of its package profile."""

    @property
    def absence(self) -> str:
        """Why `present()` is false, for an error message."""

    def present(self) -> bool:
        """Whether the host has such a device."""

    def describe(self) -> str:
        """What was detected, one line for people."""

    def dtype(self, own: str = "") -> str:
        """The number format to compute in when none is asked for: a vLLM dtype name.

        Args:
            own: the model's own format, as its config.json names it; empty when it names none.
        """

    def environment(self, kv_cache_gib: int) -> Mapping[str, str]:
        """Environment variables to set before vLLM is imported; ones that the user set are kept."""

    def engine_args(self, dtype: str = "", *, latent: bool = False) -> Mapping[str, bool | int | str]:
        """vLLM options that this device wants unless the user says otherwise.

        Args:
            dtype: the number format of the computation.
            latent: whether the model has multi-head latent attention (DeepSeek's MLA).
        """

    def check(self, footprint: Footprint) -> None:
        """Raises DeviceError when the worker cannot fit, with figures and the setting to change."""
