"""Where audit records go. The tamper-evident chain takes the place of the plain file behind the same seam."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

import grpc
from google.protobuf.json_format import MessageToJson
from sealmesh.protos.common.v1 import audit_pb2
from sealmesh.telemetry.runtime.errors import SealmeshError


class AuditSink(Protocol):
    """Takes audit records. Blocking; safe to call from several threads."""

    def write(self, record: audit_pb2.AuditRecord) -> None:
        """Makes the record durable; the sink sets `sequence`, `occurred_at` and `writer`.

        Raises SealmeshError (DEPENDENCY_UNAVAILABLE) when it cannot: what must be audited must then not
        happen.
        """
        ...


class JsonLinesAuditSink:
    """Appends one JSON line per record to a file (0600) and syncs it.

    Args:
        path: the file; made when missing.
        writer: names this process in every record, for example "vault/local".
    """

    def __init__(self, path: Path, writer: str) -> None:
        self._path = path
        self._writer = writer
        self._lock = threading.Lock()
        self._sequence = 0
        self._fd = -1

    async def start(self) -> None:
        """Opens the file; raises SealmeshError when that is impossible."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        except OSError as exc:
            raise self._unavailable(exc) from exc

    def write(self, record: audit_pb2.AuditRecord) -> None:
        with self._lock:
            complete = audit_pb2.AuditRecord()
            complete.CopyFrom(record)
            complete.sequence = self._sequence + 1
            complete.writer = self._writer
            complete.occurred_at.GetCurrentTime()
            line = MessageToJson(complete, indent=None, preserving_proto_field_name=True).encode() + b"\n"
            try:
                # One write: with O_APPEND a line is never torn by another writer's.
                if os.write(self._fd, line) != len(line):
                    raise OSError("the line was written only in part")
                os.fsync(self._fd)
            except OSError as exc:
                raise self._unavailable(exc) from exc
            self._sequence += 1

    async def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _unavailable(self, exc: OSError) -> SealmeshError:
        return SealmeshError(
            grpc.StatusCode.UNAVAILABLE,
            "DEPENDENCY_UNAVAILABLE",
            f"cannot write the audit log {self._path}: {exc.strerror or exc}",
        )
