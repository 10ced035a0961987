"""What people and Prometheus see: waterfall, logs, metrics."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sealmesh.telemetry.logging import configure_logging
from sealmesh.telemetry.metrics import BoundedLabel, Metrics, exponential_buckets
from sealmesh.telemetry.trace_store import SpanRecord, Trace
from sealmesh.telemetry.tracing import Tracing
from sealmesh.telemetry.waterfall import waterfall

MS = 1_000_000
ORIGIN = 1_796_000_000_000_000_000


def span(
    span_id: str, parent: str, service: str, name: str, start_ms: float, end_ms: float, **more: object
) -> SpanRecord:
    return SpanRecord(
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        span_id=span_id,
        parent_span_id=parent,
        service=service,
        name=name,
        kind=str(more.get("kind", "internal")),
        start_ns=ORIGIN + int(start_ms * MS),
        end_ns=ORIGIN + int(end_ms * MS),
        status=str(more.get("status", "unset")),
        attributes=more.get("attributes", {}),  # type: ignore[arg-type]
    )


def draw(trace: Trace, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(waterfall(trace))
    return [line.rstrip() for line in capture.get().splitlines()]


CHAT = Trace(
    "4bf92f3577b34da6a3ce929d0e0e4736",
    (
        span("1", "", "gateway", "POST /v1/chat/completions", 0, 800, kind="server"),
        span("2", "1", "gateway", "pii.mask", 1, 2, attributes={"sealmesh.pii.findings": 2}),
        span(
            "3", "1", "gateway", "sealmesh.inference.v1.InferenceService/ServeOpenAI", 3, 790, kind="client"
        ),
        span(
            "4",
            "3",
            "worker",
            "engine.generate",
            5,
            780,
            attributes={"gen_ai.usage.cache_read.input_tokens": 1856, "unknown.attribute": "hidden"},
        ),
        span(
            "5",
            "4",
            "kvstore",
            "sealmesh.kvstore.v1.KVStoreService/LookupPrefix",
            400,
            404,
            status="error",
            attributes={"error.type": "UNAVAILABLE"},
        ),
    ),
)


def test_a_waterfall_shows_the_whole_trace() -> None:
    title, header, *rows = draw(CHAT)
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in title
    assert "800 ms" in title
    assert "5 spans, 3 services" in title
    assert "offset" in header
    assert [row.split()[0] for row in rows] == ["gateway", "gateway", "gateway", "worker", "kvstore"]
    assert "  pii.mask" in rows[1]
    assert "findings=2" in rows[1]
    assert "  → InferenceService/ServeOpenAI" in rows[2]
    assert "    engine.generate" in rows[3]
    assert "cached=1856" in rows[3]
    assert "hidden" not in rows[3]
    assert "error=UNAVAILABLE" in rows[4]
    assert rows[0].count("█") == 32
    middle = rows[4].index("▏")
    assert rows[0].index("█") + 15 <= middle <= rows[0].index("█") + 17


@given(
    st.lists(st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**7)), min_size=1, max_size=6),
    st.integers(40, 200),
)
def test_any_times_are_drawn_within_the_width(times: list[tuple[int, int]], width: int) -> None:
    spans = [span(str(i), "", "s", "n", start, end) for i, (start, end) in enumerate(times)]
    spans.sort(key=lambda one: one.start_ns)
    rows = draw(Trace("t", tuple(spans)), width)
    assert all(len(row) <= width for row in rows)


# --- logs --------------------------------------------------------------------------------------------


def test_json_logs_hold_event_fields_and_trace(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = configure_logging("worker", log_format="json", stream=stream)
    tracing = Tracing("worker")
    with tracing.span("x") as current:
        log.info("engine ready 就绪 100%", seconds=1.5, model="demo", extra_none=None)
    log.debug("not shown")
    (line,) = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "service": "worker",
        "event": "engine ready 就绪 100%",
        "trace_id": f"{current.get_span_context().trace_id:032x}",
        "span_id": f"{current.get_span_context().span_id:016x}",
        "seconds": 1.5,
        "model": "demo",
        "extra_none": None,
    }


def test_text_logs_are_one_line_each() -> None:
    stream = io.StringIO()
    log = configure_logging("gateway", "debug", "text", stream)
    log.debug("listening", address="127.0.0.1:8080", note="two words", lines="a\nb")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert 'DEBUG   gateway: listening address=127.0.0.1:8080 note="two words" lines="a\\nb"' in text


def test_libraries_are_heard_from_warnings_up_in_the_same_shape() -> None:
    stream = io.StringIO()
    configure_logging("gateway", "debug", "json", stream)
    logging.getLogger("uvicorn.error").info("chatter")
    logging.getLogger("uvicorn.error").warning("look %s", "here")
    (line,) = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert (line["event"], line["logger"], line["level"]) == ("look here", "uvicorn.error", "warning")


def test_failures_show_where_but_not_what_a_caller_sent() -> None:
    stream = io.StringIO()
    log = configure_logging("gateway", log_format="text", stream=stream)
    sent, number = "身份证11010519491231002X", "13800138000"
    missing = FileNotFoundError(2, "No such file", "a.toml")
    try:
        try:
            int(sent)
        except ValueError as exc:
            raise ExceptionGroup(number, [exc, missing]) from exc
    except ExceptionGroup as exc:
        log.failure("call failed", exc)
    text = stream.getvalue()
    assert sent not in text
    assert number not in text
    assert "int(sent)" in text
    assert "ValueError\n" in text
    assert "ExceptionGroup\n" in text
    assert "No such file" in text
    assert "which led to:" in text
    assert "test_views.py" in text


def test_long_fields_are_cut() -> None:
    stream = io.StringIO()
    configure_logging("gateway", log_format="json", stream=stream).info("x", field="y" * 10_000)
    assert len(json.loads(stream.getvalue())["field"]) == 512


# --- metrics -----------------------------------------------------------------------------------------


def test_two_processes_in_one_do_not_share_metrics() -> None:
    first, second = Metrics("a"), Metrics("b")
    counter = first.counter("sealmesh_things", "Things.", ("kind",))
    counter.labels("x").inc()
    assert b'sealmesh_things_total{kind="x"} 1.0' in first.render()[0]
    assert b"sealmesh_things" not in second.render()[0]


def test_a_label_has_a_bounded_number_of_values() -> None:
    label = BoundedLabel(3, allowed=["configured"])
    assert [label(value) for value in ("a", "b", "c", "a", "configured", "d")] == [
        "a", "b", "other", "a", "configured", "other",
    ]  # fmt: skip


def test_buckets() -> None:
    assert exponential_buckets(1024, 4, 3) == (1020.0, 4100.0, 16400.0)
    for wrong in ((0, 2, 3), (1, 1, 3), (1, 2, 0)):
        with pytest.raises(ValueError, match="buckets need"):
            exponential_buckets(*wrong)
