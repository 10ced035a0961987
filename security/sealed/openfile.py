"""One sealed file held open: checked against the signed manifest, then decrypted chunk by chunk in place."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sealmesh.security.errors import integrity_failure
from sealmesh.security.files import Folder, pread_exactly, pread_into
from sealmesh.security.memory import Region, Secret, wipe
from sealmesh.security.sealed.format import (
    MAC_BYTES,
    PREAMBLE_BYTES,
    EntryKind,
    FileKeys,
    FileKind,
    chunk_aad,
    chunk_nonce,
)
from sealmesh.security.sealed.index import Chunk, FileIndex, Preamble
from sealmesh.security.sealed.manifest import Manifest, ManifestFile
from sealmesh.security.sm4.engine import TAG_BYTES, Sm4GcmCipher, Sm4GcmEngine, TagMismatchError
from sealmesh.security.sm4.sm3 import equal, hmac_sm3, sm3


class OpenFile:
    """A sealed file. Reading is positional, so any number of threads may open chunks at once."""

    def __init__(self, listed: ManifestFile, path: Path, fd: int, index: FileIndex) -> None:
        self.listed = listed
        self.path = path
        self.index = index
        self._fd = fd
        self._cipher: Sm4GcmCipher | None = None
        self._tags = b""

    @classmethod
    def open(cls, folder: Folder, manifest: Manifest, listed: ManifestFile) -> OpenFile:
        """Opens a file and checks its size and index against the manifest; needs no key.

        Allocates what the signed manifest says the index takes, and only when the file is that long.
        """
        path = folder.path / listed.sealed_path
        fd = folder.open_file(listed.sealed_path)
        try:
            size = os.fstat(fd).st_size
            # First the preamble: a plaintext file under a sealed name deserves its own words.
            Preamble.decode(pread_exactly(fd, min(size, PREAMBLE_BYTES), 0, path), str(path))
            if size != listed.size_bytes:
                word = "cut short" if size < listed.size_bytes else "too long"
                raise integrity_failure(
                    f"file is {word}: {size} bytes where the manifest says {listed.size_bytes}", file=path
                )
            encoded = pread_exactly(fd, PREAMBLE_BYTES + listed.index_bytes, 0, path)
            if sm3(encoded) != listed.index_digest:
                raise integrity_failure(
                    "preamble or index is not the one that was signed (edited, or a file of another model)",
                    file=path,
                )
            index = FileIndex.decode(encoded, str(path))
            found = (
                index.preamble.kind,
                index.preamble.model_id,
                index.preamble.file_id,
                index.preamble.file_number,
                index.path,
                index.model_version,
                index.data_bytes,
                index.file_bytes,
            )
            expected = (
                listed.kind,
                manifest.model_id,
                listed.file_id,
                listed.file_number,
                listed.path,
                manifest.version,
                listed.plaintext_bytes,
                listed.size_bytes,
            )
            if found != expected:
                raise integrity_failure("index and manifest contradict each other", file=path)
            return cls(listed, path, fd, index)
        except BaseException:
            os.close(fd)
            raise

    def unlock(self, data_key: Secret, engine: Sm4GcmEngine) -> None:
        """Derives the file's keys, checks the MAC of the index and the header, and reads the tags."""
        keys = FileKeys(data_key, self.index.preamble.model_id, self.index.preamble.file_id)
        try:
            mac = pread_exactly(self._fd, MAC_BYTES, len(self.index.encoded), self.path)
            if not equal(mac, hmac_sm3(keys.index_key, self.index.encoded)):
                raise integrity_failure("the MAC of the index does not verify", file=self.path)
            self._tags = pread_exactly(
                self._fd, TAG_BYTES * self.index.chunk_count, self.index.tags_offset_bytes, self.path
            )
            self._cipher = engine.new_cipher(keys.chunk_key)
        finally:
            keys.close()
        if self.listed.kind is FileKind.TENSORS:
            self._check_headers()

    def _check_headers(self) -> None:
        """Opens and drops the safetensors header, which no reader of tensors would ever look at."""
        scratch = bytearray(self.index.preamble.chunk_bytes)
        try:
            for number, entry in enumerate(self.index.entries):
                if entry.kind is EntryKind.RAW:
                    for chunk in self.index.chunks_of(number):
                        self.open_chunk(chunk, Region.of(scratch).slice(0, chunk.size_bytes))
        finally:
            wipe(scratch)

    def open_chunk(self, chunk: Chunk, region: Region) -> None:
        """Reads a chunk into the region (of the chunk's size) and decrypts it there.

        Raises INTEGRITY_FAILURE naming file, tensor and chunk; the region is zeroed then.
        """
        if self._cipher is None:
            raise RuntimeError("the file is not unlocked")
        index = self.index
        try:
            pread_into(self._fd, region.view, index.data_offset_bytes + chunk.offset_bytes, self.path)
            self._cipher.open_into(
                chunk_nonce(index.preamble.file_number, chunk.number),
                chunk_aad(index.digest, index.preamble.file_id, chunk.entry, chunk.in_entry, chunk.last),
                region,
                self._tags[TAG_BYTES * chunk.number : TAG_BYTES * (chunk.number + 1)],
            )
        except TagMismatchError:
            raise integrity_failure(
                "ciphertext or tag was changed",
                file=self.path,
                tensor=index.entries[chunk.entry].name,
                chunk=chunk.in_entry,
            ) from None
        except BaseException:
            region.zero()
            raise

    def open_chunks(self, chunks: Iterable[Chunk], region: Region) -> None:
        """Opens chunks of one entry into the entry's region."""
        for chunk in chunks:
            start = chunk.offset_bytes - self.index.offsets_bytes[chunk.entry]
            self.open_chunk(chunk, region.slice(start, chunk.size_bytes))

    def read_ciphertext(self, offset_bytes: int, target: memoryview) -> None:
        """Raw bytes of the file."""
        pread_into(self._fd, target, offset_bytes, self.path)

    def close(self) -> None:
        """Wipes the keys and closes the file. May be called twice."""
        if self._cipher is not None:
            self._cipher.close()
            self._cipher = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
