"""The OpenAI surface, by an unmodified `openai` client and by plain HTTP, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from sealmesh.protos.inference.v1 import inference_pb2
from sealmesh.telemetry.runtime.errors import STATUS_DETAILS_KEY, SealmeshError

from tests.support.gateway import RunningGateway, run_gateway
from tests.support.scripted_worker import (
    Context,
    ScriptedWorker,
    chat_answer,
    chat_chunk,
    error_document,
    event,
    finish,
    head,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

Messages = AsyncIterator[inference_pb2.ServeOpenAIResponse]
HELLO: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello world"}]}
CHAT = "/v1/chat/completions"


def client(gateway: RunningGateway, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.key, max_retries=0, **options)


def sse(text: str) -> list[str]:
    """The data of each event; every event must be framed as one `data:` line and a blank one."""
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(re.fullmatch(r"data: [^\n]+", item) for item in events)
    return [item.removeprefix("data: ") for item in events]


class TestOpenAiClient:
    async def test_unary(self, gateway: RunningGateway) -> None:
        async with client(gateway) as api:
            answer = await api.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "hello 世界 😀"}]
            )
        assert answer.choices[0].message.content == "hello 世界 😀"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 12

    async def test_stream_with_usage(self, gateway: RunningGateway) -> None:
        async with client(gateway) as api:
            stream = await api.chat.completions.create(
                model="echo",
                messages=[{"role": "user", "content": "hello 世界 😀"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello 世界 😀"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5

    async def test_usage_is_not_forced_on_a_client_that_did_not_ask(self, http: httpx.AsyncClient) -> None:
        reply = await http.post(CHAT, json={**HELLO, "stream": True})
        events = sse(reply.text)
        assert events[-1] == "[DONE]"
        assert not any("usage" in json.loads(item) for item in events[:-1])

    async def test_sync_client(self, gateway: RunningGateway) -> None:
        def ask() -> tuple[str, str]:
            with openai.OpenAI(base_url=gateway.base_url, api_key=gateway.key, max_retries=0) as api:
                whole = api.completions.create(model="echo", prompt="one two", max_tokens=4)
                stream = api.chat.completions.create(
                    model="echo", messages=[{"role": "user", "content": "three four"}], stream=True
                )
                pieces = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].text, pieces

        assert await asyncio.to_thread(ask) == ("one two", "three four")

    async def test_models(self, gateway: RunningGateway) -> None:
        async with client(gateway) as api:
            listed = [model.id async for model in await api.models.list()]
            alias = await api.models.retrieve("org/echo")
        assert listed == ["echo", "org/echo"]
        assert alias.model_dump()["max_model_len"] == 2048
        assert alias.model_dump()["sealed"] is True
        assert alias.model_dump()["version"] == "5a" * 32

    async def test_embeddings_reach_the_worker(self, worker: ScriptedWorker, http: httpx.AsyncClient) -> None:
        reply = await http.post("/v1/embeddings", json={"model": "echo", "input": ["a", "b"]})
        assert reply.status_code == 200
        assert worker.requests[0].path == "/v1/embeddings"
        assert worker.body() == {"model": "echo", "input": ["a", "b"]}

    async def test_parameters_pass_through_unchanged(
        self, worker: ScriptedWorker, http: httpx.AsyncClient
    ) -> None:
        body = HELLO | {
            "temperature": 0.25,
            "top_p": 0.5,
            "seed": 9007199254740993,
            "n": 2,
            "stop": ["\n", "END"],
            "logprobs": True,
            "top_logprobs": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"const": 1}}}},
            },
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "max_completion_tokens": 16,
        }
        assert (await http.post(CHAT, json=body)).status_code == 200
        assert worker.body() == body

    async def test_what_the_worker_learns_of_the_caller(
        self, worker: ScriptedWorker, http: httpx.AsyncClient, gateway: RunningGateway
    ) -> None:
        forged = {
            "x-sealmesh-tenant": "victim",
            "x-tenant": "victim",
            "x-forwarded-user": "root",
            "x-request-id": "chosen",
        }
        reply = await http.post(CHAT, json=HELLO | {"cache_salt": "mine", "user": "u"}, headers=forged)
        request = worker.requests[0]
        assert re.fullmatch("[0-9a-f]{32}", request.tenant.handle)
        assert re.fullmatch("[0-9a-f]{32}", request.tenant.cache_salt)
        assert request.tenant.handle != request.tenant.cache_salt
        assert request.tenant.epoch == 1
        assert request.request_id == reply.headers["x-request-id"] != "chosen"
        assert not {"cache_salt", "user"} & worker.body().keys()
        everything = str(worker.metadata) + str(request)
        for secret in ("victim", "root", "chosen", "acme", gateway.key, "authorization"):
            assert secret not in everything
        await http.post(CHAT, json=HELLO)
        assert worker.requests[1].tenant == request.tenant
        assert worker.requests[1].request_id != request.request_id


class TestErrors:
    async def expect(self, reply: httpx.Response, status: int, code: str | int) -> dict[str, Any]:
        assert reply.status_code == status, reply.text
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["content-type"] == "application/json"
        error: dict[str, Any] = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == code
        return error

    @pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/nothing"])
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer sk-sealmesh-" + "a" * 51},
            {"authorization": "Bearer"},
            {"authorization": "Basic eDp5"},
            {"authorization": "Bearer ключ".encode()},
        ],
    )
    async def test_missing_or_wrong_key(
        self, gateway: RunningGateway, worker: ScriptedWorker, path: str, headers: dict[str, str]
    ) -> None:
        async with httpx.AsyncClient(base_url=gateway.http) as stranger:
            method = "GET" if path in ("/v1/models", "/v1/nothing") else "POST"
            reply = await stranger.request(
                method, path, headers=headers, content=b"{}" if method == "POST" else None
            )
        error = await self.expect(reply, 401, "invalid_api_key")
        assert error["type"] == "authentication_error"
        assert "Ask the operator" in error["message"]
        assert "sealmesh keys api-key create" in error["message"]
        assert worker.requests == []

    async def test_two_credentials_are_ambiguous(self, gateway: RunningGateway) -> None:
        async with httpx.AsyncClient(base_url=gateway.http) as stranger:
            reply = await stranger.get(
                "/v1/models",
                headers=[("authorization", f"Bearer {gateway.key}"), ("authorization", "Bearer other")],
            )
        assert reply.status_code == 400

    async def test_unknown_model(self, gateway: RunningGateway) -> None:
        async with client(gateway) as api:
            with pytest.raises(openai.NotFoundError) as caught:
                await api.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
            with pytest.raises(openai.NotFoundError):
                await api.models.retrieve("gpt-9")
        assert caught.value.code == "model_not_found"
        assert "`gpt-9` does not exist" in caught.value.message
        assert "GET /v1/models" in caught.value.message

    async def test_malformed_json_names_the_position(self, http: httpx.AsyncClient) -> None:
        reply = await http.post(CHAT, content=b'{"model": "echo",\n "messages": [}')
        error = await self.expect(reply, 400, "invalid_request")
        assert "line 2, column 15" in error["message"]

    @pytest.mark.parametrize(
        "content", [b"", b"[]", b'"x"', b"\xff\xfe", b'{"model":"\\ud800"}', b"{" * 5000]
    )
    async def test_bodies_that_are_no_object(self, http: httpx.AsyncClient, content: bytes) -> None:
        await self.expect(await http.post(CHAT, content=content), 400, "invalid_request")

    async def test_body_over_the_limit_by_length(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        error = await self.expect(
            await http.post(CHAT, content=b" " * (64 * 1024 + 1)), 413, "message_too_large"
        )
        assert "65536 bytes" in error["message"]
        assert worker.requests == []

    async def test_body_over_the_limit_in_chunks(self, http: httpx.AsyncClient) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 8192

        await self.expect(await http.post(CHAT, content=chunks()), 413, "message_too_large")

    async def test_body_of_exactly_the_limit(self, http: httpx.AsyncClient) -> None:
        document = json.dumps(HELLO).encode()
        reply = await http.post(CHAT, content=document + b" " * (64 * 1024 - len(document)))
        assert reply.status_code == 200

    async def test_compressed_body_is_refused_not_misread(self, http: httpx.AsyncClient) -> None:
        reply = await http.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        error = await self.expect(reply, 400, "invalid_request")
        assert "content-encoding" in error["message"]

    async def test_slow_body(self, gateway: RunningGateway) -> None:
        host, port = gateway.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        request = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
            "content-length: 100\r\n\r\n{"
        )
        writer.write(request.encode())
        await writer.drain()
        assert b" 504 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()

    async def test_body_in_single_bytes_cut_inside_characters(
        self, gateway: RunningGateway, worker: ScriptedWorker
    ) -> None:
        document = json.dumps(
            {"model": "echo", "messages": [{"role": "user", "content": "海😀"}]}, ensure_ascii=False
        ).encode()
        host, port = gateway.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [
            f"POST {CHAT} HTTP/1.1",
            "host: x",
            f"authorization: Bearer {gateway.key}",
            f"content-length: {len(document)}",
            "connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for byte in document:
            writer.write(bytes([byte]))
            await writer.drain()
        reply = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert "海😀".encode() in reply
        assert worker.body()["messages"][0]["content"] == "海😀"

    async def test_context_too_long_as_vllm_words_it(
        self, gateway: RunningGateway, worker: ScriptedWorker
    ) -> None:
        message = "This model's maximum context length is 2048 tokens. However, you requested 5000 tokens."

        async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(400)
            yield event(0, error_document(400, message))
            yield finish(0, 0)

        worker.script = refuse
        async with client(gateway) as api:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await api.chat.completions.create(
                        model="echo", messages=[{"role": "user", "content": "x"}], stream=stream
                    )
                assert message in caught.value.message
                assert caught.value.type == "invalid_request_error"
                assert caught.value.code == "context_length_exceeded"

    async def test_embeddings_of_a_model_that_makes_none(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(404)
            yield event(0, {"detail": "Not Found"})
            yield finish(0, 0)

        worker.script = refuse
        reply = await http.post("/v1/embeddings", json={"model": "echo", "input": "x"})
        error = await self.expect(reply, 400, "unsupported")
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "model"
        assert "does not make embeddings" in error["message"]
        assert not worker.cancelled.is_set()

    async def test_a_validator_dump_is_one_line(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        dump = (
            "2 validation errors:\n  {'type': 'a', 'loc': 'body.stop', 'msg': 'Input should be short', "
            "'input': '[PHONE_X]'}\n  {'type': 'b', 'loc': 'body.stop', 'msg': 'Other'}"
        )

        async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(400)
            document = error_document(400, dump)["error"]
            assert isinstance(document, dict)
            yield event(0, {"error": document | {"type": "Bad Request", "param": "body.stop"}})
            yield finish(0, 0)

        worker.script = refuse
        for stream in (False, True):
            reply = await http.post(CHAT, json=HELLO | {"stream": stream})
            error = await self.expect(reply, 400, "invalid_value")
            assert error["message"] == "stop: Input should be short"
            assert error["type"] == "invalid_request_error"
            assert error["param"] == "stop"

    async def test_a_dead_engine_shows_nothing_of_itself(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        raw = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        status = SealmeshError(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", raw).to_status()

        async def fail(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, raw, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
            )
            yield head()

        worker.script = fail
        error = await self.expect(await http.post(CHAT, json=HELLO), 503, "engine_failed")
        assert error["message"] == "the engine failed; send the request again"

    async def test_typed_error_of_the_worker(self, http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
        error = SealmeshError(
            grpc.StatusCode.UNAVAILABLE, "OVERLOADED", "the worker drains", retry_after_s=2.2
        )
        status = error.to_status()

        async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            await context.abort(
                error.code, error.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
            )
            yield head()

        worker.script = refuse
        reply = await http.post(CHAT, json=HELLO)
        body = await self.expect(reply, 503, "overloaded")
        assert body["message"] == "the worker drains"
        assert reply.headers["retry-after"] == "3"

    @pytest.mark.parametrize(
        ("path", "method", "allow"),
        [(CHAT, "GET", "POST"), ("/v1/models", "DELETE", "GET"), ("/v1/models/echo", "PUT", "GET")],
    )
    async def test_wrong_method(self, http: httpx.AsyncClient, path: str, method: str, allow: str) -> None:
        reply = await http.request(method, path)
        assert reply.headers["allow"] == allow
        await self.expect(reply, 405, "unknown_method")

    async def test_unknown_path(self, http: httpx.AsyncClient) -> None:
        await self.expect(await http.get("/v1/assistants"), 404, "unknown_method")
        assert (await http.get("/favicon.ico")).status_code == 404

    @pytest.mark.parametrize(
        ("path", "field", "value"),
        [
            ("/v1/completions", "prompt", [1, 2, 3]),
            ("/v1/completions", "prompt", [[1], [2]]),
            ("/v1/completions", "prompt_embeds", "AAAA"),
            ("/v1/embeddings", "input", [1, 2]),
            (CHAT, "documents", [{"text": "x"}]),
            (CHAT, "chat_template", "{{ messages }}"),
            (CHAT, "chat_template_kwargs", {"custom": "text"}),
            (CHAT, "priority", -1),
            (CHAT, "vllm_xargs", {"a": 1}),
            (CHAT, "mm_processor_kwargs", {}),
            (CHAT, "an_unknown_field", 0),
        ],
    )
    async def test_fields_that_the_filter_cannot_read(
        self, http: httpx.AsyncClient, worker: ScriptedWorker, path: str, field: str, value: object
    ) -> None:
        base: dict[str, object] = {"model": "echo"}
        if path == CHAT:
            base |= HELLO
        elif path == "/v1/completions":
            base["prompt"] = "x"
        reply = await http.post(path, json={**base, field: value})
        error = await self.expect(reply, 400, "field_refused")
        assert error["param"] == field
        assert field in error["message"]
        assert worker.requests == []

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image_url", "image_url": {"url": "http://internal/"}},
            {"image_url": "http://internal/"},
            {"type": "input_audio", "input_audio": {"data": ""}},
            {"type": "video_url", "video_url": {"url": "x"}},
        ],
    )
    async def test_media_are_refused(
        self, http: httpx.AsyncClient, worker: ScriptedWorker, part: dict[str, object]
    ) -> None:
        content = [{"type": "text", "text": "look"}, part]
        reply = await http.post(CHAT, json=HELLO | {"messages": [{"role": "user", "content": content}]})
        error = await self.expect(reply, 400, "field_refused")
        assert error["param"] == "messages[0].content[1].type"
        assert worker.requests == []

    async def test_nothing_hides_beside_a_text_part(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        part = {"type": "text", "text": "look", "image_url": {"url": "http://internal/"}}
        messages = [{"role": "user", "content": [part]}]
        assert (await http.post(CHAT, json=HELLO | {"messages": messages})).status_code == 200
        assert worker.body()["messages"][0]["content"] == [{"type": "text", "text": "look"}]

    @pytest.mark.parametrize(
        "change",
        [
            {"messages": []},
            {"messages": "hi"},
            {"messages": [{"content": "x"}]},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": ["x"]},
            {"model": None},
            {"model": 7},
            {"stream": "yes"},
            {"temperature": "13812345678 x"},
            {"n": 17},
            {"messages": [{"role": "13812345678", "content": "x"}]},
        ],
    )
    async def test_wrong_types(
        self, http: httpx.AsyncClient, worker: ScriptedWorker, change: dict[str, object]
    ) -> None:
        reply = await http.post(CHAT, json=HELLO | change)
        error = await self.expect(reply, 400, "invalid_request")
        assert str(error["param"]).startswith(next(iter(change)))
        assert "138" not in reply.text
        assert worker.requests == []

    async def test_the_operator_limits_choices(self, tmp_path: Path) -> None:
        async with (
            ScriptedWorker() as worker,
            run_gateway(tmp_path, [worker.address], max_choices=1) as gateway,
            httpx.AsyncClient(base_url=gateway.http, headers=gateway.headers) as http,
        ):
            error = await self.expect(await http.post(CHAT, json=HELLO | {"n": 2}), 400, "invalid_request")
            assert error["message"] == "n must be from 1 to 1 (the gateway's max_choices)"
            assert (await http.post(CHAT, json=HELLO | {"n": 1})).status_code == 200

    async def test_revoked_key_stops_working(self, gateway: RunningGateway) -> None:
        from sealmesh.gateway.access.keys import KeySet, add_api_key, read_key_file, write_key_file

        before = read_key_file(gateway.keys_file)
        second = add_api_key(gateway.keys_file, "other")
        headers = {"authorization": f"Bearer {second}"}

        async def status() -> int:
            async with httpx.AsyncClient(base_url=gateway.http) as stranger:
                return (await stranger.get("/v1/models", headers=headers)).status_code

        async with asyncio.timeout(5):
            while await status() != 200:
                pass
            write_key_file(gateway.keys_file, KeySet(before.keys, before.epochs))
            while await status() != 401:
                pass


class TestStreams:
    async def test_headers(self, http: httpx.AsyncClient) -> None:
        reply = await http.post(CHAT, json=HELLO | {"stream": True}, headers={"accept-encoding": "gzip"})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-request-id"].startswith("req-")
        assert "content-encoding" not in reply.headers
        assert "content-length" not in reply.headers

    async def test_engine_documents_are_not_rewritten(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        raw = b'{"choices":[{"delta":{"content":"\\u00e9"},"index":0}],"x":1.0,  "y":12345678901234567890}'

        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(stream=True)
            yield event(0, raw)
            yield finish()

        worker.script = script
        reply = await http.post(CHAT, json=HELLO | {"stream": True})
        assert reply.content == b"data: " + raw + b"\n\ndata: [DONE]\n\n"

    async def test_pieces_arrive_as_they_are_made(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        more = asyncio.Event()

        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(stream=True)
            yield event(0, chat_chunk({"content": "first"}))
            await more.wait()
            yield event(1, chat_chunk({}, "stop"))
            yield finish()

        worker.script = script
        async with http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            assert "first" in await asyncio.wait_for(anext(lines), 5)
            more.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"

    @pytest.mark.parametrize("how", ["ends", "aborts", "skips", "cancels"])
    async def test_broken_stream_never_looks_complete(
        self, gateway: RunningGateway, http: httpx.AsyncClient, worker: ScriptedWorker, how: str
    ) -> None:
        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(stream=True)
            yield event(0, chat_chunk({"content": "half"}))
            if how == "aborts":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if how == "cancels":
                await context.abort(grpc.StatusCode.CANCELLED, "stopped")
            if how == "skips":
                yield event(2, chat_chunk({"content": "lost"}))
                yield finish()

        worker.script = script
        reply = await http.post(CHAT, json=HELLO | {"stream": True})
        events = [json.loads(item) for item in sse(reply.text)]  # "[DONE]" would not parse as an object
        assert reply.status_code == 200
        assert events[0]["choices"][0]["delta"]["content"] == "half"
        assert events[1]["error"]["code"] == "engine_failed"
        assert len(events) == 2
        assert not any(choice["finish_reason"] for choice in events[0]["choices"])
        async with client(gateway) as api:
            stream = await api.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "x"}], stream=True
            )
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass

    async def test_engine_error_inside_a_stream_gets_no_done(
        self, http: httpx.AsyncClient, worker: ScriptedWorker
    ) -> None:
        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(stream=True)
            yield event(0, chat_chunk({"content": "half"}))
            yield event(1, error_document(500, "engine died"))
            yield finish()

        worker.script = script
        events = sse((await http.post(CHAT, json=HELLO | {"stream": True})).text)
        assert json.loads(events[0])["choices"][0]["delta"]["content"] == "half"
        assert json.loads(events[-1])["error"] == {
            "message": "engine died",
            "type": "service_unavailable_error",
            "param": None,
            "code": "engine_failed",
        }
        assert not worker.cancelled.is_set()

    @pytest.mark.parametrize("stream", [True, False])
    async def test_failure_before_the_first_document_is_a_status(
        self, http: httpx.AsyncClient, worker: ScriptedWorker, stream: bool
    ) -> None:
        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head(stream=stream)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        worker.script = script
        reply = await http.post(CHAT, json=HELLO | {"stream": stream})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "model_not_ready"
        assert int(reply.headers["retry-after"]) >= 1

    async def test_unary_cut_short_is_an_error(self, http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head()
            yield event(0, chat_answer("whole, but is it?"))

        worker.script = script
        reply = await http.post(CHAT, json=HELLO)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_failed"

    @pytest.mark.parametrize("phase", ["before the head", "after the head", "in the stream", "unary"])
    async def test_disconnect_cancels_the_rpc_at_once(
        self, http: httpx.AsyncClient, worker: ScriptedWorker, phase: str
    ) -> None:
        working = asyncio.Event()

        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            if phase != "before the head":
                yield head(stream=phase != "unary")
            if phase == "in the stream":
                yield event(0, chat_chunk({"content": "half"}))
            working.set()
            await asyncio.Event().wait()

        worker.script = script

        async def read() -> None:
            async with http.stream("POST", CHAT, json=HELLO | {"stream": phase != "unary"}) as reply:
                async for _ in reply.aiter_lines():
                    pass

        task = asyncio.create_task(read())
        await asyncio.wait_for(working.wait(), 5)
        loop = asyncio.get_running_loop()
        left = loop.time()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(worker.cancelled.wait(), 5)
        assert loop.time() - left < 0.5  # 0.1 s is the bar; a busy test machine may stretch it

    async def test_slow_reader_holds_the_worker_back(
        self, gateway: RunningGateway, worker: ScriptedWorker
    ) -> None:
        sent = 0
        document = chat_chunk({"content": "x" * 60_000})

        async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            nonlocal sent
            yield head(stream=True)
            for sequence in range(2000):
                yield event(sequence, document)
                sent = sequence
            yield finish()

        worker.script = script
        host, port = gateway.http.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(HELLO | {"stream": True}).encode()
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        await asyncio.wait_for(worker.started.wait(), 5)
        before = -1
        while sent != before or sent == 0:  # until it stands still
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 1000, "120 MB were buffered for a caller that does not read"
        writer.transport.abort()
        await asyncio.wait_for(worker.cancelled.wait(), 5)


async def test_messages_beyond_four_megabytes(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    text = "x" * (6 * 1024 * 1024)

    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head()
        yield event(0, chat_answer(text))
        yield finish()

    worker.script = script
    reply = await http.post(CHAT, json=HELLO)
    assert reply.json()["choices"][0]["message"]["content"] == text


async def test_curl(gateway: RunningGateway) -> None:
    curl = shutil.which("curl")
    assert curl, "this test needs curl: install it"
    process = await asyncio.create_subprocess_exec(
        curl,
        "-sN",
        gateway.base_url + "/chat/completions",
        "-H",
        f"Authorization: Bearer {gateway.key}",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(HELLO | {"stream": True}),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert sse(out.decode())[-1] == "[DONE]"


async def test_health_and_metrics(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/readyz")).json() == {"status": "ready"}
    await http.post(CHAT, json=HELLO)
    text = (await http.get("/metrics")).text
    assert 'http_route="/v1/chat/completions"' in text
    assert 'gen_ai_client_tokens_total{kind="input",model="echo"}' in text
