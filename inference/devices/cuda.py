"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sealmesh.inference.devices.base import COMMON_ENVIRONMENT, Footprint

__all__ = ["CudaDevice"]


class CudaDevice:
    """CUDA through vLLM's standard build.

    Args:
        root: where /dev and /proc are, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def absence(self) -> str:
        return "there is no /dev/nvidia0"

    def present(self) -> bool:
        return (self._root / "dev/nvidia0").exists()

    def describe(self) -> str:
        models = []
        for information in sorted((self._root / "proc/driver/nvidia/gpus").glob("*/information")):
            for line in information.read_text().splitlines():
                if line.startswith("Model:"):
                    models.append(line.partition(":")[2].strip())
        return f"cuda, {len(models)} GPUs: {', '.join(models)}" if models else "cuda"

    def dtype(self, own: str = "") -> str:
        # The model's own; every GPU that vLLM supports has it in hardware or is told apart by vLLM.
        return "auto"

    def environment(self, kv_cache_gib: int) -> Mapping[str, str]:
        return COMMON_ENVIRONMENT

    def engine_args(self, dtype: str = "", *, latent: bool = False) -> Mapping[str, bool | int | str]:
        return {}

    def check(self, footprint: Footprint) -> None:
        # vLLM measures the GPU itself and takes gpu_memory_utilization of it.
        return
