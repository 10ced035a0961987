"""Checks a sealed folder as a whole; without a key the ciphertext, with one every tag too."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sealmesh.security.files import Folder
from sealmesh.security.keys.signing import VerifyingKey
from sealmesh.security.keys.sources import KeySource
from sealmesh.security.memory import Region, wipe
from sealmesh.security.sealed.format import MANIFEST_NAME, SLOTS_NAME
from sealmesh.security.sealed.keyring import read_manifest_bytes, read_slots, unlock_data_key
from sealmesh.security.sealed.manifest import Manifest, ManifestFile
from sealmesh.security.sealed.openfile import OpenFile
from sealmesh.security.sealed.progress import Progress, no_progress
from sealmesh.security.sealed.writer import default_threads
from sealmesh.security.sm4.engine import Sm4GcmEngine
from sealmesh.security.sm4.select import select_engine
from sealmesh.security.sm4.sm3 import Sm3, bulk_sm3
from sealmesh.telemetry.runtime.errors import SealmeshError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of a verification. `problems` are single lines; empty means that everything holds."""

    folder: Path
    name: str
    version: int
    signer_key_id: str
    signer_pinned: bool
    tags_checked: bool
    file_count: int
    checked_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_folder(
    path: Path,
    *,
    pinned: Collection[VerifyingKey] | None,
    source: KeySource | None = None,
    progress: Progress = no_progress,
    threads: int | None = None,
    engine: Sm4GcmEngine | None = None,
) -> VerifyReport:
    """Checks signature, slot file, sizes, indexes, the SM3 of every file, and with `source` every tag.

    Goes on after a broken file, so that the report names them all. Needs no accelerator.

    Raises NOT_FOUND when the folder is not a sealed model, INTEGRITY_FAILURE when the manifest itself does
    not hold (nothing else can be judged then), KEY_SLOT_MISMATCH when the source opens no slot.
    """
    engine = engine or select_engine()
    problems: list[str] = []
    data_key: bytearray | None = None
    with Folder(path) as folder, ThreadPoolExecutor(threads or default_threads()) as pool:
        manifest = Manifest.decode(read_manifest_bytes(folder), f"manifest of {path}", pinned)
        if source is None:
            slots_path = str(path / SLOTS_NAME)
            _collect(problems, lambda: read_slots(folder).check_model(manifest.model_id, slots_path))
        else:
            data_key = unlock_data_key(folder, manifest, source, engine)
        try:
            problems += _unexpected(path, manifest)
            check = _Check(folder, manifest, data_key, engine)
            total, done = manifest.ciphertext_bytes, 0
            for listed, found in zip(manifest.files, pool.map(check.file, manifest.files), strict=True):
                problems += found
                done += listed.size_bytes
                progress(done, total)
        finally:
            if data_key is not None:
                wipe(data_key)
    return VerifyReport(
        folder=path,
        name=manifest.name,
        version=manifest.version,
        signer_key_id=manifest.signer.key_id,
        signer_pinned=pinned is not None,
        tags_checked=source is not None,
        file_count=len(manifest.files),
        checked_bytes=manifest.ciphertext_bytes,
        problems=tuple(problems),
    )


def _collect(problems: list[str], action: Callable[[], object]) -> None:
    try:
        action()
    except SealmeshError as exc:
        problems.append(exc.message)


def _unexpected(path: Path, manifest: Manifest) -> list[str]:
    known = {MANIFEST_NAME, SLOTS_NAME, *(file.sealed_path for file in manifest.files)}
    found = []
    for base, folders, names in os.walk(path):
        links = [name for name in folders if (Path(base) / name).is_symlink()]
        for name in sorted([*names, *links]):
            relative = (Path(base) / name).relative_to(path).as_posix()
            if relative not in known:
                found.append(f"{path / relative} does not belong to the model (not in the signed manifest)")
    return found


@dataclass(frozen=True)
class _Check:
    """Checks single files; safe to use from several threads."""

    folder: Folder
    manifest: Manifest
    data_key: bytearray | None
    engine: Sm4GcmEngine

    def file(self, listed: ManifestFile) -> list[str]:
        """The problems of one file."""
        problems: list[str] = []
        try:
            file = OpenFile.open(self.folder, self.manifest, listed)
        except SealmeshError as exc:
            return [exc.message]
        try:
            digest = bulk_sm3()()
            _collect(problems, lambda: _digest(file, digest))
            intact = not problems and digest.digest() == listed.sm3
            if not intact and not problems:
                problems.append(f"SM3 of the file is not the one that was signed (file {file.path})")
            if self.data_key is not None:
                self._tags(file, self.data_key, problems)
        finally:
            file.close()
        return problems

    def _tags(self, file: OpenFile, data_key: bytearray, problems: list[str]) -> None:
        scratch = bytearray(file.index.preamble.chunk_bytes)
        try:
            file.unlock(data_key, self.engine)
            for chunk in file.index.chunks():
                region = Region.of(scratch).slice(0, chunk.size_bytes)
                try:
                    file.open_chunk(chunk, region)
                except SealmeshError as exc:
                    problems.append(exc.message)
        except SealmeshError as exc:
            problems.append(exc.message)
        finally:
            wipe(scratch)


def _digest(file: OpenFile, digest: Sm3) -> None:
    block = memoryview(bytearray(_BLOCK_BYTES))
    for offset in range(0, file.listed.size_bytes, _BLOCK_BYTES):
        part = block[: min(_BLOCK_BYTES, file.listed.size_bytes - offset)]
        file.read_ciphertext(offset, part)
        digest.update(part)
