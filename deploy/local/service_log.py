"""The log of one service: a rotated file, the last lines in memory, and a listener."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from sealmesh.deploy.local.state import PRIVATE_FILE_MODE

MAX_FILE_BYTES = 10 * 1024 * 1024
KEPT_FILES = 3
TAIL_LINES = 20
MAX_LINE_BYTES = 64 * 1024


class _PrivateRotatingFile(RotatingFileHandler):
    """RotatingFileHandler whose files only their owner can read."""

    def _open(self):  # type: ignore[no-untyped-def]  # as typeshed has it: TextIOWrapper
        descriptor = os.open(
            self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE_MODE
        )
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")


class ServiceLog:
    """Takes the bytes that a service writes and gives them on, line by line."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._file: RotatingFileHandler | None = None
        self._partial = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def open(self) -> None:
        """Raises OSError when the file cannot be written."""
        self._file = _PrivateRotatingFile(
            self._path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8"
        )

    def feed(self, data: bytes) -> None:
        """Adds bytes; whole lines are written at once, a longer line than 64 KiB is cut there."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._write(line)
        while len(self._partial) > MAX_LINE_BYTES:
            self._write(self._partial[:MAX_LINE_BYTES])
            self._partial = self._partial[MAX_LINE_BYTES:]

    def note(self, line: str) -> None:
        """Adds a line of the supervisor's own to the file, not to the tail."""
        self._to_file(f"{datetime.now():%H:%M:%S.%f}"[:12] + f" [supervisor] {line}")

    def close(self) -> None:
        if self._partial:
            self._write(self._partial)
            self._partial = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip("\r")
        self._to_file(line)
        if line.strip():
            self.tail.append(line)
            self._on_line(line)

    def _to_file(self, line: str) -> None:
        if self._file is not None:
            self._file.emit(logging.LogRecord("service", logging.INFO, "", 0, line, None, None))
