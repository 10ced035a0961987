"""Seals a plain model folder: streams every file through a thread pool, in bounded memory."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sealmesh.security.errors import invalid_request
from sealmesh.security.files import atomic_write, pread_into, pwrite_all
from sealmesh.security.keys.signing import Signer
from sealmesh.security.keys.slots import DATA_KEY_BYTES, SlotFile, key_commitment, make_slot
from sealmesh.security.keys.sources import KeySource
from sealmesh.security.memory import Region, Secret, wipe
from sealmesh.security.sealed.format import (
    CHUNK_BYTES,
    FILE_ID_BYTES,
    MANIFEST_NAME,
    MODEL_ID_BYTES,
    SLOTS_NAME,
    EntryKind,
    FileKeys,
    FileKind,
    chunk_aad,
    chunk_nonce,
    valid_model_name,
)
from sealmesh.security.sealed.index import Chunk, Entry, FileIndex
from sealmesh.security.sealed.manifest import Manifest, ManifestFile
from sealmesh.security.sealed.progress import Progress, no_progress
from sealmesh.security.sealed.safetensors import read_layout
from sealmesh.security.sealed.sources import SkippedFile, SourceFile, survey
from sealmesh.security.sealed.staging import staged_folder
from sealmesh.security.sm4.engine import Sm4GcmCipher, Sm4GcmEngine
from sealmesh.security.sm4.select import select_engine
from sealmesh.security.sm4.sm3 import Sm3, bulk_sm3, hmac_sm3


@dataclass(frozen=True)
class SealReport:
    """What a sealing did."""

    folder: Path
    name: str
    version: int
    model_id: bytes
    manifest_digest: bytes
    signer_key_id: str
    file_count: int
    tensor_count: int
    plaintext_bytes: int
    ciphertext_bytes: int
    engine: str
    seconds: float
    skipped: tuple[SkippedFile, ...]


@dataclass(frozen=True)
class _Offset:
    """Progress of one file as progress of the whole."""

    progress: Progress
    done_bytes: int
    total_bytes: int

    def __call__(self, file_bytes: int) -> None:
        self.progress(self.done_bytes + file_bytes, self.total_bytes)


def default_threads() -> int:
    """Threads for sealing and opening: the CPUs that this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


