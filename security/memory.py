"""Writable memory that cryptography works on in place, and wiping of secrets."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple


class RawMemory(NamedTuple):
    """Memory named by its address, such as a tensor's `data_ptr()`; the caller keeps it alive."""

    address: int
    length_bytes: int


# What callers may hand in as a target: `memoryview(array)` covers numpy, mmap and ctypes arrays.
Target = bytearray | memoryview | RawMemory
Secret = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous writable span of bytes, as a view (for file I/O) and as an address (for C)."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, target: Target) -> Region:
        """The region of a target.

        Raises TypeError when the target is read-only or not contiguous: sealing and opening are in place.
        """
        if isinstance(target, RawMemory):
            if target.length_bytes == 0:
                return cls(memoryview(bytearray()), target.address)
            array = (ctypes.c_ubyte * target.length_bytes).from_address(target.address)
            return cls(memoryview(array).cast("B"), target.address)
        view = memoryview(target)
        if view.readonly:
            raise TypeError("the target must be writable")
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if len(view) == 0:
            return cls(view, 0)
        return cls(view, ctypes.addressof(ctypes.c_ubyte.from_buffer(view)))

    @property
    def length_bytes(self) -> int:
        return len(self.view)

    def slice(self, offset_bytes: int, length_bytes: int) -> Region:
        """A part of the region; raises ValueError when it does not lie inside."""
        if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > len(self.view):
            raise ValueError("slice outside the region")
        return Region(self.view[offset_bytes : offset_bytes + length_bytes], self.address + offset_bytes)

    def zero(self) -> None:
        """Overwrites the region with zeros."""
        if len(self.view):
            ctypes.memset(self.address, 0, len(self.view))


def wipe(secret: bytearray) -> None:
    """Overwrites a secret in place. Copies that Python or a library made elsewhere are out of reach."""
    Region.of(secret).zero()
