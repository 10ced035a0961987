"""The gRPC surface with generated stubs, reflection and a generic client."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from sealmesh.protos.inference.v1 import inference_pb2
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.support.gateway import RunningGateway
from tests.support.scripted_worker import Context, ScriptedWorker, error_document, event, finish, head

pytestmark = pytest.mark.asyncio(loop_scope="module")

Messages = AsyncIterator[inference_pb2.ServeOpenAIResponse]
SERVICE = "sealmesh.gateway.v1.GatewayService"


@pytest_asyncio.fixture(loop_scope="module")
async def channel(gateway: RunningGateway) -> AsyncIterator[grpc.aio.Channel]:
    # The client's own default is 4 MB; the server's limit is what is tested.
    options = [("grpc.max_receive_message_length", 64 * 1024 * 1024)]
    async with grpc.aio.insecure_channel(gateway.grpc, options=options) as opened:
        yield opened


def generate(prompt: str = "hello", model: str = "models/echo") -> gateway_pb2.GenerateTextRequest:
    return gateway_pb2.GenerateTextRequest(model=model, prompt=prompt)


async def test_generate_text(channel: grpc.aio.Channel, gateway: RunningGateway) -> None:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    parts = [part async for part in stub.GenerateText(generate("one two"), metadata=gateway.metadata)]
    assert "".join(part.text_delta for part in parts) == "one two"
    assert [part.WhichOneof("event") for part in parts].count("finish") == 1
    assert parts[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
    assert parts[-1].finish.usage.completion_tokens == 5


async def test_models(channel: grpc.aio.Channel, gateway: RunningGateway) -> None:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    page = await stub.ListModels(gateway_pb2.ListModelsRequest(page_size=5000), metadata=gateway.metadata)
    assert [model.name for model in page.models] == ["models/echo", "models/org%2Fecho"]
    model = await stub.GetModel(gateway_pb2.GetModelRequest(name="models/echo"), metadata=gateway.metadata)
    assert model.ready
    assert model.max_context_tokens == 2048


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (generate(""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (generate(model="echo"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (generate(model="models/"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (generate(model="models/other"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    ],
)
async def test_typed_errors(
    channel: grpc.aio.Channel,
    gateway: RunningGateway,
    request_: gateway_pb2.GenerateTextRequest,
    code: grpc.StatusCode,
    reason: str,
) -> None:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.GenerateText(request_, metadata=gateway.metadata):
            pass
    assert caught.value.code() == code
    assert SealmeshError.from_rpc_error(caught.value).reason == reason


@pytest.mark.parametrize("role", [gateway_pb2.ChatMessage.ROLE_UNSPECIFIED, 99])
async def test_a_message_without_a_role(
    channel: grpc.aio.Channel, gateway: RunningGateway, role: gateway_pb2.ChatMessage.Role.ValueType
) -> None:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    message = gateway_pb2.ChatMessage(role=role, content="x")
    request = gateway_pb2.CreateChatCompletionRequest(model="models/echo", messages=[message])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.CreateChatCompletion(request, metadata=gateway.metadata):
            pass
    assert SealmeshError.from_rpc_error(caught.value).field == "messages[0].role"


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer sk-sealmesh-wrong"),),
        (("x-api-key", "KEY"),),
        (("authorization", "Bearer KEY"), ("authorization", "Bearer other")),
    ],
)
async def test_needs_a_key(
    channel: grpc.aio.Channel,
    gateway: RunningGateway,
    worker: ScriptedWorker,
    metadata: tuple[tuple[str, str], ...],
) -> None:
    filled = tuple((key, value.replace("KEY", gateway.key)) for key, value in metadata)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.GenerateText(generate(), metadata=filled):
            pass
    assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
    assert worker.requests == []


async def test_every_rpc_has_a_rule(gateway: RunningGateway) -> None:
    from sealmesh.gateway.access.identity import OPERATION_ROLES
    from sealmesh.gateway.service import OPERATIONS
    from sealmesh.gateway.service import SERVICE as DESCRIPTOR

    methods = {f"{DESCRIPTOR.full_name}/{method.name}" for method in DESCRIPTOR.methods}
    assert methods == OPERATIONS.keys()
    assert set(OPERATIONS.values()) <= OPERATION_ROLES.keys()


async def test_role_that_may_not_infer(channel: grpc.aio.Channel, gateway: RunningGateway) -> None:
    from sealmesh.gateway.access.keys import add_api_key

    key = add_api_key(gateway.keys_file, "acme", "audit")
    metadata = (("authorization", f"Bearer {key}"),)
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    async with asyncio.timeout(5):
        while True:
            try:
                await stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata)
                break
            except grpc.aio.AioRpcError:  # the gateway reads the key file again within half a second
                await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.GenerateText(generate(), metadata=metadata):
            pass
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_caller_that_leaves_cancels_the_worker(
    channel: grpc.aio.Channel, gateway: RunningGateway, worker: ScriptedWorker, how: str
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, {"choices": [{"index": 0, "text": "half", "finish_reason": None}]})
        await asyncio.Event().wait()

    worker.script = script
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    call = stub.GenerateText(
        generate(), metadata=gateway.metadata, timeout=0.5 if how == "deadline" else None
    )
    parts = aiter(call)
    assert (await anext(parts)).text_delta == "half"
    if how == "cancel":
        call.cancel()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(parts)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(worker.cancelled.wait(), 5)


async def test_an_engine_error_is_a_status_not_data(
    channel: grpc.aio.Channel, gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, {"choices": [{"index": 0, "text": "half", "finish_reason": None}]})
        yield event(1, error_document(500, "engine died"))
        yield finish()

    worker.script = script
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    parts = aiter(stub.GenerateText(generate(), metadata=gateway.metadata))
    assert (await anext(parts)).text_delta == "half"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(parts)
    assert SealmeshError.from_rpc_error(caught.value).reason == "ENGINE_FAILED"


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (400, "This model's maximum context length is 2048 tokens.", "CONTEXT_TOO_LONG"),
        (400, "n must be at most 4. Set the VLLM_MAX_N_SEQUENCES environment variable.", "INVALID_REQUEST"),
        (404, "The model `echo` does not exist.", "MODEL_NOT_FOUND"),
    ],
)
async def test_a_refusal_by_the_engine_is_a_status_in_our_words(
    channel: grpc.aio.Channel,
    gateway: RunningGateway,
    worker: ScriptedWorker,
    status: int,
    message: str,
    reason: str,
) -> None:
    async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(status)
        yield event(0, error_document(status, message))
        yield finish(0, 0)

    worker.script = refuse
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.GenerateText(generate(), metadata=gateway.metadata)))
    error = SealmeshError.from_rpc_error(caught.value)
    assert error.reason == reason
    assert error.message == message.partition(" Set the")[0]


async def test_large_message(channel: grpc.aio.Channel, gateway: RunningGateway) -> None:
    text = "some words " * 800_000  # 8.8 MB
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    answer = await stub.MaskText(gateway_pb2.MaskTextRequest(text=text), metadata=gateway.metadata)
    assert answer.text == text


async def test_health_needs_no_key(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_generic_client_by_reflection(gateway: RunningGateway) -> None:
    """`buf curl`, like grpcurl, knows nothing of our protos; the server tells it."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "buf"),
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        "--header",
        f"authorization: Bearer {gateway.key}",
        "--data",
        json.dumps({"model": "models/echo", "prompt": "hello"}),
        f"http://{gateway.grpc}/{SERVICE}/GenerateText",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "FINISH_REASON_LENGTH" in out.decode()


async def test_reflection_lists_the_service(channel: grpc.aio.Channel) -> None:
    from grpc_reflection.v1alpha import (
        reflection_pb2,
        reflection_pb2_grpc,
    )

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [service.name async for reply in call for service in reply.list_services_response.service]
    assert SERVICE in names