def seal_folder(
    source: Path,
    target: Path,
    *,
    slots: Sequence[KeySource],
    signer: Signer,
    name: str,
    version: int,
    progress: Progress = no_progress,
    overwrite: bool = False,
    allow_code: bool = False,
    threads: int | None = None,
    engine: Sm4GcmEngine | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> SealReport:
    """Seals a plain model folder into `target`, under a fresh data key.

    Args:
        source: folder with safetensors files, configuration and tokenizer; only read.
        target: folder to make; complete or absent, whatever happens.
        slots: the roots that will open the model, at least one.
        signer: signs the manifest.
        name: served name of the model; letters, digits, `.`, `_`, `-`.
        version: at least 1; higher for later sealings of the same name.
        progress: gets plaintext bytes done and in all.
        overwrite: replace a target that is not empty.
        allow_code: seal `*.py` files too.

    Raises SealmeshError: ALREADY_EXISTS, NOT_FOUND, INVALID_REQUEST (nothing to seal, malformed
    safetensors, too little disk), CONFIGURATION_INVALID (target cannot be written).
    """
    if not valid_model_name(name):
        raise invalid_request(f"{name!r} is not a model name: letters, digits, '.', '_', '-', at most 128")
    if not 1 <= version < 1 << 63:
        raise invalid_request(f"version {version} is out of range; versions start at 1")
    if not slots:
        raise invalid_request("a sealed model needs at least one key slot")
    resolved, inside = target.resolve(), source.resolve()
    if resolved == inside or inside in resolved.parents or resolved in inside.parents:
        raise invalid_request(f"{target} and {source} must not contain each other")
    files, skipped = survey(source, allow_code=allow_code)
    engine = engine or select_engine()
    started = time.monotonic()
    total = sum(file.size_bytes for file in files)
    with ExitStack() as stack:
        staging = stack.enter_context(
            staged_folder(
                target, overwrite=overwrite, mode=0o755, need_bytes=total + total // 1000 + (1 << 20)
            )
        )
        data_key = bytearray(secrets.token_bytes(DATA_KEY_BYTES))
        stack.callback(wipe, data_key)
        model_id = secrets.token_bytes(MODEL_ID_BYTES)
        sealer = _FolderSealer(
            source, staging, model_id, version, data_key, engine, threads or default_threads(), chunk_bytes
        )
        stack.callback(sealer.close)
        sealed = []
        done = 0
        for number, file in enumerate(files):
            sealed.append(sealer.seal(number, file, _Offset(progress, done, total)))
            done += sealed[-1].plaintext_bytes
        made = [
            make_slot(slot, model_id=model_id, data_key=data_key, engine=engine, label=slot.kind.label)
            for slot in slots
        ]
        slot_file = SlotFile.build(model_id, made, data_key)
        manifest = Manifest.sign(
            signer,
            model_id=model_id,
            name=name,
            version=version,
            created_s=int(time.time()),
            key_commitment=key_commitment(data_key, model_id),
            files=sealed,
        )
        atomic_write(staging / SLOTS_NAME, slot_file.encode(), mode=0o644)
        atomic_write(staging / MANIFEST_NAME, manifest.encoded, mode=0o644)
        progress(total, total)
    return SealReport(
        folder=target,
        name=name,
        version=version,
        model_id=model_id,
        manifest_digest=manifest.digest,
        signer_key_id=manifest.signer.key_id,
        file_count=len(sealed),
        tensor_count=sealer.tensor_count,
        plaintext_bytes=manifest.plaintext_bytes,
        ciphertext_bytes=manifest.ciphertext_bytes,
        engine=engine.name,
        seconds=time.monotonic() - started,
        skipped=tuple(skipped),
    )


def _open_source(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise invalid_request(f"cannot read {path}: {exc.strerror}") from exc


class _FolderSealer:
    """Seals the files of one model one after another, the chunks of each in parallel.

    The calling thread hashes the ciphertext in order while the pool reads, encrypts and writes.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        model_id: bytes,
        version: int,
        data_key: Secret,
        engine: Sm4GcmEngine,
        threads: int,
        chunk_bytes: int,
    ) -> None:
        self._source = source
        self._target = target
        self._model_id = model_id
        self._version = version
        self._data_key = data_key
        self._engine = engine
        self._chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="seal")
        self._window = 2 * threads + 2
        self._free: deque[bytearray] = deque()
        self._new_sm3 = bulk_sm3()
        self.tensor_count = 0

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def seal(self, number: int, file: SourceFile, progress: _Offset) -> ManifestFile:
        """Seals one file and says what the manifest must know of it."""
        path = self._source / file.path
        target = self._target / (file.path + ".sealed")
        target.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            source_fd = _open_source(path)
            stack.callback(os.close, source_fd)
            index = self._lay_out(number, file, source_fd, path)
            keys = FileKeys(self._data_key, self._model_id, index.preamble.file_id)
            stack.callback(keys.close)
            cipher = self._engine.new_cipher(keys.chunk_key)
            stack.callback(cipher.close)
            target_fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, target_fd)
            digest = self._new_sm3()
            head = index.encoded + hmac_sm3(keys.index_key, index.encoded)
            pwrite_all(target_fd, memoryview(head), 0)
            digest.update(head)
            tags = self._seal_chunks(index, cipher, source_fd, path, target_fd, digest, progress)
            pwrite_all(target_fd, memoryview(tags), index.tags_offset_bytes)
            digest.update(tags)
            if os.fstat(source_fd).st_size != index.data_bytes:
                raise invalid_request(f"{path} changed while it was sealed; try again")
            os.fsync(target_fd)
        return ManifestFile(
            kind=file.kind,
            path=file.path,
            file_id=index.preamble.file_id,
            file_number=number,
            plaintext_bytes=index.data_bytes,
            size_bytes=index.file_bytes,
            sm3=digest.digest(),
            index_bytes=index.preamble.index_bytes,
            index_digest=index.digest,
        )

    def _lay_out(self, number: int, file: SourceFile, fd: int, path: Path) -> FileIndex:
        if file.kind is FileKind.TENSORS:
            layout = read_layout(fd, path)
            entries = layout.entries
            self.tensor_count += layout.tensor_count
        else:
            entries = (Entry(EntryKind.RAW, "", "", (), os.fstat(fd).st_size),)
        try:
            return FileIndex.build(
                kind=file.kind,
                model_id=self._model_id,
                file_id=secrets.token_bytes(FILE_ID_BYTES),
                file_number=number,
                chunk_bytes=self._chunk_bytes,
                path=file.path,
                model_version=self._version,
                entries=entries,
            )
        except ValueError as exc:
            raise invalid_request(f"{path} cannot be sealed: {exc}") from exc

    def _seal_chunks(
        self,
        index: FileIndex,
        cipher: Sm4GcmCipher,
        source_fd: int,
        path: Path,
        target_fd: int,
        digest: Sm3,
        progress: _Offset,
    ) -> bytearray:
        tags = bytearray()
        pending: deque[tuple[Chunk, bytearray, Future[bytes]]] = deque()

        def seal_one(chunk: Chunk, buffer: bytearray) -> bytes:
            region = Region.of(buffer).slice(0, chunk.size_bytes)
            # Entries lie in the data as they lie in the source file, so offsets are the same.
            pread_into(source_fd, region.view, chunk.offset_bytes, path)
            tag = cipher.seal_into(
                chunk_nonce(index.preamble.file_number, chunk.number),
                chunk_aad(index.digest, index.preamble.file_id, chunk.entry, chunk.in_entry, chunk.last),
                region,
            )
            pwrite_all(target_fd, region.view, index.data_offset_bytes + chunk.offset_bytes)
            return tag

        def finish_one() -> None:
            chunk, buffer, future = pending.popleft()
            tags.extend(future.result())
            digest.update(memoryview(buffer)[: chunk.size_bytes])
            self._free.append(buffer)
            progress(chunk.offset_bytes + chunk.size_bytes)

        try:
            for chunk in index.chunks():
                if len(pending) >= self._window:
                    finish_one()
                buffer = self._free.popleft() if self._free else bytearray(self._chunk_bytes)
                pending.append((chunk, buffer, self._pool.submit(seal_one, chunk, buffer)))
            while pending:
                finish_one()
        finally:
            # After a failure the descriptors are about to be closed: no job may still use them.
            for _, _, future in pending:
                if not future.cancel():
                    future.exception()
        return tags
