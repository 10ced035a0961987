"""Writes a sealed model back in the clear: explicit, for recovery and moving away; never used for serving."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sealmesh.security.files import pwrite_all, sync_folder
from sealmesh.security.memory import Region, wipe
from sealmesh.security.sealed.index import Chunk
from sealmesh.security.sealed.openfile import OpenFile
from sealmesh.security.sealed.progress import Progress, no_progress
from sealmesh.security.sealed.reader import SealedModel
from sealmesh.security.sealed.staging import staged_folder
from sealmesh.security.sealed.writer import default_threads


@dataclass(frozen=True)
class UnsealReport:
    """What an unsealing did."""

    folder: Path
    name: str
    version: int
    file_count: int
    plaintext_bytes: int
    seconds: float


def unseal_folder(
    model: SealedModel,
    target: Path,
    *,
    overwrite: bool = False,
    progress: Progress = no_progress,
    threads: int | None = None,
) -> UnsealReport:
    """Writes the plaintext of an unlocked model; every file comes out byte for byte as it was sealed.

    Every tag is verified before its chunk is written; after a failure nothing is left. Files get mode
    0600 and the folder 0700: they hold the weights in the clear.

    Raises ALREADY_EXISTS for a target that is not empty, INTEGRITY_FAILURE naming file, tensor and chunk.
    """
    started = time.monotonic()
    total = model.manifest.plaintext_bytes
    done = 0
    workers = threads or default_threads()
    with (
        staged_folder(target, overwrite=overwrite, mode=0o700, need_bytes=total + (1 << 20)) as staging,
        ThreadPoolExecutor(workers, thread_name_prefix="unseal") as pool,
    ):
        for file in model.files():
            path = staging / file.listed.path
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for size in _write_chunks(file, fd, pool, 2 * workers):
                    done += size
                    progress(done, total)
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(path.parent)
    return UnsealReport(
        folder=target,
        name=model.manifest.name,
        version=model.manifest.version,
        file_count=len(model.manifest.files),
        plaintext_bytes=total,
        seconds=time.monotonic() - started,
    )


def _write_chunks(file: OpenFile, fd: int, pool: ThreadPoolExecutor, window: int) -> Iterator[int]:
    """Opens and writes the chunks of a file; yields the size of each that is done, in order."""

    def write_one(chunk: Chunk) -> int:
        buffer = bytearray(chunk.size_bytes)
        try:
            file.open_chunk(chunk, Region.of(buffer))
            pwrite_all(fd, memoryview(buffer), chunk.offset_bytes)
        finally:
            wipe(buffer)
        return chunk.size_bytes

    pending: deque[Future[int]] = deque()
    try:
        for chunk in file.index.chunks():
            if len(pending) >= window:
                yield pending.popleft().result()
            pending.append(pool.submit(write_one, chunk))
        while pending:
            yield pending.popleft().result()
    finally:
        # After a failure the descriptor is about to be closed: no job may still use it.
        for future in pending:
            if not future.cancel():
                future.exception()
