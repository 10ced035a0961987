import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import context as otel_context
from sealmesh.inference.engine_call import EngineCall, Usage, calling
from sealmesh.inference.engine_tap import EngineTap
from sealmesh.inference.request_context import Tenant
from sealmesh.inference.worker_metrics import WorkerMetrics
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.tracing import Tracing


def output(tokens: dict[int, list[int]], *, finished: bool = False) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[1, 2, 3],
        num_cached_tokens=2,
        finished=finished,
        outputs=[
            SimpleNamespace(index=index, token_ids=ids, finish_reason="stop" if finished else None)
            for index, ids in tokens.items()
        ],
    )


def sampling(kind: str = "DELTA", n: int = 1, **extra: Any) -> Any:
    return SimpleNamespace(n=n, output_kind=SimpleNamespace(name=kind), extra_args=extra or None)


class Scene:
    """A tap over a scripted client, and the spans that it made."""

    def __init__(self, folder: Path, outputs: list[Any], *, connected: bool = True) -> None:
        self.folder = folder
        self.tracing = Tracing("worker", trace_dir=folder)
        self.metrics = Metrics("worker")
        self.closed = asyncio.Event()
        self.outputs = outputs
        self.tap = EngineTap(self._generate, "m", connected, self.tracing, WorkerMetrics(self.metrics))

    async def _generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        try:
            for item in self.outputs:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed.set()

    def spans(self) -> list[dict[str, Any]]:
        self.tracing.close()
        return [json.loads(line) for path in self.folder.glob("*.jsonl") for line in path.open()]


async def test_counts_traces_and_passes_everything_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}), output({1: [8, 9]}), output({0: [5], 1: [6]}, finished=True)])
    with scene.tracing.span("server"):
        call = EngineCall("r", parent=otel_context.get_current())
    with calling(call):
        passed = [item async for item in scene.tap.generate({}, sampling(n=2), "e1")]
    assert passed == scene.outputs
    assert call.usage == Usage(3, 5, 2)
    assert call.take_all(0) == [7, 5]
    assert (call.take_one(1), call.take_one(1), call.take_one(1)) == ([8, 9], [6], ())
    assert call.unfinished == set()
    spans = {span["name"]: span for span in scene.spans()}
    engine = spans["engine.generate"]
    assert engine["parent_span_id"] == spans["server"]["span_id"]
    assert engine["attributes"]["gen_ai.usage.output_tokens"] == 5
    assert engine["attributes"]["gen_ai.usage.cache_read.input_tokens"] == 2
    assert engine["attributes"]["gen_ai.response.finish_reason"] == "stop"
    counted = scene.metrics.registry.get_sample_value("sealmesh_worker_tokens_total", {"kind": "output"})
    assert counted == 5


async def test_cumulative_outputs_count_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}), output({0: [7, 8]}), output({0: [7, 8, 9]}, finished=True)])
    call = EngineCall("r")
    with calling(call):
        async for _ in scene.tap.generate({}, sampling("CUMULATIVE"), "e1"):
            pass
    assert call.take_all(0) == [7, 8, 9]


async def test_the_tenant_and_the_span_reach_the_connector_and_nothing_of_the_caller(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}, finished=True)])
    call = EngineCall("r", Tenant("handle", 4, "salt"))
    params = sampling(kv_transfer_params={"do_remote_prefill": True}, other=1)
    with calling(call):
        async for _ in scene.tap.generate({}, params, "e1"):
            pass
    (span,) = scene.spans()
    entry = params.extra_args["kv_transfer_params"]["sealmesh"]
    traceparent = entry["traceparent"]
    assert traceparent.startswith(f"00-{span['trace_id']}-{span['span_id']}-")
    assert params.extra_args == {
        "other": 1,
        "kv_transfer_params": {"sealmesh": {"handle": "handle", "epoch": 4, "traceparent": traceparent}},
    }


async def test_without_a_tenant_there_are_no_transfer_parameters(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}, finished=True)])
    params = sampling(kv_transfer_params={"sealmesh": {"handle": "forged", "epoch": 1}})
    with calling(EngineCall("r")):
        async for _ in scene.tap.generate({}, params, "e1"):
            pass
    assert params.extra_args is None


async def test_without_a_connector_there_are_no_transfer_parameters(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}, finished=True)], connected=False)
    params = sampling(kv_transfer_params={"sealmesh": {"handle": "forged", "epoch": 1}})
    with calling(EngineCall("r", Tenant("handle", 4, "salt"))):
        async for _ in scene.tap.generate({}, params, "e1"):
            pass
    assert params.extra_args is None


async def test_prompts_of_one_call_are_numbered_in_the_order_of_the_calls(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}, finished=True)])
    call = EngineCall("r")
    with calling(call):
        first = scene.tap.generate({}, sampling(n=2), "e1")
        second = scene.tap.generate({}, sampling(n=2), "e2")
    # Nothing runs yet, and a generator that is never read leaves nothing behind.
    assert call.unfinished == set()
    for generator in (second, first):
        async for _ in generator:
            pass
    assert call.pending_choices() == [0, 2]


async def test_closing_early_closes_the_source(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}), output({0: [8]}, finished=True)])
    call = EngineCall("r")
    with calling(call):
        generator = scene.tap.generate({}, sampling(), "e1")
        await anext(generator)
    assert call.unfinished == {"e1"}
    await generator.aclose()
    assert scene.closed.is_set()
    assert call.unfinished == set()


async def test_a_failure_marks_the_span_by_type_and_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}), RuntimeError("what the caller wrote")])
    with calling(EngineCall("r")), pytest.raises(RuntimeError):
        async for _ in scene.tap.generate({}, sampling(), "e1"):
            pass
    (span,) = scene.spans()
    assert (span["status"], span["attributes"]["error.type"]) == ("error", "RuntimeError")
    assert "what the caller wrote" not in json.dumps(span)


async def test_a_request_outside_of_a_call_is_left_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path, [output({0: [7]}, finished=True)])
    assert len([item async for item in scene.tap.generate({}, sampling(), "e1")]) == 1
    assert scene.spans() == []
