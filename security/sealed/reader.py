"""Opens sealed models: verifies manifest, indexes and tags; decrypts straight into the caller's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sealmesh.security.errors import integrity_failure, invalid_request, not_found
from sealmesh.security.files import Folder
from sealmesh.security.keys.signing import VerifyingKey
from sealmesh.security.keys.slots import key_commitment
from sealmesh.security.keys.sources import KeySource
from sealmesh.security.memory import Region, Secret, Target, wipe
from sealmesh.security.sealed.format import EntryKind, FileKind
from sealmesh.security.sealed.keyring import read_manifest_bytes, unlock_data_key
from sealmesh.security.sealed.manifest import Manifest
from sealmesh.security.sealed.openfile import OpenFile
from sealmesh.security.sealed.progress import Progress, no_progress
from sealmesh.security.sealed.writer import default_threads
from sealmesh.security.sm4.engine import Sm4GcmEngine
from sealmesh.security.sm4.select import select_engine
from sealmesh.security.sm4.sm3 import equal

T = TypeVar("T")

# Chunks of one tensor that one job opens: enough to make a job's cost vanish, few enough to spread.
_CHUNKS_PER_JOB = 4
DEFAULT_LOOKAHEAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the signed index describes it."""

    name: str
    dtype: str  # as in safetensors, for example "BF16"
    shape: tuple[int, ...]
    size_bytes: int
    file: str  # plaintext path of the safetensors file that holds it


