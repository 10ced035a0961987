"""Spans: where they go, what they hold, and how they join over processes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from sealmesh.telemetry.attributes import MAX_VALUE_CHARS, Attribute, set_attributes
from sealmesh.telemetry.trace_store import SpanRecord, Trace, TraceStore
from sealmesh.telemetry.tracing import (
    JsonLinesExporter,
    Tracing,
    current_trace_id,
    current_traceparent,
    extract_context,
    inject_context,
    remote_context,
)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def test_spans_reach_the_folder_within_a_second_without_a_flush(tmp_path: Path) -> None:
    tracing = Tracing("worker", trace_dir=tmp_path / "traces")
    with tracing.span("engine.generate", {Attribute.GEN_AI_CACHED_TOKENS: 1856}):
        pass
    path = tmp_path / "traces" / f"worker-{os.getpid()}.jsonl"
    started = time.monotonic()
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() - started < 2
        time.sleep(0.02)
    assert time.monotonic() - started < 1
    (span,) = lines(tmp_path / "traces")
    assert (span["service"], span["name"], span["kind"]) == ("worker", "engine.generate", "internal")
    assert span["attributes"] == {"gen_ai.usage.cache_read.input_tokens": 1856}
    assert span["parent_span_id"] == ""
    assert 0 < span["start_ns"] <= span["end_ns"]
    tracing.close()


def test_an_exception_marks_the_span_without_its_text(tmp_path: Path) -> None:
    tracing = Tracing("gateway", trace_dir=tmp_path)
    with pytest.raises(ValueError, match="prompt"), tracing.span("pii.mask"):
        raise ValueError("the secret prompt")
    tracing.close()
    (span,) = lines(tmp_path)
    assert (span["status"], span["attributes"]) == ("error", {"error.type": "ValueError"})
    assert "secret" not in json.dumps(span)


def test_spans_nest_and_the_context_comes_back(tmp_path: Path) -> None:
    tracing = Tracing("gateway", trace_dir=tmp_path)
    assert (current_trace_id(), current_traceparent()) == ("", "")
    with tracing.span("outer"):
        outer = trace.get_current_span().get_span_context()
        with tracing.span("inner"):
            assert current_trace_id() == f"{outer.trace_id:032x}"
        assert trace.get_current_span().get_span_context() == outer
    assert current_trace_id() == ""
    tracing.close()
    inner, root = lines(tmp_path)
    assert inner["parent_span_id"] == root["span_id"]


def test_a_remote_parent_continues_its_trace(tmp_path: Path) -> None:
    """What the KV connector does in the engine process with the traceparent of its request."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tracing = Tracing("worker", trace_dir=tmp_path)
    with tracing.span("kv.load", parent=remote_context(parent)):
        carrier: dict[str, str] = {}
        inject_context(carrier)
        assert carrier["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert carrier["traceparent"] == current_traceparent()
        assert (
            trace.get_current_span(extract_context(carrier)).get_span_context().span_id
            == trace.get_current_span().get_span_context().span_id
        )
    tracing.close()
    (span,) = lines(tmp_path)
    assert span["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert span["parent_span_id"] == "b7ad6b7169203331"


def test_a_caller_that_does_not_sample_is_followed(tmp_path: Path) -> None:
    tracing = Tracing("worker", trace_dir=tmp_path)
    with tracing.span("x", parent=remote_context("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")):
        pass
    tracing.close()
    assert lines(tmp_path) == []


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"))
def test_any_traceparent_is_a_parent_or_none(text: str) -> None:
    span = trace.get_current_span(remote_context(text)).get_span_context()
    assert not span.is_valid or f"{span.trace_id:032x}" in text.lower()


def test_texts_are_cut(tmp_path: Path) -> None:
    tracing = Tracing("worker", trace_dir=tmp_path)
    with tracing.span("x") as span:
        set_attributes(span, {Attribute.KV_OUTCOME: "y" * 10_000})
        span.set_attribute("foreign", "z" * 10_000)
    tracing.close()
    attributes = lines(tmp_path)[0]["attributes"]
    assert {len(value) for value in attributes.values()} == {MAX_VALUE_CHARS}


# --- the local exporter ------------------------------------------------------------------------------


def write(exporter: JsonLinesExporter, count: int) -> None:
    source = Tracing("any")
    for _ in range(count):
        span = source.tracer.start_span("span")
        span.end()
        exporter.export([span])  # type: ignore[list-item]  # the SDK's span is both kinds


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    exporter = JsonLinesExporter(tmp_path, "kvstore")
    umask = os.umask(0)
    try:
        write(exporter, 1)
    finally:
        os.umask(umask)
        exporter.shutdown()
    assert exporter.path.stat().st_mode & 0o777 == 0o600


def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    exporter = JsonLinesExporter(tmp_path, "kvstore", max_bytes=2000)
    write(exporter, 50)
    exporter.shutdown()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert all(size < 2600 for size in sizes)
    found = TraceStore(tmp_path).newest(100)
    assert 8 <= len(found) < 50


def test_the_oldest_files_of_dead_processes_make_room(tmp_path: Path) -> None:
    for age, pid in enumerate((4_194_301, 4_194_302, 4_194_303)):
        path = tmp_path / f"vault-{pid}.jsonl"
        path.write_text("")
        os.utime(path, (1000 + age, 1000 + age))
    mine = tmp_path / f"gateway-{os.getpid()}.jsonl"
    mine.write_text("")
    os.utime(mine, (1, 1))
    exporter = JsonLinesExporter(tmp_path, "kvstore", max_files=3)
    write(exporter, 1)
    exporter.shutdown()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.name, exporter.path.name, "vault-4194303.jsonl"}


def test_a_folder_that_cannot_be_written_drops_spans_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    exporter = JsonLinesExporter(blocked / "traces", "worker")
    write(exporter, 3)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["spans are dropped"]


# --- OTLP --------------------------------------------------------------------------------------------


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_go_to_a_collector_and_to_the_folder(tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracing = Tracing("vault", otlp_endpoint=f"http://127.0.0.1:{port}", trace_dir=tmp_path)
        with tracing.span("release"):
            pass
        tracing.close()
    finally:
        server.stop(None)
    assert (collector.names, collector.services) == (["release"], {"vault"})
    assert [span["name"] for span in lines(tmp_path)] == ["release"]


def test_a_dead_collector_costs_spans_and_no_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing("vault", otlp_endpoint="http://127.0.0.1:1", trace_dir=tmp_path)
    started = time.monotonic()
    for _ in range(10_000):
        tracing.tracer.start_span("busy").end()
    assert time.monotonic() - started < 5
    started = time.monotonic()
    tracing.close(timeout_s=0.5)
    assert time.monotonic() - started < 3
    assert lines(tmp_path)
    said = [record.message for record in caplog.records if "collector" in record.message]
    assert said == ["spans are dropped: the collector at http://127.0.0.1:1 does not take them"]


# --- reading back ------------------------------------------------------------------------------------


def record(
    trace_id: str, span_id: str, parent: str = "", service: str = "gateway", start: int = 0, end: int = 10
) -> SpanRecord:
    return SpanRecord(trace_id, span_id, parent, service, span_id, "internal", start, end, "unset", {})


def save(folder: Path, name: str, *records: SpanRecord, tail: bytes = b"") -> None:
    fields = SpanRecord.__slots__
    text = "".join(json.dumps({f: getattr(r, f) for f in fields}) + "\n" for r in records)
    (folder / name).write_bytes(text.encode() + tail)


def test_traces_are_joined_over_files_newest_first(tmp_path: Path) -> None:
    save(tmp_path, "gateway-1.jsonl", record("aa11", "1", start=5), record("bb22", "9", start=100))
    save(tmp_path, "worker-2.jsonl", record("aa11", "2", "1", "worker", start=6))
    save(tmp_path, "kvstore-3.1.jsonl", record("aa11", "3", "2", "kvstore", start=7))
    store = TraceStore(tmp_path)
    assert [found.trace_id for found in store.newest(5)] == ["bb22", "aa11"]
    assert [found.trace_id for found in store.newest(1)] == ["bb22"]
    joined = store.get("AA")
    assert joined is not None
    assert [(depth, span.span_id) for depth, span in joined.walk()] == [(0, "1"), (1, "2"), (2, "3")]
    assert joined.edges() == {("gateway", "worker"), ("worker", "kvstore")}
    assert (joined.start_ns, joined.end_ns) == (5, 10)
    assert store.get("cc") is None
    assert store.get("") is None


def test_an_ambiguous_prefix_is_no_trace(tmp_path: Path) -> None:
    save(tmp_path, "gateway-1.jsonl", record("aa11", "1"), record("aa22", "2"))
    assert TraceStore(tmp_path).get("aa") is None


def test_half_lines_and_strange_lines_are_skipped(tmp_path: Path) -> None:
    good = record("aa", "1")
    save(tmp_path, "a-1.jsonl", good, tail=b'{"trace_id": "aa", "span_id"')
    (tmp_path / "b-2.jsonl").write_bytes(b"\xff\n[]\n3\n{}\nnull\n" + b'{"attributes": 3}\n')
    assert TraceStore(tmp_path).newest(5) == [Trace("aa", (good,))]
    assert TraceStore(tmp_path / "missing").newest(5) == []


@given(data=st.data())
def test_any_bytes_in_a_file_are_read_without_failing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    save(folder, "a-1.jsonl", record("aa", "1"), record("aa", "2", "1"))
    path = folder / "a-1.jsonl"
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut] + data.draw(st.binary(max_size=50)))
    assert all(found.spans for found in TraceStore(folder).newest(10))


@pytest.mark.parametrize(
    "spans",
    [
        (record("t", "1", "2"), record("t", "2", "1")),
        (record("t", "1", "1"),),
        (record("t", "1", "gone", start=3), record("t", "2", "1", start=1)),
    ],
)
def test_walk_visits_orphans_and_survives_loops(spans: tuple[SpanRecord, ...]) -> None:
    visited = [span.span_id for _, span in Trace("t", spans).walk()]
    assert sorted(visited) == sorted(span.span_id for span in spans)


async def test_concurrent_requests_keep_their_own_context(tmp_path: Path) -> None:
    tracing = Tracing("gateway", trace_dir=tmp_path)
    barrier = asyncio.Barrier(20)

    async def request(index: int) -> tuple[str, str]:
        with tracing.span(f"request-{index}"):
            before = current_trace_id()
            await barrier.wait()
            return before, current_trace_id()

    found = await asyncio.gather(*(request(i) for i in range(20)))
    assert len({before for before, _ in found}) == 20
    assert all(before == after for before, after in found)
    await asyncio.to_thread(tracing.close)
