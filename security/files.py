"""File handling that resists tricks: atomic writes, private files, and paths that cannot escape."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from sealmesh.security.errors import configuration_invalid, integrity_failure, not_found

_MAX_PATH_CHARS = 512


def check_relative_path(path: str) -> PurePosixPath:
    """A path from a manifest as a relative POSIX path without any trick.

    Raises INTEGRITY_FAILURE for absolute paths, `..`, empty or dot parts, backslashes, control characters.
    """
    parts = path.split("/")
    bad = (
        not path
        or len(path) > _MAX_PATH_CHARS
        or "\\" in path
        or any(part in ("", ".", "..") for part in parts)
        or any(ord(char) < 32 or ord(char) == 127 for char in path)
    )
    if bad:
        raise integrity_failure(f"path {path!r} is not a plain relative path")
    return PurePosixPath(path)


class Folder:
    """A folder held open, below which files are opened without ever following a symbolic link.

    The folder itself may be reached through a link (`current -> v2`); it is resolved once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def open(self) -> Folder:
        """Opens the folder; raises NOT_FOUND when it is missing or is not a folder."""
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise not_found(f"cannot open folder {self.path}: {exc.strerror}") from exc
        return self

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Folder:
        return self if self._fd >= 0 else self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_file(self, path: str) -> int:
        """A read-only descriptor of a regular file below the folder; the caller closes it.

        Raises INTEGRITY_FAILURE for a missing file, a symbolic link on the way, or no regular file.
        """
        *folders, name = check_relative_path(path).parts
        at = self._fd
        try:
            for folder in folders:
                below = os.open(
                    folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
                )
                if at != self._fd:
                    os.close(at)
                at = below
            # O_NONBLOCK: a FIFO planted under the name must not hang the reader.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        except FileNotFoundError as exc:
            raise integrity_failure("a file of the model is missing", file=self.path / path) from exc
        except OSError as exc:
            raise integrity_failure(
                f"cannot open a file of the model ({exc.strerror}; symbolic links are refused)",
                file=self.path / path,
            ) from exc
        finally:
            if at != self._fd:
                os.close(at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise integrity_failure("not a regular file", file=self.path / path)
        return fd

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """A small file as a whole; raises INTEGRITY_FAILURE when it is larger than `max_bytes`."""
        fd = self.open_file(path)
        try:
            size = os.fstat(fd).st_size
            if size > max_bytes:
                raise integrity_failure(
                    f"file of {size} bytes is over its limit of {max_bytes}", file=self.path / path
                )
            return pread_exactly(fd, size, 0, self.path / path)
        finally:
            os.close(fd)


def pread_exactly(fd: int, length_bytes: int, offset_bytes: int, path: Path) -> bytes:
    """Reads exactly so many bytes; raises INTEGRITY_FAILURE when the file ends before."""
    buffer = bytearray(length_bytes)
    pread_into(fd, memoryview(buffer), offset_bytes, path)
    return bytes(buffer)


def pread_into(fd: int, target: memoryview, offset_bytes: int, path: Path) -> None:
    """Fills the target from the file; raises INTEGRITY_FAILURE when the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset_bytes + done)
        if count == 0:
            raise integrity_failure(f"file ends at byte {offset_bytes + done}, too early", file=path)
        done += count


def pwrite_all(fd: int, data: memoryview, offset_bytes: int) -> None:
    """Writes all of the data at the offset."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset_bytes + done)


def sync_folder(path: Path) -> None:
    """Makes renames in the folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write(path: Path, data: bytes | bytearray, *, mode: int, replace: bool = True) -> None:
    """Writes a file so that it is either absent (or old) or complete, also after a power cut.

    With `replace=False` raises FileExistsError when the file is already there, also when another process
    wins the race.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(fd, mode)
            pwrite_all(fd, memoryview(data), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def private_file(path: Path, what: str) -> Iterator[int]:
    """A descriptor of a secret's file, for reading.

    Raises CONFIGURATION_INVALID when it is missing, not a regular file, or open to group or others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise configuration_invalid(f"cannot read {what} {path}: {exc.strerror}") from exc
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise configuration_invalid(f"{what} {path} is not a regular file")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise configuration_invalid(
                f"{what} {path} is open to others (mode {mode:04o}); run: chmod 600 {path}"
            )
        yield fd
    finally:
        os.close(fd)


def read_private_file(path: Path, what: str, max_bytes: int = 64 * 1024) -> bytearray:
    """The bytes of a secret's file, for the caller to wipe; checks as `private_file`."""
    with private_file(path, what) as fd:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise configuration_invalid(
                f"{what} {path} is {size} bytes long; at most {max_bytes} are expected"
            )
        secret = bytearray(size)
        pread_into(fd, memoryview(secret), 0, path)
        return secret
