"""Checks of `sealmesh doctor` that look at the machine itself."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from sealmesh.deploy.local.doctor_check import Check, fail, ok, warn
from sealmesh.inference.devices.cpu import CpuDevice
from sealmesh.security.sm4.select import choose_engine, measure
from sealmesh.telemetry.runtime.errors import SealmeshError

GIB = 1 << 30
MIB = 1 << 20
_SPEED_SAMPLE_BYTES = 8 * MIB
# Below this, loading a model is held up by decryption rather than by the disk.
_SLOW_SM4_GBYTES_PER_S = 0.3
_SCARCE_DISK_BYTES, _TIGHT_DISK_BYTES = GIB // 2, 4 * GIB
_SMALL_SHM_BYTES = 256 * MIB
_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "127.0.0.0/8", "*"})


def check_cpu(device: CpuDevice) -> Iterator[Check]:
    """Whether the engine's CPU build runs on this processor, and how well."""
    detail = device.describe()
    if device.architecture == "x86_64" and "avx2" not in device.flags:
        yield fail(
            f"{detail}: no AVX2", "the engine's CPU build needs AVX2 (Intel Haswell, AMD Zen, or newer)"
        )
    elif device.architecture in ("aarch64", "arm64") and "asimd" not in device.flags:
        yield fail(f"{detail}: no ASIMD", "the engine's CPU build needs Armv8-A with NEON (ASIMD)")
    elif device.architecture not in ("x86_64", "aarch64", "arm64"):
        yield fail(f"{detail}", "the engine has packages for x86_64 and aarch64 only")
    elif device.cores < 2:
        yield warn(detail, "one core serves requests and computes in turn: give the mesh two or more")
    else:
        yield ok(detail)


def check_sm4() -> Iterator[Check]:
    """The SM4 engine that seals and opens models, with its measured speed."""
    try:
        choice = choose_engine()
    except SealmeshError as error:
        yield fail(error.message, "unset SEALMESH_SM4_ENGINE, or install libgcrypt (Debian: libgcrypt20)")
        return
    speed = measure(choice.engine, total_bytes=_SPEED_SAMPLE_BYTES)
    named = speed.detail if speed.detail.startswith(speed.engine) else f"{speed.engine} {speed.detail}"
    detail = (
        f"{named}: seals {speed.seal_gbytes_per_s:.2f}, opens {speed.open_gbytes_per_s:.2f} GB a CPU-second"
    )
    skipped = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over.items())
    if skipped:
        detail += f" (not used: {skipped})"
    if speed.open_gbytes_per_s < _SLOW_SM4_GBYTES_PER_S:
        yield warn(detail, "models load slowly: install libgcrypt 1.10 or newer (Debian: libgcrypt20)")
    else:
        yield ok(detail)


def check_private_folder(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> Iterator[Check]:
    """The folder for opened configuration files: in memory, writable, with some room.

    vLLM's processes also share memory under /dev/shm, which containers make small.
    """
    if not folder.is_dir():
        yield fail(f"{folder} is not there", "mount a tmpfs there, or name one in worker.private_dir")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield fail(f"{folder} cannot be written", "give this user the right to, or name another tmpfs")
        return
    kind = file_system(folder, mounts)
    free = shutil.disk_usage(folder).free
    detail = f"{folder} is {kind} with {size(free)} free"
    if kind not in _MEMORY_FILE_SYSTEMS:
        yield fail(
            f"{detail}: opened files would reach a disk",
            "name a tmpfs in worker.private_dir (/dev/shm is one)",
        )
    elif free < _SMALL_SHM_BYTES:
        yield warn(detail, "give it 256 MiB or more (docker run --shm-size=1g)")
    else:
        yield ok(detail)


def file_system(folder: Path, mounts: Path) -> str:
    """Type of the file system that ``folder`` lies on, by the longest mount point above it."""
    best, kind = -1, "unknown"
    resolved = folder.resolve()
    for line in mounts.read_text().splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " "))
        # Later mounts hide earlier ones on the same point.
        if (resolved == point or point in resolved.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def check_disk(folder: Path) -> Iterator[Check]:
    """Room for sealed models, KV data, logs and traces."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{size(free)} free for the state in {folder}"
    if free < _SCARCE_DISK_BYTES:
        yield fail(detail, "free some space, or set SEALMESH_STATE to a folder on a larger disk")
    elif free < _TIGHT_DISK_BYTES:
        yield warn(detail, "sealed models and KV data need as much again as the models: free some space")
    else:
        yield ok(detail)


def check_swap(swaps: Path = Path("/proc/swaps")) -> Iterator[Check]:
    """Weights in the clear live in memory only, unless the kernel swaps them out to a disk."""
    try:
        lines = swaps.read_text().splitlines()[1:]
    except OSError:
        yield ok("this system tells nothing about swap")
        return
    areas = [line.split()[0] for line in lines if line.strip()]
    on_disk = [area for area in areas if not Path(area).name.startswith("zram")]
    if on_disk:
        yield warn(
            f"swap on {', '.join(on_disk)}: opened weights and keys may reach a disk",
            "turn it off (swapoff -a) or encrypt it, where weights must not leak",
        )
    else:
        yield ok("none" if not areas else "in memory only (zram)")


def check_open_files(limits: tuple[int, int] | None = None) -> Iterator[Check]:
    """Sockets and files that a process may hold. ``limits``: soft and hard; -1 is unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    detail = f"{shown[0]} files and sockets a process (hard limit {shown[1]})"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        yield ok(detail)
    elif soft < _FEW_FILES:
        yield fail(detail, f"raise it: ulimit -n {_ENOUGH_FILES}")
    else:
        yield warn(detail, f"enough for some hundred clients; for more: ulimit -n {_ENOUGH_FILES} or above")


def check_proxy(environ: Mapping[str, str]) -> Iterator[Check]:
    """A proxy for the web that would also take the mesh's own calls on loopback."""
    names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    proxies = [name for name in (*names, *(name.upper() for name in names)) if environ.get(name)]
    if not proxies:
        yield ok("none set")
        return
    spared = {name.strip() for key in ("no_proxy", "NO_PROXY") for name in environ.get(key, "").split(",")}
    if spared & _LOOPBACK_NAMES:
        yield ok(f"{', '.join(proxies)}, not for this machine")
    else:
        yield warn(
            f"{', '.join(proxies)} is set: calls between services on this machine would go through it",
            "export no_proxy=localhost,127.0.0.1,::1",
        )


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
