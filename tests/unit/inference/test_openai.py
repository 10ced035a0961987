import asyncio
from typing import Any

import orjson
import pytest
from sealmesh.inference.engine_call import EngineCall, Usage
from sealmesh.inference.openai import Finish, Head, JsonEvent, OpenAIRequest, serve_openai
from sealmesh.inference.request_context import Tenant
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.http import Send

from tests.support.fake_engine import FakeEngine, begin, chunk, event, reply

CHAT = "/v1/chat/completions"


def request(path: str = CHAT, method: str = "", **body: Any) -> OpenAIRequest:
    return OpenAIRequest(path, orjson.dumps({"model": "fake", "messages": [], **body}), method)


async def collect(
    engine: FakeEngine, asked: OpenAIRequest, tenant: Tenant | None = None
) -> list[Head | JsonEvent | Finish]:
    return [item async for item in serve_openai(engine, EngineCall("r1", tenant), asked)]


async def test_a_whole_answer_is_head_document_and_finish() -> None:
    head, document, finish = await collect(FakeEngine(), request())
    assert head == Head(200, "application/json")
    assert isinstance(document, JsonEvent)
    assert document.sequence == 0
    assert document.tokens == [(0, [11, 12, 13])]
    # Prompt and completion as the layer states them, cached as the engine reported.
    assert finish == Finish(Usage(7, 3, 3))


async def test_a_stream_carries_the_tokens_behind_each_event() -> None:
    head, *events, finish = await collect(FakeEngine(), request(stream=True, n=2))
    assert head == Head(200, "text/event-stream")
    documents = [item for item in events if isinstance(item, JsonEvent)]
    assert [item.sequence for item in documents] == list(range(8))
    assert [list(item.tokens) for item in documents] == [
        [],
        [],
        *([(choice, [token + choice])] for token in (11, 12, 13) for choice in (0, 1)),
    ]
    assert finish == Finish(Usage(7, 6, 3))


async def test_tokens_that_made_no_event_go_with_the_next_one() -> None:
    """A tool parser takes tokens in and sends nothing for a while."""
    engine = FakeEngine()

    async def respond(_: dict[str, Any], send: Send) -> None:
        from sealmesh.inference.engine_call import current_call

        call = current_call()
        assert call is not None
        call.begin(1)
        await begin(send, 200, "text/event-stream")
        call.note_tokens(0, 0, [1])
        await event(send, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        call.note_tokens(0, 0, [2])
        call.note_tokens(0, 0, [3, 4])
        await event(send, {"choices": [{"index": 0, "delta": {"content": "x"}}]})
        await chunk(send, b"data: [DONE]\n\n", more=False)

    engine.respond = respond
    _head, role, content, _finish = await collect(engine, request(stream=True))
    assert isinstance(role, JsonEvent)
    assert isinstance(content, JsonEvent)
    assert (list(role.tokens), list(content.tokens)) == ([], [(0, [1, 2, 3, 4])])


async def test_only_the_mesh_sets_salt_and_transfer_parameters() -> None:
    engine = FakeEngine()
    hostile = request(cache_salt="theirs", kv_transfer_params={"do_remote_prefill": True}, request_id="x")
    await collect(engine, hostile, Tenant("h", 1, "ours"))
    await collect(engine, hostile)
    assert engine.bodies[0]["cache_salt"] == "ours"
    assert "cache_salt" not in engine.bodies[1]
    assert all(not {"kv_transfer_params", "request_id"} & set(body) for body in engine.bodies)
    assert engine.headers[0]["x-request-id"] == "r1"


async def test_a_doubled_key_cannot_smuggle_another_salt() -> None:
    engine = FakeEngine()
    body = b'{"model":"fake","cache_salt":"a","cache_salt":"b"}'
    await collect(engine, OpenAIRequest(CHAT, body), Tenant("h", 1, "ours"))
    assert engine.bodies[0]["cache_salt"] == "ours"


@pytest.mark.parametrize(
    ("path", "method", "reason"),
    [
        ("/tokenize", "POST", "UNKNOWN_METHOD"),
        ("/metrics", "GET", "UNKNOWN_METHOD"),
        ("/v1/models", "POST", "UNKNOWN_METHOD"),
        (CHAT, "GET", "UNKNOWN_METHOD"),
        (CHAT + "/", "POST", "UNKNOWN_METHOD"),
    ],
)
async def test_other_paths_are_refused(path: str, method: str, reason: str) -> None:
    engine = FakeEngine()
    with pytest.raises(SealmeshError) as refused:
        await collect(engine, request(path, method))
    assert refused.value.reason == reason
    assert engine.bodies == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"a":NaN}', b'{"a":"\xff"}'])
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    engine = FakeEngine()
    with pytest.raises(SealmeshError) as refused:
        await collect(engine, OpenAIRequest(CHAT, body))
    assert (refused.value.reason, refused.value.field) == ("INVALID_REQUEST", "body")
    assert engine.bodies == []


