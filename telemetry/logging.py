"""Structured logs: one event with fields per line, as JSON or for people, with the trace it belongs to.

Nothing sensitive is ever logged, so nothing is redacted: events are fixed text, fields are names, counts
and durations (see `attributes`), and values are cut to a bounded length.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from opentelemetry import trace
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["FieldValue", "LogFormat", "LogLevel", "StructuredLogger", "configure_logging"]

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
FieldValue = str | int | float | bool | None

_MAX_FIELD_CHARS: Final = 512
_FIELDS: Final = "sealmesh_fields"

# Errors whose text is ours or the operating system's.
_SPEAKABLE: Final = (SealmeshError, OSError, ImportError)


class StructuredLogger:
    """Logs events with fields; the text of an event is constant, what varies goes into fields.

    Args:
        service: name of the service, part of every line.
        logger: the standard logger underneath; its handlers decide where lines go.
    """

    def __init__(self, service: str, logger: logging.Logger | None = None) -> None:
        self.service = service
        self.logger = logger or logging.getLogger(f"sealmesh.{service}")

    def debug(self, event: str, **fields: FieldValue) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: FieldValue) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: FieldValue) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: FieldValue) -> None:
        self._log(logging.ERROR, event, fields)

    def failure(self, event: str, exc: BaseException, **fields: FieldValue) -> None:
        """Logs a defect: an exception that nothing expected, with where it came from.

        The text of the exception is left out, it may quote what a caller sent; types and frames stay.
        """
        self._log(logging.ERROR, event, fields, exc)

    def _log(
        self, level: int, event: str, fields: dict[str, FieldValue], exc: BaseException | None = None
    ) -> None:
        if self.logger.isEnabledFor(level):
            # The event is an argument, not the format: a percent sign in it stays one.
            self.logger.log(level, "%s", event, exc_info=exc, extra={_FIELDS: fields})


def configure_logging(
    service: str, level: LogLevel = "info", log_format: LogFormat = "text", stream: TextIO | None = None
) -> StructuredLogger:
    """Sends this process's logs to `stream` (default stderr) in the chosen format.

    Replaces the root handlers, so that libraries log in the same shape; their level is at least WARNING.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(threshold, logging.WARNING))
    logging.getLogger("sealmesh").setLevel(threshold)
    return StructuredLogger(service)


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def _fields(self, record: logging.LogRecord) -> dict[str, FieldValue]:
        fields: dict[str, FieldValue] = {}
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            fields["trace_id"] = trace.format_trace_id(span.trace_id)
            fields["span_id"] = trace.format_span_id(span.span_id)
        own: dict[str, FieldValue] = getattr(record, _FIELDS, {})
        for name, value in own.items():
            fields[name] = value[:_MAX_FIELD_CHARS] if isinstance(value, str) else value
        return fields

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return "\n".join(_frames(record.exc_info[1]))


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, FieldValue] = {
            "time": _time_of(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **self._fields(record),
        }
        if not record.name.startswith("sealmesh"):
            line["logger"] = record.name
        if text := self._traceback(record):
            line["exception"] = text
        return json.dumps(line, ensure_ascii=False, default=str)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in self._fields(record).items())
        clock = _time_of(record).strftime("%H:%M:%S.%f")[:-3]
        event = record.getMessage()
        head = f"{clock} {record.levelname:<7} {self._service}: {event}"
        return "\n".join(part for part in (f"{head} {fields}".rstrip(), self._traceback(record)) if part)


def _frames(exc: BaseException) -> list[str]:
    """A traceback, causes first, with the text only of exceptions that cannot quote a request."""
    cause = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    lines = [*_frames(cause), "which led to:"] if cause is not None else []
    lines += [line.rstrip() for line in traceback.format_tb(exc.__traceback__)]
    for inner in exc.exceptions if isinstance(exc, BaseExceptionGroup) else ():
        lines += [f"  | {line}" for text in _frames(inner) for line in text.splitlines()]
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = str(exc) if isinstance(exc, _SPEAKABLE) else ""
    return [*lines, f"{name}: {text}" if text else name]


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _quoted(value: FieldValue) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n') else text
