"""REST by transcoding, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from sealmesh.protos.inference.v1 import inference_pb2

from tests.support.gateway import RunningGateway
from tests.support.scripted_worker import Context, ScriptedWorker, chat_chunk, event, finish, head

pytestmark = pytest.mark.asyncio(loop_scope="module")

Messages = AsyncIterator[inference_pb2.ServeOpenAIResponse]
GENERATE = "/api/v1/models/echo:generateText"
CHAT = "/api/v1/models/echo:createChatCompletion"


async def test_generate_text_as_lines(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    body = {"prompt": "hello", "sampling": {"maxTokens": 8, "temperature": 0.5, "seed": "-42", "stop": ["x"]}}
    reply = await http.post(GENERATE, json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.headers["cache-control"] == "no-store"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines == [
        {"textDelta": "hell"},
        {"textDelta": "o"},
        {
            "finish": {
                "reason": "FINISH_REASON_LENGTH",
                "usage": {"promptTokens": "7", "completionTokens": "5"},
            }
        },
    ]
    assert worker.requests[0].path == "/v1/completions"
    assert worker.body() == {
        "model": "echo",
        "prompt": "hello",
        "stream": True,
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": -42,
        "stop": ["x"],
    }


async def test_server_sent_events_when_accepted(http: httpx.AsyncClient) -> None:
    reply = await http.post(GENERATE, json={"prompt": "hello"}, headers={"accept": "text/event-stream"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = reply.text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == {"textDelta": "hell"}
    assert events[-1] == ""


async def test_chat_completion(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    body = {
        "messages": [
            {"role": "ROLE_SYSTEM", "content": "be brief"},
            {"role": 2, "content": "hi", "name": "ann"},
            {"role": "ROLE_ASSISTANT", "toolCalls": [{"id": "c1", "name": "f", "argumentsJson": "{}"}]},
            {"role": "ROLE_TOOL", "toolCallId": "c1", "content": "42"},
        ],
        "tools": [{"name": "f", "description": "d", "parameters": {"type": "object", "minProperties": 1}}],
        "sampling": {"topP": 0.5},
    }
    reply = await http.post(CHAT, json=body)
    assert reply.status_code == 200
    assert worker.requests[0].path == "/v1/chat/completions"
    arrived = worker.body()
    assert arrived["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert arrived["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {"type": "object", "minProperties": 1},
            },
        }
    ]
    assert arrived["top_p"] == 0.5
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[0] == {"delta": {"content": "42"}}
    assert lines[-1]["finish"]["reason"] == "FINISH_REASON_STOP"


async def test_deltas_of_tools_and_reasoning(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    call = {"index": 1, "id": "c9", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}

    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, chat_chunk({"role": "assistant", "reasoning": "hm"}))
        yield event(1, chat_chunk({"tool_calls": [call]}))
        yield event(2, chat_chunk({}, "tool_calls"))
        yield finish()

    worker.script = script
    reply = await http.post(CHAT, json={"messages": [{"role": "ROLE_USER", "content": "x"}]})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[0] == {"delta": {"reasoning": "hm"}}
    assert lines[1] == {
        "delta": {"toolCalls": [{"index": 1, "id": "c9", "name": "f", "argumentsJson": '{"a"'}]}
    }
    assert lines[2]["finish"]["reason"] == "FINISH_REASON_TOOL_CALLS"


async def test_models_in_pages(http: httpx.AsyncClient) -> None:
    first = (await http.get("/api/v1/models?page_size=1")).json()
    assert [model["name"] for model in first["models"]] == ["models/echo"]
    assert first["models"][0]["sealed"] is True
    second = (await http.get("/api/v1/models", params={"pageToken": first["nextPageToken"]})).json()
    assert [model["name"] for model in second["models"]] == ["models/org%2Fecho"]
    assert "nextPageToken" not in second


async def test_query_names_and_values_are_url_decoded(http: httpx.AsyncClient) -> None:
    reply = await http.get("/api/v1/models?page%5Fsize=%31&page_token=")
    assert len(reply.json()["models"]) == 1


async def test_a_model_whose_name_has_a_slash(http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/v1/models/org%2Fecho")).json()["name"] == "models/org%2Fecho"
    assert (await http.get("/api/v1/models/org/echo")).status_code == 404
    reply = await http.post("/api/v1/models/org%2Fecho:generateText", json={"prompt": "x"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "reason"),
    [
        ("GET", "/api/v1/models/none", b"", 404, "NOT_FOUND", "MODEL_NOT_FOUND"),
        ("GET", "/api/v1/nothing", b"", 404, "NOT_FOUND", "UNKNOWN_METHOD"),
        ("POST", "/api/v1/models/echo:explode", b"{}", 404, "NOT_FOUND", "UNKNOWN_METHOD"),
        ("DELETE", "/api/v1/models/echo", b"", 405, "UNIMPLEMENTED", "UNKNOWN_METHOD"),
        ("GET", GENERATE, b"", 404, "NOT_FOUND", "MODEL_NOT_FOUND"),
        ("POST", "/api/v1/models", b"{}", 405, "UNIMPLEMENTED", "UNKNOWN_METHOD"),
        ("POST", GENERATE, b"{", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("POST", GENERATE, b"[]", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("POST", GENERATE, b"", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("POST", GENERATE, b'{"promt": "x"}', 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("POST", GENERATE, b'{"prompt": 1}', 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("POST", GENERATE + "?prompt=x", b"{}", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("POST", GENERATE, b" " * 70000, 413, "RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE"),
        ("GET", "/api/v1/models?page_size=x", b"", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("GET", "/api/v1/models?page_size=-1", b"", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("GET", "/api/v1/models?page_token=!!!", b"", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("GET", "/api/v1/models?page_size=%FF", b"", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        ("GET", "/api/v1/models?other=1", b"", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
    ],
)
async def test_errors(
    http: httpx.AsyncClient, method: str, path: str, content: bytes, status: int, code: str, reason: str
) -> None:
    reply = await http.request(method, path, content=content)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["code"] == status
    assert error["status"] == code
    assert error["details"][0]["reason"] == reason
    assert error["details"][0]["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"sampling": {"maxTokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"temperature": 2.5}}, "sampling.temperature"),
        ({"sampling": {"topP": 0}}, "sampling.top_p"),
        ({"sampling": {"stop": list("abcde")}}, "sampling.stop"),
    ],
)
async def test_ranges_name_the_field(http: httpx.AsyncClient, body: dict[str, object], field: str) -> None:
    reply = await http.post(GENERATE, json={"prompt": "x", **body})
    assert reply.status_code == 400
    details = reply.json()["error"]["details"]
    assert details[1]["fieldViolations"][0]["field"] == field


@pytest.mark.parametrize("path", ["/api/v1/models", "/api/v1/nothing"])
async def test_needs_a_key(gateway: RunningGateway, path: str) -> None:
    async with httpx.AsyncClient(base_url=gateway.http) as stranger:
        reply = await stranger.get(path)
    assert reply.status_code == 401
    assert reply.json()["error"]["status"] == "UNAUTHENTICATED"


async def test_an_error_before_the_first_message_is_a_status(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(400)
        yield event(0, {"error": {"message": "This model's maximum context length is 8 tokens"}})
        yield finish(0, 0)

    worker.script = script
    reply = await http.post(GENERATE, json={"prompt": "x"})
    assert reply.status_code == 400
    assert reply.json()["error"]["details"][0]["reason"] == "CONTEXT_TOO_LONG"


async def test_an_error_inside_a_stream_is_its_last_line(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, {"choices": [{"index": 0, "text": "half", "finish_reason": None}]})
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    worker.script = script
    reply = await http.post(GENERATE, json={"prompt": "x"})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[0] == {"textDelta": "half"}
    assert lines[1]["error"]["status"] == "UNAVAILABLE"
    assert lines[1]["error"]["details"][0]["reason"] == "ENGINE_FAILED"
    assert len(lines) == 2


async def test_an_answer_without_a_reason_is_not_finished(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, {"choices": [{"index": 0, "text": "half", "finish_reason": None}]})
        yield finish()

    worker.script = script
    reply = await http.post(GENERATE, json={"prompt": "x"})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "finish" not in lines[-1]
    assert lines[-1]["error"]["details"][0]["reason"] == "ENGINE_FAILED"


async def test_disconnect_cancels_the_rpc(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, {"choices": [{"index": 0, "text": "half", "finish_reason": None}]})
        await asyncio.Event().wait()

    worker.script = script
    async with http.stream("POST", GENERATE, json={"prompt": "x"}) as reply:
        assert "half" in await anext(reply.aiter_lines())
    await asyncio.wait_for(worker.cancelled.wait(), 5)
