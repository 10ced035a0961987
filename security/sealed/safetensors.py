"""A bounded parser of safetensors headers. It needs neither torch nor the safetensors package.

Format: 8 bytes little-endian header length, JSON header, data; tensors cover the data without gaps
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from sealmesh.security.errors import invalid_request
from sealmesh.security.files import pread_exactly
from sealmesh.security.sealed.format import MAX_DIMENSIONS, MAX_NAME_BYTES, EntryKind, tensor_size_bytes
from sealmesh.security.sealed.index import Entry

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class SafetensorsLayout:
    """Entries in order of the file: the header itself first (raw), then the tensors by offset."""

    entries: tuple[Entry, ...]

    @property
    def tensor_count(self) -> int:
        return len(self.entries) - 1


def read_layout(fd: int, path: Path) -> SafetensorsLayout:
    """Parses the header of an open safetensors file.

    Raises INVALID_REQUEST naming the file when it is not a well-formed safetensors file.
    """
    size = os.fstat(fd).st_size
    if size < 8:
        raise invalid_request(f"{path} is not a safetensors file: it has {size} bytes")
    header_bytes = int.from_bytes(pread_exactly(fd, 8, 0, path), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise invalid_request(
            f"{path} is not a safetensors file, or it is cut: header of {header_bytes} bytes"
        )
    try:
        header = json.loads(pread_exactly(fd, header_bytes, 8, path), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as exc:
        raise invalid_request(f"{path} has a header that is not valid JSON: {exc}") from exc
    if not isinstance(header, dict):
        raise invalid_request(f"{path} has a header that is not an object")
    header.pop("__metadata__", None)
    placed = sorted((_entry(name, value, path) for name, value in header.items()), key=lambda item: item[0])
    expected = 0
    for (begin, end), entry in placed:
        if begin != expected:
            raise invalid_request(f"{path}: tensor {entry.name!r} leaves a gap or overlaps another")
        expected = end
    if expected != size - 8 - header_bytes:
        raise invalid_request(
            f"{path} has {size - 8 - header_bytes} bytes of data, its header describes {expected}; is it cut?"
        )
    head = Entry(EntryKind.RAW, "", "", (), 8 + header_bytes)
    return SafetensorsLayout((head, *(entry for _, entry in placed)))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _entry(name: str, value: object, path: Path) -> tuple[tuple[int, int], Entry]:
    bad = invalid_request(f"{path}: tensor {name[:80]!r} has a malformed description")
    if not isinstance(value, dict) or not 0 < len(name.encode("utf-8")) <= MAX_NAME_BYTES:
        raise bad
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets):
        raise bad
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    size = tensor_size_bytes(dtype, tuple(shape))
    if size is None:
        raise invalid_request(f"{path}: tensor {name!r} has dtype {dtype!r}, which is not known here")
    if len(shape) > MAX_DIMENSIONS or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise bad
    return (offsets[0], offsets[1]), Entry(EntryKind.TENSOR, name, dtype, tuple(shape), size)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 63 for item in value
    )
