"""OpenTelemetry tracing of one process: a provider, its exporters, and W3C context in and out.

Spans go to an OTLP collector, to bounded local JSON lines that `sealmesh trace` reads, or both. Tracing
fails open: an exporter that cannot write drops spans and never delays a request. There is no global
tracer provider: a `Tracing` is built in `__main__` and passed down.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Final, TextIO

import psutil
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from sealmesh.telemetry.attributes import MAX_VALUE_CHARS, Attribute, AttributeValue, set_attributes

__all__ = [
    "JsonLinesExporter",
    "Tracing",
    "current_trace_id",
    "current_traceparent",
    "extract_context",
    "inject_context",
    "remote_context",
]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_FLUSH_INTERVAL_MS: Final = 500
_EXPORT_TIMEOUT_S: Final = 5
_QUEUE_SPANS: Final = 4096
_BATCH_SPANS: Final = 512

_log = logging.getLogger("sealmesh.tracing")


class JsonLinesExporter(SpanExporter):
    """Writes spans as JSON lines to `<trace_dir>/<service>-<pid>.jsonl`, within bounds.

    A full file moves to `….1.jsonl`, replacing the one before; files of earlier processes are removed,
    oldest first, when there are more than `max_files`.

    Args:
        trace_dir: folder of all services' traces; made when missing, on the first export.
        service: name of the service.
        max_bytes: size at which a file is rotated; disk use is at most twice that per process.
        max_files: how many files the folder keeps.
    """

    def __init__(
        self, trace_dir: Path, service: str, *, max_bytes: int = 4 * 1024 * 1024, max_files: int = 24
    ) -> None:
        self._dir = trace_dir
        self._service = service
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._warned = False

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._dir / f"{self._service}-{os.getpid()}.jsonl"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(_line(self._service, span) for span in spans)
        with self._lock:
            try:
                file = self._open()
                file.write(lines)
                file.flush()
                if file.tell() >= self._max_bytes:
                    self._rotate(file)
            except OSError as exc:
                if not self._warned:
                    self._warned = True
                    _log.warning("spans are dropped: cannot write %s: %s", self.path, exc.strerror)
                self._file = None
                return SpanExportResult.FAILURE
        self._warned = False
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def _open(self) -> TextIO:
        if self._file is None:
            self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._prune()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self.path, flags, 0o600), "a", encoding="utf-8")
        return self._file

    def _rotate(self, file: TextIO) -> None:
        file.close()
        self._file = None
        self.path.replace(self.path.with_suffix(".1.jsonl"))

    def _prune(self) -> None:
        """Makes room for one more file, at the cost of the oldest of processes that are gone."""
        files: list[tuple[float, Path]] = []
        for path in self._dir.glob("*.jsonl"):
            # A file may vanish between the listing and here: other processes prune too.
            with contextlib.suppress(FileNotFoundError):
                files.append((path.stat().st_mtime, path))
        excess = max(0, len(files) - self._max_files + 1)
        leftovers = [path for _, path in sorted(files) if not _owner_alive(path)]
        for path in leftovers[:excess]:
            path.unlink(missing_ok=True)


class _Collector(SpanExporter):
    """An OTLP collector that may be away: says so once, not once a batch."""

    def __init__(self, endpoint: str) -> None:
        # Imported on demand: it costs 100 ms and most processes on one machine do not need it.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._endpoint = endpoint
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            _log.warning("spans are dropped: the collector at %s does not take them", self._endpoint)
        self._away = away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Tracing:
    """The tracer provider of one process. The constructor opens nothing; exporters do on first use.

    Args:
        service: `service.name` of the spans.
        otlp_endpoint: `http://host:port` (or https) of an OTLP gRPC collector, empty for none.
        trace_dir: folder for local JSON lines, None for none.
        sample_ratio: share of new traces that are recorded, 0 to 1; a caller's decision is followed.
    """

    def __init__(
        self,
        service: str,
        *,
        otlp_endpoint: str = "",
        trace_dir: Path | None = None,
        sample_ratio: float = 1.0,
    ) -> None:
        self.service = service
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "process.pid": os.getpid()}),
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            span_limits=SpanLimits(max_span_attribute_length=MAX_VALUE_CHARS),
            shutdown_on_exit=False,
        )
        # The local one first: it is also the first to be flushed at the end.
        self._exporters: list[SpanExporter] = []
        if trace_dir is not None:
            self._exporters.append(JsonLinesExporter(trace_dir, service))
        if otlp_endpoint:
            self._exporters.append(_Collector(otlp_endpoint))
        for exporter in self._exporters:
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    exporter,
                    max_queue_size=_QUEUE_SPANS,
                    schedule_delay_millis=_FLUSH_INTERVAL_MS,
                    max_export_batch_size=_BATCH_SPANS,
                )
            )
        self.tracer: Tracer = self._provider.get_tracer("sealmesh")

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[Attribute, AttributeValue] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
    ) -> Iterator[Span]:
        """A current span around a block; an exception marks it failed by its type and goes on.

        The message of the exception is not recorded: it may hold what the caller sent.
        """
        span = self.tracer.start_span(name, context=parent, kind=kind)
        set_attributes(span, attributes or {})
        token = otel_context.attach(trace.set_span_in_context(span, parent))
        try:
            yield span
        except BaseException as exc:
            set_attributes(span, {Attribute.ERROR_TYPE: type(exc).__name__})
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            otel_context.detach(token)
            span.end()

    def flush(self, timeout_ms: int = 3000) -> bool:
        """Exports what is queued; False when that took longer than `timeout_ms`. Blocks."""
        return self._provider.force_flush(timeout_ms)

    def close(self, timeout_s: float = 3.0) -> None:
        """Exports what is queued and stops. Blocks, for about `timeout_s` when a collector is away."""
        # The SDK retries each queued batch for seconds, whatever the timeout of its shutdown; an exporter
        # that is shut down gives up at once.
        give_up = threading.Timer(timeout_s, self._give_up)
        give_up.daemon = True
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()

    def _give_up(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()


def extract_context(carrier: Mapping[str, str]) -> Context:
    """The trace context that a mapping with `traceparent` (W3C Trace Context) names; may be empty."""
    return _PROPAGATOR.extract(carrier, context=Context())


def remote_context(traceparent: str) -> Context:
    """The parent that one `traceparent` header value names; an empty context when it is malformed."""
    return extract_context({"traceparent": traceparent} if traceparent else {})


def inject_context(carrier: MutableMapping[str, str], context: Context | None = None) -> None:
    """Adds `traceparent` (and `tracestate`) of the given or the current context, if it has a span."""
    _PROPAGATOR.inject(carrier, context=context)


def current_traceparent() -> str:
    """The current span as a W3C `traceparent` value, empty when there is none."""
    carrier: dict[str, str] = {}
    inject_context(carrier)
    return carrier.get("traceparent", "")


def current_trace_id() -> str:
    """Trace id of the current span as 32 hex characters, empty when there is none."""
    span = trace.get_current_span().get_span_context()
    return trace.format_trace_id(span.trace_id) if span.is_valid else ""


def _owner_alive(path: Path) -> bool:
    """Whether the process of `<service>-<pid>[.1].jsonl` still runs and may write there."""
    pid = path.name.removesuffix(".jsonl").removesuffix(".1").rpartition("-")[2]
    return pid.isdecimal() and psutil.pid_exists(int(pid))


def _line(service: str, span: ReadableSpan) -> str:
    own, parent = span.get_span_context(), span.parent
    if own is None:
        return ""
    record = {
        "trace_id": trace.format_trace_id(own.trace_id),
        "span_id": trace.format_span_id(own.span_id),
        "parent_span_id": trace.format_span_id(parent.span_id) if parent else "",
        "service": service,
        "name": span.name,
        "kind": span.kind.name.lower(),
        "start_ns": span.start_time or 0,
        "end_ns": span.end_time or 0,
        "status": span.status.status_code.name.lower(),
        "attributes": dict(span.attributes or {}),
    }
    return json.dumps(record, ensure_ascii=False, default=str, separators=(",", ":")) + "\n"
