"""Reads the traces that services left in a trace folder, and joins them over processes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from sealmesh.telemetry.attributes import AttributeValue

__all__ = ["SpanRecord", "Trace", "TraceStore"]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span. Times are nanoseconds since the Unix epoch, ids lower-case hex."""

    trace_id: str
    span_id: str
    parent_span_id: str
    service: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: str
    attributes: Mapping[str, AttributeValue]

    @property
    def duration_ns(self) -> int:
        return max(0, self.end_ns - self.start_ns)


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request over all services, by start time; never empty."""

    trace_id: str
    spans: tuple[SpanRecord, ...]

    @property
    def start_ns(self) -> int:
        return self.spans[0].start_ns

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans)

    def walk(self) -> Iterator[tuple[int, SpanRecord]]:
        """Depth and span, parents before children, siblings by start; each span once.

        Spans whose parent is missing (still open, lost, or in the caller's own system) stand at depth 0.
        """
        children: dict[str, list[SpanRecord]] = defaultdict(list)
        known = {span.span_id for span in self.spans}
        for span in self.spans:
            children[span.parent_span_id if span.parent_span_id in known else ""].append(span)
        seen: set[str] = set()
        # After the roots all spans: what is left then lies on a loop, which only a broken writer makes.
        for root in (*children[""], *self.spans):
            waiting = [(0, root)]
            while waiting:
                depth, span = waiting.pop()
                if span.span_id not in seen:
                    seen.add(span.span_id)
                    yield depth, span
                    waiting.extend((depth + 1, child) for child in reversed(children[span.span_id]))

    def edges(self) -> frozenset[tuple[str, str]]:
        """Pairs (caller, callee) of services between which this trace passed."""
        service_of = {span.span_id: span.service for span in self.spans}
        pairs = ((service_of.get(span.parent_span_id), span.service) for span in self.spans)
        return frozenset((caller, callee) for caller, callee in pairs if caller and caller != callee)


class TraceStore:
    """The traces in a folder.

    Args:
        trace_dir: folder of `<service>-<pid>.jsonl` files; may be missing.
    """

    def __init__(self, trace_dir: Path) -> None:
        self._dir = trace_dir

    def newest(self, count: int = 1) -> list[Trace]:
        """Up to `count` traces, the one that began last first."""
        traces = sorted(self._traces(), key=lambda trace: trace.start_ns, reverse=True)
        return traces[:count]

    def get(self, trace_id: str) -> Trace | None:
        """The trace whose id is or begins with `trace_id`; None when there is none or more than one."""
        wanted = trace_id.lower()
        if not wanted:
            return None
        found = [trace for trace in self._traces() if trace.trace_id.startswith(wanted)]
        return found[0] if len(found) == 1 else None

    def _traces(self) -> list[Trace]:
        spans: dict[str, dict[str, SpanRecord]] = defaultdict(dict)
        for path in sorted(self._dir.glob("*.jsonl")):
            for span in _spans(path):
                spans[span.trace_id][span.span_id] = span
        return [
            Trace(trace_id, tuple(sorted(found.values(), key=lambda span: (span.start_ns, -span.end_ns))))
            for trace_id, found in spans.items()
        ]


def _spans(path: Path) -> Iterator[SpanRecord]:
    # A file may be rotated away between the listing and here.
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if (span := _parse(line)) is not None:
                yield span


def _parse(line: bytes) -> SpanRecord | None:
    """The span on a line; None for a half line (its writer is in the middle of it, or died there)."""
    try:
        fields = orjson.loads(line)
        return SpanRecord(
            trace_id=str(fields["trace_id"]),
            span_id=str(fields["span_id"]),
            parent_span_id=str(fields["parent_span_id"]),
            service=str(fields["service"]),
            name=str(fields["name"]),
            kind=str(fields["kind"]),
            start_ns=int(fields["start_ns"]),
            end_ns=int(fields["end_ns"]),
            status=str(fields["status"]),
            attributes=dict(fields["attributes"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
