"""Little-endian records: a bounds-checked reader and its writer.

Every length is compared with what is there before anything is allocated, so a hostile file cannot make
the reader allocate more than the file's own size.
"""

from __future__ import annotations

import struct

from sealmesh.security.errors import integrity_failure

_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """Reads fields one after another; every failure is INTEGRITY_FAILURE naming `what`."""

    def __init__(self, data: bytes | bytearray | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self.what = what

    @property
    def at(self) -> int:
        """Position of the next field, in bytes."""
        return self._at

    @property
    def remaining_bytes(self) -> int:
        return len(self._data) - self._at

    def take(self, length_bytes: int) -> bytes:
        if length_bytes > self.remaining_bytes:
            raise integrity_failure(f"{self.what} is cut short at byte {len(self._data)}")
        start = self._at
        self._at += length_bytes
        return bytes(self._data[start : self._at])

    def _number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def u8(self) -> int:
        return self._number(_U8)

    def u16(self) -> int:
        return self._number(_U16)

    def u32(self) -> int:
        return self._number(_U32)

    def u64(self) -> int:
        return self._number(_U64)

    def blob(self) -> bytes:
        """Bytes behind a u16 length."""
        return self.take(self.u16())

    def text(self) -> str:
        """UTF-8 behind a u16 length."""
        try:
            return self.blob().decode("utf-8")
        except UnicodeDecodeError as exc:
            raise integrity_failure(f"{self.what} holds text that is not UTF-8") from exc

    def rest(self) -> bytes:
        return self.take(self.remaining_bytes)

    def end(self) -> None:
        """Raises when bytes are left over."""
        if self.remaining_bytes:
            raise integrity_failure(f"{self.what} has {self.remaining_bytes} bytes too many")


class Packer:
    """Writes fields one after another. Raises ValueError for a value that its field cannot hold."""

    def __init__(self) -> None:
        self._data = bytearray()

    def raw(self, value: bytes) -> Packer:
        self._data += value
        return self

    def _number(self, form: struct.Struct, value: int) -> Packer:
        try:
            self._data += form.pack(value)
        except struct.error as exc:
            raise ValueError(f"{value} does not fit its {form.size}-byte field") from exc
        return self

    def u8(self, value: int) -> Packer:
        return self._number(_U8, value)

    def u16(self, value: int) -> Packer:
        return self._number(_U16, value)

    def u32(self, value: int) -> Packer:
        return self._number(_U32, value)

    def u64(self, value: int) -> Packer:
        return self._number(_U64, value)

    def blob(self, value: bytes) -> Packer:
        return self.u16(len(value)).raw(value)

    def text(self, value: str) -> Packer:
        return self.blob(value.encode("utf-8"))

    def __len__(self) -> int:
        return len(self._data)

    def bytes(self) -> bytes:
        return bytes(self._data)
