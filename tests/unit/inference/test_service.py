from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from sealmesh.inference.in_flight import InFlight
from sealmesh.inference.service import InferenceService
from sealmesh.inference.settings import WorkerSettings
from sealmesh.inference.worker import worker_spec
from sealmesh.inference.worker_metrics import WorkerMetrics
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.inference.v1 import inference_pb2 as pb
from sealmesh.protos.inference.v1 import inference_pb2_grpc
from sealmesh.security.tls import LocalAuthority, channel_credentials
from sealmesh.telemetry.runtime.channel import open_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import ServerSpec, ServiceServer
from sealmesh.telemetry.telemetry import Telemetry

from tests.support.fake_engine import FakeEngine

SERVICE = "sealmesh.inference.v1.InferenceService"


class Worker:
    """A worker's service over real mTLS, with a fake engine."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.in_flight = InFlight()
        self.authority = LocalAuthority(folder / "tls").create()
        tls = self.authority.issue("worker", "worker-0")
        self.settings = WorkerSettings(
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            tls_ca=tls.ca,
            tls_certificate=tls.certificate,
            tls_key=tls.key,
            model="fake",
            model_dir=folder,
            allow_plaintext=True,
            log_level="error",
        )
        telemetry = Telemetry.build("worker", self.settings)
        real = worker_spec(self.settings, telemetry)
        metrics = WorkerMetrics(Telemetry.build("worker", self.settings).metrics)
        service = InferenceService(self.engine, "worker-0", self.in_flight, metrics)  # type: ignore[abstract]
        self.server = ServiceServer(
            ServerSpec(
                settings=self.settings,
                telemetry=telemetry,
                service_names=real.service_names,
                register=lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(
                    service, server
                ),
                authorize=real.authorize,
                credentials=real.credentials,
                components=[self.engine],
                endless=real.endless,
            )
        )

    def channel(self, role: str) -> grpc.aio.Channel:
        credentials = channel_credentials(self.authority.issue(role, role))
        return open_channel(self.server.grpc_address, credentials, expected_role="worker")


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path)
    async with worker.server:
        yield worker
    assert worker.engine.closed


@pytest.fixture
async def stub(worker: Worker) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    async with worker.channel("gateway") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "g", "model": "fake", "text": "some words", **fields})


async def failure(call: Any) -> SealmeshError:
    with pytest.raises(grpc.RpcError) as failed:
        async for _ in call:
            pass
    return SealmeshError.from_rpc_error(failed.value)


async def test_generate_streams_deltas_and_finishes(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
) -> None:
    responses = [response async for response in stub.Generate(generate())]
    assert [r.delta.sequence for r in responses[:-1]] == [0, 1, 2]
    assert [list(r.delta.token_ids) for r in responses[:-1]] == [[11], [12], [13]]
    finish = responses[-1].finish
    assert finish.reason == types_pb2.FINISH_REASON_LENGTH
    assert finish.usage == types_pb2.Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"model": "other"}, "MODEL_NOT_FOUND", "model"),
        ({"model": "alias"}, "MODEL_NOT_FOUND", "model"),
        ({"text": ""}, "INVALID_REQUEST", "input"),
        ({"text": "w " * 64}, "CONTEXT_TOO_LONG", None),
        ({"text": "w" * 10_000}, "CONTEXT_TOO_LONG", None),
        ({"sampling": pb.SamplingParams(max_tokens=63)}, "CONTEXT_TOO_LONG", None),
        ({"sampling": pb.SamplingParams(max_tokens=0)}, "INVALID_REQUEST", "sampling.max_tokens"),
        ({"sampling": pb.SamplingParams(temperature=2.5)}, "INVALID_REQUEST", "sampling.temperature"),
        (
            {"sampling": pb.SamplingParams(temperature=float("nan"))},
            "INVALID_REQUEST",
            "sampling.temperature",
        ),
        ({"sampling": pb.SamplingParams(top_p=0)}, "INVALID_REQUEST", "sampling.top_p"),
        ({"request_id": ""}, "INVALID_REQUEST", "request_id"),
        ({"request_id": "x" * 129}, "INVALID_REQUEST", "request_id"),
    ],
)
async def test_bad_requests_have_their_reason(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, fields: dict[str, Any], reason: str, field: str | None
) -> None:
    error = await failure(stub.Generate(generate(**fields)))
    assert (error.reason, error.field) == (reason, field)


async def test_the_longest_prompt_that_fits_is_served(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
) -> None:
    responses = [r async for r in stub.Generate(generate(text="w " * 63))]
    assert [list(r.delta.token_ids) for r in responses[:-1]] == [[11]]


async def test_serve_openai_over_the_wire(
    worker: Worker, stub: inference_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    tenant = types_pb2.TenantContext(handle="h", epoch=2, cache_salt="salt")
    body = orjson.dumps({"model": "fake", "messages": [], "stream": True})
    request = pb.ServeOpenAIRequest(request_id="r", path="/v1/chat/completions", body=body, tenant=tenant)
    responses = [response async for response in stub.ServeOpenAI(request)]
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["head", "json", "json", "json", "json", "finish"]
    assert responses[0].head.content_type == "text/event-stream"
    assert list(responses[2].json.tokens[0].token_ids) == [11]
    assert responses[-1].finish.usage.completion_tokens == 3
    assert worker.engine.bodies[0]["cache_salt"] == "salt"


async def test_replay_is_refused_and_not_ignored(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
    request = pb.ServeOpenAIRequest(
        request_id="r", path="/v1/chat/completions", body=b"{}", replay=[pb.ReplayedChoice(token_ids=[1])]
    )
    assert (await failure(stub.ServeOpenAI(request))).reason == "STREAM_NOT_RESUMABLE"


@pytest.mark.parametrize("rpc", ["generate", "openai"])
async def test_cancelling_the_call_aborts_the_engine_request(
    worker: Worker, stub: inference_pb2_grpc.InferenceServiceAsyncStub, rpc: str
) -> None:
    worker.engine.hold.clear()
    call: Any
    if rpc == "generate":
        call = stub.Generate(generate())
    else:
        call = stub.ServeOpenAI(
            pb.ServeOpenAIRequest(request_id="g", path="/v1/chat/completions", body=b'{"stream":true}')
        )
    await worker.engine.holding.wait()
    assert len(worker.in_flight) == 1
    call.cancel()
    async with asyncio.timeout(1):
        await worker.engine.was_aborted.wait()
    assert await worker.in_flight.drain(1.0) == 0


async def test_a_request_id_that_is_open_is_refused(
    worker: Worker, stub: inference_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    worker.engine.hold.clear()
    first = stub.Generate(generate())
    await worker.engine.holding.wait()
    error = await failure(stub.Generate(generate()))
    assert (error.reason, error.field) == ("INVALID_REQUEST", "request_id")
    worker.engine.hold.set()
    assert len([r async for r in first]) == 4
    # Closed, it may be used again.
    assert len([r async for r in stub.Generate(generate())]) == 4


async def test_drain_waits_then_aborts(
    worker: Worker, stub: inference_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    worker.engine.hold.clear()
    call = stub.Generate(generate())
    await worker.engine.holding.wait()
    async with worker.channel("operator") as channel:
        operator = inference_pb2_grpc.InferenceServiceStub(channel)
        drained = await operator.Drain(pb.DrainRequest(grace_ms=50))
    assert drained.aborted_requests == 1
    ended = await failure(call)
    assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
    assert worker.engine.aborted == ["g"]
    refused = await failure(stub.Generate(generate(request_id="h")))
    assert (refused.reason, refused.retry_after_s) == ("OVERLOADED", 1)
    watch = stub.WatchLoad(pb.WatchLoadRequest())
    report = await watch.read()
    assert isinstance(report, pb.WatchLoadResponse)
    assert report.draining
    watch.cancel()


async def test_watch_load_reports_and_bounds_its_interval(
    worker: Worker, stub: inference_pb2_grpc.InferenceServiceAsyncStub
) -> None:
    watch = stub.WatchLoad(pb.WatchLoadRequest(interval_ms=100))
    first, second = await watch.read(), await watch.read()
    assert isinstance(first, pb.WatchLoadResponse)
    assert isinstance(second, pb.WatchLoadResponse)
    assert second.observed_at.ToNanoseconds() - first.observed_at.ToNanoseconds() > 80_000_000
    assert (first.worker, first.model_version) == ("worker-0", "ab" * 32)
    watch.cancel()
    assert (await failure(stub.WatchLoad(pb.WatchLoadRequest(interval_ms=99)))).field == "interval_ms"


@pytest.mark.parametrize(
    ("role", "method", "allowed"),
    [
        ("gateway", "GetModelInfo", True),
        ("operator", "GetModelInfo", True),
        ("worker", "GetModelInfo", False),
        ("vault", "GetModelInfo", False),
        ("gateway", "Drain", False),
        ("operator", "Drain", True),
    ],
)
async def test_roles(worker: Worker, role: str, method: str, allowed: bool) -> None:
    async with worker.channel(role) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call: Any = {
            "GetModelInfo": lambda: stub.GetModelInfo(pb.GetModelInfoRequest()),
            "Drain": lambda: stub.Drain(pb.DrainRequest()),
        }[method]
        if allowed:
            await call()
            return
        with pytest.raises(grpc.RpcError) as denied:
            await call()
        assert SealmeshError.from_rpc_error(denied.value).reason == "ROLE_DENIED"
