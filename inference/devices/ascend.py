"""Huawei Ascend NPUs, served by the vllm-ascend plugin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sealmesh.inference.devices.base import COMMON_ENVIRONMENT, Footprint

__all__ = ["AscendDevice"]


class AscendDevice:
    """Ascend NPUs. Not run on hardware: the environment follows vllm-ascend's documentation.

    Args:
        root: where /dev is, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def name(self) -> str:
        return "ascend"

    @property
    def absence(self) -> str:
        return "there is no /dev/davinci_manager"

    def present(self) -> bool:
        return (self._root / "dev/davinci_manager").exists()

    def describe(self) -> str:
        count = sum(path.name[len("davinci") :].isdigit() for path in (self._root / "dev").glob("davinci*"))
        return f"ascend, {count} NPUs"

    def dtype(self, own: str = "") -> str:
        return "float16" if own == "float16" else "bfloat16"

    def environment(self, kv_cache_gib: int) -> Mapping[str, str]:
        # The allocator setting that vllm-ascend recommends against fragmentation.
        return {**COMMON_ENVIRONMENT, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}

    def engine_args(self, dtype: str = "", *, latent: bool = False) -> Mapping[str, bool | int | str]:
        return {}

    def check(self, footprint: Footprint) -> None:
        # As on CUDA, the engine measures the device itself.
        return