class SealedModel:
    """A sealed model whose manifest and indexes are verified; `open_sealed` makes it.

    Use as a context manager, or call `close`: it wipes the keys.
    """

    def __init__(
        self, path: Path, manifest: Manifest, files: dict[str, OpenFile], engine: Sm4GcmEngine
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.engine = engine
        self._files = files
        self._unlocked = False
        self._tensors: dict[str, tuple[TensorInfo, OpenFile, int]] = {}
        for file in files.values():
            for number, entry in enumerate(file.index.entries):
                if entry.kind is not EntryKind.TENSOR:
                    continue
                if entry.name in self._tensors:
                    raise integrity_failure(
                        "two files hold the same tensor", file=file.path, tensor=entry.name
                    )
                info = TensorInfo(entry.name, entry.dtype, entry.shape, entry.size_bytes, file.listed.path)
                self._tensors[entry.name] = (info, file, number)

    def verify_manifest(self, pinned: Collection[VerifyingKey]) -> None:
        """Checks that one of these keys signed the manifest; raises INTEGRITY_FAILURE otherwise."""
        Manifest.decode(self.manifest.encoded, f"manifest of {self.path}", pinned)

    def unlock(self, source: KeySource) -> None:
        """Opens the data key through a slot and derives the files' keys.

        Raises KEY_SLOT_MISMATCH when no slot opens with the source, INTEGRITY_FAILURE for a foreign or
        changed slot file or an index whose MAC does not verify.
        """
        with Folder(self.path) as folder:
            data_key = unlock_data_key(folder, self.manifest, source, self.engine)
        try:
            self.unlock_with(data_key)
        finally:
            wipe(data_key)

    def unlock_with(self, data_key: Secret) -> None:
        """Takes the data key itself (32 bytes; wipe yours afterwards), as the vault releases it."""
        if not equal(key_commitment(data_key, self.manifest.model_id), self.manifest.key_commitment):
            raise integrity_failure(f"the key is not the one of the manifest of {self.path}")
        for file in self._files.values():
            file.unlock(data_key, self.engine)
        self._unlocked = True

    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, file after file, in order of their place in it."""
        return tuple(info for info, _, _ in self._tensors.values())

    def files(self) -> tuple[OpenFile, ...]:
        """All sealed files in order of the manifest."""
        return tuple(self._files.values())

    def _tensor(self, name: str) -> tuple[TensorInfo, OpenFile, int]:
        if not self._unlocked:
            raise RuntimeError("the model is not unlocked")
        try:
            return self._tensors[name]
        except KeyError:
            raise not_found(f"{self.path} has no tensor {name!r}") from None

    def read_tensor_into(self, name: str, target: Target) -> None:
        """Decrypts a tensor into memory of exactly its size, in this thread.

        Raises INTEGRITY_FAILURE naming file, tensor and chunk; the whole target is zeroed then.
        """
        info, file, entry = self._tensor(name)
        region = _region_of(info, target)
        try:
            file.open_chunks(file.index.chunks_of(entry), region)
        except BaseException:
            region.zero()
            raise

    def stream_tensors(
        self,
        allocate: Callable[[TensorInfo], tuple[T, Target]],
        *,
        names: Iterable[str] | None = None,
        threads: int | None = None,
        lookahead_bytes: int = DEFAULT_LOOKAHEAD_BYTES,
        progress: Progress = no_progress,
    ) -> Iterator[tuple[TensorInfo, T]]:
        """Yields tensors in order while a thread pool decrypts the next ones.

        Args:
            allocate: makes the caller's object for a tensor and names its memory (exactly the tensor's
                size); called in order, from the consumer's thread. The object keeps the memory alive.
            names: which tensors and in what order; all by default.
            threads: of the pool; by default the CPUs that this process may use, at most 8.
            lookahead_bytes: how much may be allocated beyond the tensor that the consumer waits for.
            progress: gets bytes yielded and in all.

        A tensor is yielded only when all of its tags have verified. On failure raises INTEGRITY_FAILURE,
        and every tensor not yet yielded is zeroed.
        """
        wanted = [self._tensor(name) for name in (self._tensors if names is None else names)]
        total = sum(info.size_bytes for info, _, _ in wanted)
        done = in_flight = 0
        pending: deque[tuple[TensorInfo, T, Region, list[Future[None]]]] = deque()
        upcoming = iter(wanted)
        following = next(upcoming, None)
        pool = ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="unseal")
        try:
            while following is not None or pending:
                while following is not None and (
                    not pending or in_flight + following[0].size_bytes <= lookahead_bytes
                ):
                    info, file, entry = following
                    made, target = allocate(info)
                    region = _region_of(info, target)
                    chunks = file.index.chunks_of(entry)
                    futures: list[Future[None]] = []
                    pending.append((info, made, region, futures))
                    while run := list(islice(chunks, _CHUNKS_PER_JOB)):
                        futures.append(pool.submit(file.open_chunks, run, region))
                    in_flight += info.size_bytes
                    following = next(upcoming, None)
                info, made, region, futures = pending[0]
                for future in futures:
                    future.result()
                pending.popleft()
                in_flight -= info.size_bytes
                done += info.size_bytes
                progress(done, total)
                yield info, made
        finally:
            # Reached with tensors pending only on failure or when the consumer stops early. First no job
            # may write any more, then nothing may be left behind.
            pool.shutdown(wait=True, cancel_futures=True)
            for _, _, region, _ in pending:
                region.zero()

    def read_file(self, path: str) -> bytearray:
        """A sealed configuration, tokenizer or other small file as a whole; the caller may wipe it.

        Raises NOT_FOUND when the model has no such file, INTEGRITY_FAILURE when it was changed.
        """
        if not self._unlocked:
            raise RuntimeError("the model is not unlocked")
        file = self._files.get(path)
        if file is None or file.listed.kind is not FileKind.BLOB:
            raise not_found(f"{self.path} has no sealed file {path!r}")
        content = bytearray(file.index.data_bytes)
        file.open_chunks(file.index.chunks_of(0), Region.of(content))
        return content

    def close(self) -> None:
        """Wipes the keys and closes the files. May be called twice."""
        self._unlocked = False
        for file in self._files.values():
            file.close()

    def __enter__(self) -> SealedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _region_of(info: TensorInfo, target: Target) -> Region:
    region = Region.of(target)
    if region.length_bytes != info.size_bytes:
        raise invalid_request(
            f"tensor {info.name!r} has {info.size_bytes} bytes, its target {region.length_bytes}"
        )
    return region


def open_sealed(
    path: Path,
    *,
    pinned: Collection[VerifyingKey] | None,
    manifest: bytes | None = None,
    engine: Sm4GcmEngine | None = None,
) -> SealedModel:
    """Opens a sealed folder: verifies the signature, then every file's size and index. Needs no key yet.

    Args:
        path: the sealed folder.
        pinned: keys that may have signed the model. None accepts any signer: only for looking, never
            for serving.
        manifest: the manifest to go by, as the vault sent it; by default the folder's own.
        engine: SM4 engine; by default the fastest.

    Raises NOT_FOUND when the folder is not a sealed model, INTEGRITY_FAILURE naming the file otherwise.
    """
    engine = engine or select_engine()
    files: dict[str, OpenFile] = {}
    with Folder(path) as folder:
        encoded = read_manifest_bytes(folder) if manifest is None else manifest
        verified = Manifest.decode(encoded, f"manifest of {path}", pinned)
        try:
            for listed in verified.files:
                files[listed.path] = OpenFile.open(folder, verified, listed)
            return SealedModel(path, verified, files, engine)
        except BaseException:
            for file in files.values():
                file.close()
            raise
