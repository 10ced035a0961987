"""Personal data through every skin: the worker sees placeholders, the caller the originals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import orjson
import pytest
from sealmesh.gateway.pii.filter import MaskedRequest, MaskedText, PiiFilter
from sealmesh.gateway.privacy import PrivacyFilter
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.protos.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from sealmesh.protos.inference.v1 import inference_pb2
from sealmesh.telemetry.telemetry import Telemetry

from tests.support.gateway import RunningGateway, run_gateway
from tests.support.scripted_worker import Context, ScriptedWorker, chat_chunk, event, finish, head

pytestmark = pytest.mark.asyncio(loop_scope="module")

Messages = AsyncIterator[inference_pb2.ServeOpenAIResponse]
CHAT = "/v1/chat/completions"
VALUES = ("11010519491231002X", "13800138000", "zhang.san@example.com")
TEXT = f"我的身份证{VALUES[0]}，手机 {VALUES[1]}，邮箱{VALUES[2]} 🎉"
SEEN = VALUES


def chat(text: str, *, stream: bool = False) -> dict[str, object]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "stream": stream}


def streamed_text(reply: httpx.Response) -> str:
    events = [item.removeprefix("data: ") for item in reply.text.split("\n\n") if item]
    assert events[-1] == "[DONE]"
    return "".join(
        choice["delta"].get("content") or "" for item in events[:-1] for choice in json.loads(item)["choices"]
    )


def assert_hidden(worker: ScriptedWorker) -> None:
    arrived = b"".join(request.SerializeToString() for request in worker.requests).decode("utf-8", "replace")
    assert worker.requests
    for value in SEEN:
        assert value not in arrived


async def test_openai_unary(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    reply = await http.post(CHAT, json=chat(TEXT))
    assert reply.json()["choices"][0]["message"]["content"] == TEXT
    assert_hidden(worker)


@pytest.mark.parametrize("piece", range(1, 24))
async def test_openai_stream_cut_anywhere(
    http: httpx.AsyncClient, worker: ScriptedWorker, piece: int
) -> None:
    worker.piece = piece
    reply = await http.post(CHAT, json=chat(TEXT, stream=True))
    assert streamed_text(reply) == TEXT
    assert_hidden(worker)


async def test_ordinary_text_is_not_held_back(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    worker.piece = 1
    text = f"{VALUES[1]} plain words"
    reply = await http.post(CHAT, json=chat(text, stream=True))
    events = [json.loads(item[6:]) for item in reply.text.split("\n\n") if item.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    assert [piece for piece in pieces if piece][-5:] == list("words")


async def test_restored_pieces_go_out_as_they_come(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    """The answer is not collected first: what is certain is sent while the worker still works."""
    more = asyncio.Event()

    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        seen = orjson.loads(request.body)["messages"][0]["content"]
        yield head(stream=True)
        yield event(0, chat_chunk({"content": f"{seen}, and"}))
        await more.wait()
        yield event(1, chat_chunk({"content": " so on"}, "stop"))
        yield finish()

    worker.script = script
    async with http.stream("POST", CHAT, json=chat(VALUES[1], stream=True)) as reply:
        lines = reply.aiter_lines()
        first = await asyncio.wait_for(anext(lines), 5)
        assert f"{VALUES[1]}, and" in first
        more.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_garbage_from_a_worker_is_a_typed_error(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, b'{"choices": [')
        yield finish()

    worker.script = script
    reply = await http.post(CHAT, json=chat(TEXT, stream=True))
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "engine_failed"


async def test_tool_arguments(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    """Arguments in the history are masked; those of the answer come back restored, cut at every byte."""

    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        body = orjson.loads(request.body)
        arguments = body["messages"][1]["tool_calls"][0]["function"]["arguments"]
        yield head(stream=True)
        for sequence, character in enumerate(arguments):
            call: dict[str, object] = {"index": 0, "function": {"arguments": character}}
            if sequence == 0:
                call |= {"id": "call_1", "type": "function"}
                call["function"] = {"name": "dial", "arguments": character}
            yield event(sequence, chat_chunk({"tool_calls": [call]}))
        yield event(len(arguments), chat_chunk({}, "tool_calls"))
        yield finish()

    worker.script = script
    arguments = json.dumps({"to": VALUES[1], "note": f'say "{VALUES[2]}"\n'}, ensure_ascii=False)
    call = {"id": "call_0", "type": "function", "function": {"name": "dial", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "call them"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": f"{VALUES[0]} did not answer"},
    ]
    reply = await http.post(CHAT, json={"model": "echo", "messages": messages, "stream": True})
    events = [json.loads(item[6:]) for item in reply.text.split("\n\n") if item.startswith("data: {")]
    pieces = [
        call["function"]["arguments"]
        for chunk in events
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert json.loads("".join(pieces)) == json.loads(arguments)
    assert_hidden(worker)


async def test_placeholders_are_stable_over_turns_and_differ_between_tenants(
    http: httpx.AsyncClient, worker: ScriptedWorker, gateway: RunningGateway
) -> None:
    from sealmesh.gateway.access.keys import add_api_key

    await http.post(CHAT, json=chat(f"call {VALUES[1]}"))
    await http.post(CHAT, json=chat(f"again, call {VALUES[1]} please"))
    first = worker.body(0)["messages"][0]["content"].removeprefix("call ")
    assert first in worker.body(1)["messages"][0]["content"]
    other = add_api_key(gateway.keys_file, "globex")
    while len(worker.requests) < 3:  # until the new key is known
        await http.post(CHAT, json=chat(f"call {VALUES[1]}"), headers={"authorization": f"Bearer {other}"})
    assert first not in worker.body(2)["messages"][0]["content"]
    assert worker.requests[2].tenant.handle != worker.requests[0].tenant.handle


async def test_an_engine_error_that_quotes_the_prompt(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        text = orjson.loads(request.body)["messages"][0]["content"]
        yield head(400)
        yield event(0, {"error": {"message": f"bad: {text}", "type": "x", "param": None, "code": 400}})
        yield finish(0, 0)

    worker.script = script
    reply = await http.post(CHAT, json=chat(TEXT))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == f"bad: {TEXT}"


async def test_where_it_cannot_be_masked_it_is_refused(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    schema = {"type": "object", "properties": {"who": {"enum": [VALUES[0]]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    reply = await http.post(CHAT, json=chat("hi") | {"tools": [tool]})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "pii_blocked"
    assert VALUES[0] not in reply.text
    assert worker.requests == []


async def test_rest_and_grpc(
    http: httpx.AsyncClient, worker: ScriptedWorker, gateway: RunningGateway
) -> None:
    reply = await http.post("/api/v1/models/echo:generateText", json={"prompt": TEXT})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line.get("textDelta", "") for line in lines) == TEXT
    findings = lines[-1]["finish"]["findings"]
    assert {finding["type"] for finding in findings} == {"CN_ID", "CN_MOBILE", "EMAIL"}
    for finding in findings:
        assert TEXT[finding["start"] : finding["end"]] in VALUES
        assert finding["field"] == "/prompt"
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.CreateChatCompletionRequest(
            model="models/echo",
            messages=[gateway_pb2.ChatMessage(role=gateway_pb2.ChatMessage.ROLE_USER, content=TEXT)],
        )
        answers = [part async for part in stub.CreateChatCompletion(request, metadata=gateway.metadata)]
    assert "".join(part.delta.content for part in answers) == TEXT
    assert [finding.field for finding in answers[-1].finish.findings] == ["/messages/0/content"] * 3
    assert_hidden(worker)


async def test_mask_text(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    reply = await http.post("/api/v1/text:mask", json={"text": TEXT})
    document = reply.json()
    assert not any(value in document["text"] for value in SEEN)
    assert len(document["findings"]) == 3
    assert worker.requests == []


async def test_a_large_request_is_masked_too(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    text = "无关的文字。" * 3000 + TEXT
    reply = await http.post(CHAT, json=chat(text))
    assert reply.json()["choices"][0]["message"]["content"] == text
    assert_hidden(worker)


async def test_values_are_in_no_log_and_no_span(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "traces"
    async with (
        ScriptedWorker() as worker,
        run_gateway(tmp_path, [worker.address], log_level="debug", trace_dir=traces) as gateway,
        httpx.AsyncClient(base_url=gateway.http, headers=gateway.headers) as http,
    ):
        await http.post(CHAT, json=chat(TEXT, stream=True))
        await http.post(CHAT, json=chat("nothing personal"))
        await http.post(CHAT, json=chat(TEXT) | {"chat_template": TEXT})
        await http.post(f"/v1/models/{VALUES[1]}", json={})
        await http.get(f"/api/v1/models/{VALUES[1]}?x={VALUES[2]}")
        key = gateway.key
    logged = capfd.readouterr()
    spans = "".join(path.read_text() for path in traces.glob("*.jsonl"))
    names = {json.loads(line)["name"] for line in spans.splitlines()}
    masks = [json.loads(line)["attributes"] for line in spans.splitlines() if '"pii.mask"' in line]
    types = {mask["sealmesh.pii.findings"]: mask.get("sealmesh.pii.types") for mask in masks}
    assert types == {0: None, 3: "CN_ID,CN_MOBILE,EMAIL"}
    assert {"POST /v1/chat/completions", "pii.mask", "pii.restore"} <= names
    assert "sealmesh.inference.v1.InferenceService/ServeOpenAI" in names
    assert not any("Health" in name or "GetModelInfo" in name for name in names)
    assert "route=/v1/chat/completions" in logged.err
    for value in (*SEEN, key, "acme"):
        assert value not in logged.err + logged.out + spans


class BrokenFilter(PiiFilter):
    """A filter with a defect."""

    def mask_openai_request(self, body: dict[str, object]) -> MaskedRequest:
        raise ValueError(f"unforeseen: {body}")

    def mask_text(self, text: str, field: str = "") -> MaskedText:
        raise ValueError(f"unforeseen: {text}")


async def test_a_broken_filter_fails_closed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry.build("gateway", GatewaySettings.model_validate({}))
    privacy = PrivacyFilter(telemetry, make_filter=BrokenFilter)
    async with (
        ScriptedWorker() as worker,
        run_gateway(tmp_path, [worker.address], privacy=privacy) as gateway,
        httpx.AsyncClient(base_url=gateway.http, headers=gateway.headers) as http,
    ):
        for text in (TEXT, "无关的文字。" * 3000 + TEXT):  # inline, and beside the event loop
            reply = await http.post(CHAT, json=chat(text))
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "dependency_unavailable"
            assert VALUES[0] not in reply.text
        assert (await http.post("/api/v1/text:mask", json={"text": TEXT})).status_code == 503
        assert worker.requests == []
    await telemetry.close()
    assert VALUES[0] not in capfd.readouterr().err