async def test_an_error_of_the_layer_comes_as_it_is() -> None:
    engine = FakeEngine()
    error = {"error": {"message": "no such model", "code": 404}}
    engine.respond = lambda _body, send: reply(send, 404, error)
    head, document, finish = await collect(engine, request())
    assert head == Head(404, "application/json")
    assert isinstance(document, JsonEvent)
    assert orjson.loads(document.data) == error
    assert finish == Finish(Usage())


async def test_a_failure_of_the_engine_is_a_status() -> None:
    engine = FakeEngine()
    engine.respond = lambda _body, send: reply(send, 500, {"error": {"message": "engine broke"}})
    with pytest.raises(SealmeshError, match="engine broke") as failed:
        await collect(engine, request())
    assert failed.value.reason == "ENGINE_FAILED"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"message": "boom", "code": 500}, "ENGINE_FAILED"),
        ({"message": "bad", "code": 400}, "INVALID_REQUEST"),
    ],
)
async def test_an_error_inside_a_stream_is_a_status(error: dict[str, Any], reason: str) -> None:
    engine = FakeEngine()

    async def respond(_: dict[str, Any], send: Send) -> None:
        await begin(send, 200, "text/event-stream")
        await event(send, {"choices": []})
        await event(send, {"error": error})
        await chunk(send, b"data: [DONE]\n\n", more=False)

    engine.respond = respond
    answer = serve_openai(engine, EngineCall("r"), request(stream=True))
    assert [type(await anext(answer)) for _ in range(2)] == [Head, JsonEvent]
    with pytest.raises(SealmeshError) as failed:
        await anext(answer)
    assert failed.value.reason == reason


@pytest.mark.parametrize("tail", [b"", b"data: {", b'data: {"choices":[]}\n\n'])
async def test_a_stream_without_its_end_marker_is_broken(tail: bytes) -> None:
    engine = FakeEngine()

    async def respond(_: dict[str, Any], send: Send) -> None:
        await begin(send, 200, "text/event-stream")
        await event(send, {"choices": []})
        await chunk(send, tail, more=False)

    engine.respond = respond
    with pytest.raises(SealmeshError) as failed:
        await collect(engine, request(stream=True))
    assert failed.value.reason == "ENGINE_FAILED"


async def test_an_application_that_ends_midway_is_broken() -> None:
    engine = FakeEngine()

    async def respond(_: dict[str, Any], send: Send) -> None:
        await begin(send, 200, "text/event-stream")
        await event(send, {"choices": []})

    engine.respond = respond
    engine.failure = "the engine process ended"
    with pytest.raises(SealmeshError, match="the engine process ended"):
        await collect(engine, request(stream=True))


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_early_aborts_the_engine_and_tells_the_layer(stream: bool) -> None:
    engine = FakeEngine()
    engine.hold.clear()
    call = EngineCall("r1")
    consumer = asyncio.create_task(anext(aiter(_Drained(engine, call, request(stream=stream)))))
    await engine.holding.wait()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert engine.aborted == ["engine-r1"]
    assert engine.disconnected.is_set()


class _Drained:
    """Reads an answer to its end."""

    def __init__(self, engine: FakeEngine, call: EngineCall, asked: OpenAIRequest) -> None:
        self._arguments = (engine, call, asked)

    async def __aiter__(self) -> Any:
        async for _ in serve_openai(*self._arguments):
            pass
        yield None


async def test_a_slow_reader_slows_the_layer_down() -> None:
    engine = FakeEngine()
    sent = 0

    async def respond(_: dict[str, Any], send: Send) -> None:
        nonlocal sent
        await begin(send, 200, "text/event-stream")
        for _number in range(1000):
            await event(send, {"choices": []})
            sent += 1
        await chunk(send, b"data: [DONE]\n\n", more=False)

    engine.respond = respond
    answer = serve_openai(engine, EngineCall("r"), request(stream=True))
    await anext(answer)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sent < 100
    assert len([item async for item in answer if isinstance(item, JsonEvent)]) == 1000
