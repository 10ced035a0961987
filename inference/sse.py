"""Server-sent events, parsed as bytes arrive (WHATWG HTML, section 9.2.6, the parts that OpenAI uses)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["SseParser"]

_MAX_EVENT_BYTES: Final = 64 << 20


class SseParser:
    """Turns a byte stream, cut anywhere, into the data of its events.

    Lines end in LF, CRLF or CR; comments and fields other than `data` are ignored; several data lines are
    joined by LF. An event counts only once its blank line has come.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of every event that `chunk` completes.

        Raises:
            ValueError: a line or an event of more than 64 MiB.
        """
        self._buffer += chunk
        for line in self._lines():
            if not line:
                if self._data:
                    data, self._data = b"\n".join(self._data), []
                    yield data
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        if len(self._buffer) + sum(map(len, self._data)) > _MAX_EVENT_BYTES:
            raise ValueError("an event of more than 64 MiB")

    @property
    def complete(self) -> bool:
        """Whether nothing is left of an event that has not ended."""
        return not self._buffer.strip(b"\r\n") and not self._data

    def _lines(self) -> Iterator[bytes]:
        buffer = self._buffer
        while True:
            ends = [
                end
                for end in (buffer.find(b"\n", self._searched), buffer.find(b"\r", self._searched))
                if end >= 0
            ]
            if not ends:
                self._searched = len(buffer)
                return
            end = min(ends)
            width = 1
            if buffer[end] == 0x0D:
                if end + 1 == len(buffer):
                    # It may be the first half of a CRLF: wait for the next byte.
                    self._searched = end
                    return
                width = 2 if buffer[end + 1] == 0x0A else 1
            line = bytes(buffer[:end])
            del buffer[: end + width]
            self._searched = 0
            yield line
