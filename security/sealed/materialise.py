"""Configuration and tokenizer of a sealed model as private files in memory, for engines that want paths."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from sealmesh.security.errors import configuration_invalid
from sealmesh.security.files import pwrite_all
from sealmesh.security.memory import wipe
from sealmesh.security.sealed.format import FileKind
from sealmesh.security.sealed.reader import SealedModel

DEFAULT_BASE = Path("/dev/shm")  # noqa: S108  # tmpfs is the point; what is below is 0700
_PREFIX = "sealmesh-model-"
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


class MaterialisedFolder:
    """A folder (0700) in memory with the verified small files of a model; no weights.

    `close` removes it; so does the end of the process, and after a kill the next `materialise`, which
    knows abandoned folders by their lock. tmpfs pages may be swapped out: turn swap off, or encrypt it.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Removes the folder. May be called twice; does nothing in a forked child."""
        if self._lock_fd < 0 or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def __enter__(self) -> MaterialisedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def materialise(
    model: SealedModel,
    *,
    base: Path = DEFAULT_BASE,
    allow_code: bool = False,
    on_abandoned: Callable[[Path], object] = lambda _: None,
) -> MaterialisedFolder:
    """Writes every sealed blob of an unlocked model below a new private folder in `base`.

    Args:
        model: unlocked; each file's tags are verified before its content is written.
        base: a folder on tmpfs or ramfs.
        allow_code: write `*.py` files too (they are signed like all others).
        on_abandoned: gets each folder that a killed process left behind, just before it is removed.

    Raises CONFIGURATION_INVALID when `base` is not in memory or cannot be written.
    """
    filesystem = filesystem_of(base)
    if filesystem not in _MEMORY_FILESYSTEMS:
        raise configuration_invalid(
            f"{base} is on {filesystem}, not in memory: configuration and tokenizer would reach "
            "a disk in the clear; name a folder on tmpfs, or mount one"
        )
    remove_abandoned(base, on_abandoned)
    folder = _make_folder(base)
    try:
        for file in model.files():
            name = file.listed.path
            if file.listed.kind is not FileKind.BLOB or (name.endswith(".py") and not allow_code):
                continue
            target = folder.path / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            content = model.read_file(name)
            try:
                _write_private(target, content)
            finally:
                wipe(content)
    except OSError as exc:
        folder.close()
        raise configuration_invalid(f"cannot write below {folder.path}: {exc.strerror}") from exc
    except BaseException:
        folder.close()
        raise
    return folder


def _make_folder(base: Path) -> MaterialisedFolder:
    while True:
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as exc:
            raise configuration_invalid(f"cannot write below {base}: {exc.strerror}") from exc
        fd = _lock(path, wait=True)
        if fd is not None:
            return MaterialisedFolder(path, fd)
        # Another process took the new folder for an abandoned one before it was locked: make another.


def _lock(path: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of a folder; None when another holds it or the folder is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None
    return fd


def _write_private(path: Path, content: bytearray) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        pwrite_all(fd, memoryview(content), 0)
    finally:
        os.close(fd)


def remove_abandoned(base: Path, before: Callable[[Path], object] = lambda _: None) -> list[Path]:
    """Removes folders that their process left behind when it was killed; returns them.

    A living process holds a lock on its folder, whatever pid namespace it runs in.
    """
    removed = []
    for path in base.glob(f"{_PREFIX}*"):
        if not path.is_dir() or path.lstat().st_uid != os.getuid():
            continue
        fd = _lock(path, wait=False)
        if fd is not None:
            before(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
            removed.append(path)
    return removed


def filesystem_of(path: Path) -> str:
    """Type of the file system that a path lies on, for example "tmpfs" (from /proc/self/mountinfo).

    Raises CONFIGURATION_INVALID when the path does not exist or the type cannot be found.
    """
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise configuration_invalid(f"cannot tell the file system of {path}: {exc.strerror}") from exc
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # "36 35 98:0 /root /mount options … - type source options" (proc_pid_mountinfo(5))
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    raise configuration_invalid(f"cannot tell the file system of {path}")
