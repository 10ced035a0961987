"""vLLM's message buffers in /dev/shm: noted while the engine lives, removed when a kill left them behind.

Each is 160 MB or more and has a random name. Their creator removes them, unless it is killed together with
its resource tracker; the next worker then does, from the note in the folder of the one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

import psutil

__all__ = ["note_buffers", "remove_noted_buffers"]

_FOLDER: Final = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is
_NOTE: Final = "shared-memory"
# Address, permissions, offset, device, inode, path: proc_pid_maps(5). The name is multiprocessing's.
_MAPPING: Final = re.compile(r"\S+ \S+ \S+ \S+ (\d+) +/dev/shm/(psm_[0-9a-f]+)")
_NOTED: Final = re.compile(r"(\d+) (psm_[0-9a-f]+)")


def note_buffers(folder: Path) -> None:
    """Notes in a private folder which buffers the processes below this one have mapped now."""
    found = set[tuple[str, str]]()
    for process in psutil.Process().children(recursive=True):
        found |= _mapped(process.pid)
    (folder / _NOTE).write_text("".join(f"{inode} {name}\n" for inode, name in sorted(found)), "utf-8")


def remove_noted_buffers(folder: Path) -> list[Path]:
    """Removes what was noted in the folder of a worker that is gone; returns what was removed.

    A buffer goes only if it is the very same file, belongs to this user and no process has it mapped.
    """
    try:
        noted = set(_NOTED.findall((folder / _NOTE).read_text("utf-8")))
    except (OSError, UnicodeDecodeError):
        # That worker was killed before it noted any.
        return []
    if not noted:
        return []
    in_use = set[tuple[str, str]]().union(*(_mapped(pid) for pid in psutil.pids()))
    removed = []
    for inode, name in sorted(noted - in_use):
        path = _FOLDER / name
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_ino == int(inode) and status.st_uid == os.getuid():
                path.unlink()
                removed.append(path)
    return removed


def _mapped(pid: int) -> set[tuple[str, str]]:
    """(inode, name) of the buffers that a process maps; none when it is gone or another user's.

    Another user cannot map them: they are made with mode 0600.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return set(_MAPPING.findall(Path(f"/proc/{pid}/maps").read_text("utf-8", errors="replace")))
    return set()
