"""The host's own processor: x86-64 (AVX2, AVX-512, AMX) and Arm."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sealmesh.inference.devices.base import COMMON_ENVIRONMENT, DeviceError, Footprint

__all__ = ["CpuDevice", "available_memory_bytes"]

_GIB = 1 << 30
# The three processes of a worker (server, engine core, executor) hold about 0.5 GiB each beside the
# weights: interpreter, torch, the tokenizer.
_PROCESSES_BYTES = int(1.5 * _GIB)


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A CPU with its instruction-set flags and the number of cores that this process may use."""

    architecture: str
    """As `platform.machine()` says."""
    flags: frozenset[str]
    """Flags of /proc/cpuinfo ("flags" on x86, "Features" on Arm)."""
    cores: int
    memory_bytes: int
    """Memory that is free for use, within the control group's limit."""

    @classmethod
    def of_host(cls) -> Self:
        """What /proc tells about this host; unknown flags count as absent."""
        return cls(platform.machine(), _cpu_flags(), len(os.sched_getaffinity(0)), available_memory_bytes())

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def absence(self) -> str:
        return "every host has a CPU"

    @property
    def native(self) -> frozenset[str]:
        """Half-width formats that the CPU multiplies in hardware (AMX, AVX-512, Arm), as vLLM names them."""
        formats = {
            "bfloat16": {"amx_bf16", "avx512_bf16", "bf16"},
            "float16": {"amx_fp16", "avx512_fp16", "asimdhp"},
        }
        return frozenset(name for name, flags in formats.items() if self.flags & flags)

    def present(self) -> bool:
        return True

    def describe(self) -> str:
        known = (
            "avx2",
            "avx512f",
            "avx512_bf16",
            "avx512_fp16",
            "amx_bf16",
            "asimd",
            "asimdhp",
            "sve",
            "bf16",
        )
        features = " ".join(flag for flag in known if flag in self.flags) or "no vector extensions known"
        return f"cpu {self.architecture}, {self.cores} cores, {features}"

    def dtype(self, own: str = "") -> str:
        # The model's own format where the hardware has it, else float32. Measured, 16 chats with SmolLM2-135M
        # on two cores: without bfloat16 hardware (Zen 3) float32 gives 74 tokens/s and bfloat16 18; with AMX
        # (Sapphire Rapids) bfloat16 gives 233, float32 110 and float16 (AVX-512 FP16) about as much at half
        # the memory. Never bfloat16 for a float16 model: three bits less of mantissa change answers.
        own = own or "bfloat16"
        return own if own in self.native else "float32"

    def environment(self, kv_cache_gib: int) -> Mapping[str, str]:
        chosen = {**COMMON_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}
        # vLLM reserves a core for its scheduler and one more for a KV connector, which leaves none to
        # compute on where there are few. It binds compute threads to the rest ("auto"): spreading them over
        # every core costs two thirds of the throughput as soon as anything else runs.
        if self.cores <= 3:
            chosen["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0" if self.cores == 1 else "1"
        return chosen

    def engine_args(self, dtype: str = "", *, latent: bool = False) -> Mapping[str, bool | int | str]:
        # Compiling takes minutes on a CPU and gains little.
        chosen: dict[str, bool | int | str] = {"enforce_eager": True}
        if latent and "amx_tile" in self.flags and dtype not in ("", "auto", "bfloat16"):
            # vLLM's AMX kernels for MLA, which it takes wherever AMX is, know bfloat16 only.
            chosen["attention_backend"] = "CPU_MLA"
        return chosen

    def check(self, footprint: Footprint) -> None:
        needed = footprint.weights + footprint.kv_cache + _PROCESSES_BYTES
        if needed <= self.memory_bytes:
            return
        raise DeviceError(
            f"too little memory: {needed / _GIB:.1f} GiB are needed (KV space "
            f"{footprint.kv_cache / _GIB:.1f}, weights {footprint.weights / _GIB:.1f}, processes "
            f"{_PROCESSES_BYTES / _GIB:.1f}) and {self.memory_bytes / _GIB:.1f} GiB are free: lower "
            "worker.kv_cache_gib, serve a smaller model or free memory"
        )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be had: what the kernel says is available, and the control group's room.

    Args:
        root: where /proc and /sys are, for tests.
    """
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = (_number(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        # No such control group, or "max": no limit.
        return None


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()
