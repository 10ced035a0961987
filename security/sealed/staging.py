"""Output folders that are either complete or absent: written beside their place, renamed into it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from sealmesh.security.errors import already_exists, configuration_invalid, invalid_request
from sealmesh.security.files import sync_folder


@contextmanager
def staged_folder(target: Path, *, overwrite: bool, mode: int, need_bytes: int) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its place when the block ends without an exception.

    After a failure nothing of it is left. Raises ALREADY_EXISTS when the target is there and not empty and
    `overwrite` is false, CONFIGURATION_INVALID when it cannot be written or the disk is too small.
    """
    target = target.absolute()
    if target.exists() and not target.is_dir():
        raise already_exists(f"{target} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise already_exists(f"{target} is not empty; choose another folder, or use --overwrite")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        free = shutil.disk_usage(target.parent).free
        if free < need_bytes:
            raise invalid_request(f"{target.parent} has {free} bytes free; {need_bytes} are needed")
        staging = _sibling(target, "staging")
        staging.mkdir(mode=mode)
        try:
            yield staging
            sync_folder(staging)
            _take_place(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        sync_folder(target.parent)
    except OSError as exc:
        raise configuration_invalid(f"cannot write {target}: {exc.strerror or exc}") from exc


def _sibling(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}.{role}-{os.getpid()}-{secrets.token_hex(4)}")


def _take_place(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    old = _sibling(target, "replaced")
    target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Removes staging folders of this target whose process was killed; `replaced` ones hold old data."""
    pattern = re.compile(re.escape(f".{target.name}.staging-") + r"(\d+)-[0-9a-f]{8}")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
