"""Preamble and index of one sealed file: which entry lies where, authenticated as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sealmesh.security.binary import Cursor, Packer
from sealmesh.security.errors import integrity_failure
from sealmesh.security.sealed.format import (
    DATA_ALIGNMENT_BYTES,
    FILE_ID_BYTES,
    FILE_MAGIC,
    MAC_BYTES,
    MAX_CHUNK_BYTES,
    MAX_DIMENSIONS,
    MAX_INDEX_BYTES,
    MAX_NAME_BYTES,
    MIN_CHUNK_BYTES,
    MODEL_ID_BYTES,
    PREAMBLE_BYTES,
    SUITE_SM4_GCM_SM3,
    VERSION,
    EntryKind,
    FileKind,
    tensor_size_bytes,
)
from sealmesh.security.sm4.engine import TAG_BYTES
from sealmesh.security.sm4.sm3 import sm3

# An entry with empty texts and no dimension; bounds how many entries an index can claim.
_MIN_ENTRY_BYTES = 1 + 2 + 2 + 1 + 8 + 8 + 8


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 64 bytes of a sealed file."""

    kind: FileKind
    model_id: bytes
    file_id: bytes
    file_number: int
    chunk_bytes: int
    index_bytes: int

    def encode(self) -> bytes:
        return (
            Packer()
            .raw(FILE_MAGIC)
            .u16(VERSION)
            .u16(SUITE_SM4_GCM_SM3)
            .u32(self.kind)
            .raw(self.model_id)
            .raw(self.file_id)
            .u32(self.file_number)
            .u32(self.chunk_bytes)
            .u32(self.index_bytes)
            .u32(0)
            .bytes()
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> Preamble:
        cursor = Cursor(data, what)
        if cursor.take(len(FILE_MAGIC)) != FILE_MAGIC:
            raise integrity_failure(f"{what} is not a sealed file (a plaintext file under a sealed name?)")
        version, suite = cursor.u16(), cursor.u16()
        if (version, suite) != (VERSION, SUITE_SM4_GCM_SM3):
            raise integrity_failure(f"{what} has format {version} and suite {suite}, not known here")
        kind = cursor.u32()
        if kind not in (FileKind.TENSORS, FileKind.BLOB):
            raise integrity_failure(f"{what} is of an unknown kind {kind}")
        model_id, file_id = cursor.take(MODEL_ID_BYTES), cursor.take(FILE_ID_BYTES)
        file_number, chunk_bytes, index_bytes, reserved = (
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
            cursor.u32(),
        )
        cursor.end()
        if chunk_bytes & (chunk_bytes - 1) or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise integrity_failure(f"{what} claims chunks of {chunk_bytes} bytes")
        if index_bytes > MAX_INDEX_BYTES or (PREAMBLE_BYTES + index_bytes + MAC_BYTES) % DATA_ALIGNMENT_BYTES:
            raise integrity_failure(f"{what} claims an index of {index_bytes} bytes")
        if reserved:
            raise integrity_failure(f"{what} has reserved bits set")
        return cls(FileKind(kind), model_id, file_id, file_number, chunk_bytes, index_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """A run of plaintext: a tensor, or raw bytes (a whole blob, or the header of a safetensors file)."""

    kind: EntryKind
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk's place. `offset_bytes` counts from the start of the data, in plaintext and ciphertext."""

    number: int
    entry: int
    in_entry: int
    last: bool
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """Preamble and index of a file, and what follows from them.

    Layout: preamble, index, MAC, data (entry after entry without gaps), tags (16 bytes a chunk).
    """

    preamble: Preamble
    path: str
    model_version: int
    entries: tuple[Entry, ...]
    offsets_bytes: tuple[int, ...]  # of each entry within the data
    first_chunks: tuple[int, ...]
    encoded: bytes  # preamble and index
    digest: bytes  # SM3 of `encoded`

    @classmethod
    def build(
        cls,
        *,
        kind: FileKind,
        model_id: bytes,
        file_id: bytes,
        file_number: int,
        chunk_bytes: int,
        path: str,
        model_version: int,
        entries: Sequence[Entry],
    ) -> FileIndex:
        """Lays out a new file. Raises ValueError for values that the format cannot hold."""
        packer = Packer().text(path).u64(model_version).u32(len(entries))
        first_chunk = 0
        for entry in entries:
            count = _chunk_count(entry.size_bytes, chunk_bytes)
            packer.u8(entry.kind).text(entry.name).text(entry.dtype).u8(len(entry.shape))
            for dimension in entry.shape:
                packer.u64(dimension)
            packer.u64(entry.size_bytes).u64(first_chunk).u64(count)
            first_chunk += count
        padding = -(PREAMBLE_BYTES + len(packer) + MAC_BYTES) % DATA_ALIGNMENT_BYTES
        body = packer.raw(bytes(padding)).bytes()
        if len(body) > MAX_INDEX_BYTES:
            raise ValueError(
                f"the index would take {len(body)} bytes; at most {MAX_INDEX_BYTES} are possible"
            )
        preamble = Preamble(kind, model_id, file_id, file_number, chunk_bytes, len(body))
        # Decoding what was just encoded applies every rule of the reader to the writer.
        return cls.decode(preamble.encode() + body, path)

    @classmethod
    def decode(cls, encoded: bytes, what: str) -> FileIndex:
        """Parses preamble and index; callers authenticate `encoded` by digest or MAC before they use it.

        Raises INTEGRITY_FAILURE naming `what`. Allocates no more than a small multiple of `encoded`.
        """
        preamble = Preamble.decode(encoded[:PREAMBLE_BYTES], what)
        cursor = Cursor(memoryview(encoded)[PREAMBLE_BYTES:], f"index of {what}")
        if cursor.remaining_bytes != preamble.index_bytes:
            raise integrity_failure(f"index of {what} has another length than its preamble says")
        path, model_version, count = cursor.text(), cursor.u64(), cursor.u32()
        if count > cursor.remaining_bytes // _MIN_ENTRY_BYTES:
            raise integrity_failure(f"index of {what} claims {count} entries and has no room for them")
        entries, offsets, first_chunks = [], [], []
        names: set[str] = set()
        offset = chunk = 0
        for _ in range(count):
            entry = _decode_entry(cursor)
            claimed = cursor.u64(), cursor.u64()
            chunks = _chunk_count(entry.size_bytes, preamble.chunk_bytes)
            if claimed != (chunk, chunks):
                raise integrity_failure(f"index of {what} contradicts itself about chunks", tensor=entry.name)
            if entry.name in names:
                raise integrity_failure(f"index of {what} names a tensor twice", tensor=entry.name)
            names.add(entry.name)
            entries.append(entry)
            offsets.append(offset)
            first_chunks.append(chunk)
            offset += entry.size_bytes
            chunk += chunks
        padding = cursor.rest()
        if len(padding) >= DATA_ALIGNMENT_BYTES or any(padding):
            raise integrity_failure(f"index of {what} has bytes behind its last entry")
        kinds = [entry.kind for entry in entries]
        further = len(kinds) - 1 if preamble.kind is FileKind.TENSORS else 0
        if kinds != [EntryKind.RAW] + [EntryKind.TENSOR] * further:
            raise integrity_failure(f"index of {what} has entries that do not suit its kind")
        return cls(
            preamble,
            path,
            model_version,
            tuple(entries),
            tuple(offsets),
            tuple(first_chunks),
            encoded,
            sm3(encoded),
        )

    @property
    def data_offset_bytes(self) -> int:
        """Where the data starts in the file; a multiple of 4,096."""
        return len(self.encoded) + MAC_BYTES

    @property
    def data_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def chunk_count(self) -> int:
        return sum(_chunk_count(entry.size_bytes, self.preamble.chunk_bytes) for entry in self.entries)

    @property
    def tags_offset_bytes(self) -> int:
        return self.data_offset_bytes + self.data_bytes

    @property
    def file_bytes(self) -> int:
        """The only size that the file may have."""
        return self.tags_offset_bytes + TAG_BYTES * self.chunk_count

    def chunks_of(self, entry: int) -> Iterator[Chunk]:
        """The chunks of one entry, in order."""
        size, step = self.entries[entry].size_bytes, self.preamble.chunk_bytes
        count = _chunk_count(size, step)
        for at in range(count):
            yield Chunk(
                number=self.first_chunks[entry] + at,
                entry=entry,
                in_entry=at,
                last=at == count - 1,
                offset_bytes=self.offsets_bytes[entry] + at * step,
                size_bytes=min(step, size - at * step),
            )

    def chunks(self) -> Iterator[Chunk]:
        """All chunks in order of the file."""
        return itertools.chain.from_iterable(self.chunks_of(entry) for entry in range(len(self.entries)))


def _chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


def _decode_entry(cursor: Cursor) -> Entry:
    kind, name, dtype, dimensions = cursor.u8(), cursor.text(), cursor.text(), cursor.u8()
    if len(name.encode("utf-8")) > MAX_NAME_BYTES or dimensions > MAX_DIMENSIONS:
        raise integrity_failure(f"{cursor.what} has an entry beyond the format's limits")
    shape = tuple(cursor.u64() for _ in range(dimensions))
    size = cursor.u64()
    if kind == EntryKind.TENSOR:
        if size != tensor_size_bytes(dtype, shape):
            raise integrity_failure(f"{cursor.what}: size does not follow from dtype and shape", tensor=name)
    elif kind != EntryKind.RAW or dtype or shape or name:
        raise integrity_failure(f"{cursor.what} has an entry of an unknown kind")
    return Entry(EntryKind(kind), name, dtype, shape, size)
