"""Workers that come, go, fail and refuse, behind a gateway on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from sealmesh.protos.inference.v1 import inference_pb2
from sealmesh.security.tls import LocalAuthority, TlsFiles, server_credentials

from tests.support.gateway import RunningGateway, run_gateway
from tests.support.scripted_worker import (
    Context,
    ScriptedWorker,
    chat_answer,
    chat_chunk,
    event,
    finish,
    head,
)

Messages = AsyncIterator[inference_pb2.ServeOpenAIResponse]
CHAT = "/v1/chat/completions"
HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}


def client(gateway: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.http, headers=gateway.headers, timeout=20)


async def until_refused(gateway: RunningGateway) -> None:
    while True:
        async with client(gateway) as other:
            try:
                await other.get("/healthz")
            except httpx.ConnectError:
                return


async def all_ready(gateway: RunningGateway) -> None:
    pool = gateway.gateway.pool
    await asyncio.wait_for(pool.wait_ready(len(pool.workers)), 10)


async def fail_unavailable(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
    yield head()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def until_status(http: httpx.AsyncClient, status: int) -> httpx.Response:
    """Ask until the answer has that status: what a caller sees is the only sign of a change."""
    async with asyncio.timeout(15):
        while True:
            reply = await http.post(CHAT, json=HELLO)
            if reply.status_code == status:
                return reply
            await asyncio.sleep(0.02)


async def test_no_worker_yet_then_one(tmp_path: Path) -> None:
    port = free_port()
    async with (
        run_gateway(tmp_path, [f"127.0.0.1:{port}"], wait_ready=False) as gateway,
        client(gateway) as http,
    ):
        reply = await http.post(CHAT, json=HELLO)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "model_not_ready"
        assert reply.json()["error"]["type"] == "service_unavailable_error"
        assert int(reply.headers["retry-after"]) >= 1
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200
        async with ScriptedWorker(port=port):
            await until_status(http, 200)


async def test_worker_restarts(tmp_path: Path) -> None:
    port = free_port()
    async with (
        run_gateway(tmp_path, [f"127.0.0.1:{port}"], wait_ready=False) as gateway,
        client(gateway) as http,
    ):
        async with ScriptedWorker(port=port):
            await until_status(http, 200)
        reply = await until_status(http, 503)
        assert "restarting" in reply.json()["error"]["message"]
        # Known and gone is another thing than unknown.
        assert (await http.post(CHAT, json=HELLO | {"model": "other"})).status_code == 404
        models = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["ready"]) for model in models] == [("echo", False)]
        async with ScriptedWorker(port=port):
            await until_status(http, 200)


async def test_not_serving_worker_gets_nothing(tmp_path: Path) -> None:
    async with (
        ScriptedWorker() as worker,
        run_gateway(tmp_path, [worker.address]) as gateway,
        client(gateway) as http,
    ):
        await worker.set_serving(False)
        await until_status(http, 503)
        arrived = len(worker.requests)
        assert (await http.post(CHAT, json=HELLO)).status_code == 503
        assert len(worker.requests) == arrived
        await worker.set_serving(True)
        await until_status(http, 200)


async def test_retry_once_on_another_worker(tmp_path: Path) -> None:
    async with (
        ScriptedWorker() as bad,
        ScriptedWorker() as good,
        run_gateway(tmp_path, [bad.address, good.address]) as gateway,
        client(gateway) as http,
    ):
        await all_ready(gateway)
        bad.script = fail_unavailable
        for _ in range(6):
            for stream in (False, True):
                assert (await http.post(CHAT, json=HELLO | {"stream": stream})).status_code == 200
        assert bad.requests, "the failing worker was never asked, so nothing was shown"
        assert len(good.requests) == 12
        ids = [request.request_id for request in good.requests]
        assert len(set(ids)) == len(ids)


async def test_no_third_worker_and_no_retry_of_a_refusal(tmp_path: Path) -> None:
    async with (
        ScriptedWorker() as one,
        ScriptedWorker() as two,
        ScriptedWorker() as three,
        run_gateway(tmp_path, [one.address, two.address, three.address]) as gateway,
        client(gateway) as http,
    ):
        workers = (one, two, three)
        await all_ready(gateway)

        async def fail_after_head(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            yield head()  # gRPC itself no longer retries
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

        for worker in workers:
            worker.script = fail_after_head
        assert (await http.post(CHAT, json=HELLO)).status_code == 503
        assert sum(len(worker.requests) for worker in workers) == 2

        async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
            yield head()

        for worker in workers:
            worker.requests.clear()
            worker.script = refuse
        assert (await http.post(CHAT, json=HELLO)).status_code == 400
        assert sum(len(worker.requests) for worker in workers) == 1


async def test_no_retry_after_the_first_document(tmp_path: Path) -> None:
    async def break_off(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, chat_chunk({"content": "once"}))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    async with (
        ScriptedWorker() as one,
        ScriptedWorker() as two,
        run_gateway(tmp_path, [one.address, two.address]) as gateway,
        client(gateway) as http,
    ):
        one.script = two.script = break_off
        reply = await http.post(CHAT, json=HELLO | {"stream": True})
        assert reply.text.count("once") == 1
        assert '"engine_failed"' in reply.text
        assert len(one.requests) + len(two.requests) == 1


async def test_least_outstanding(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hold(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        await release.wait()
        yield head()
        yield event(0, chat_answer("x"))
        yield finish()

    async with (
        ScriptedWorker() as one,
        ScriptedWorker() as two,
        run_gateway(tmp_path, [one.address, two.address]) as gateway,
        client(gateway) as http,
    ):
        await all_ready(gateway)
        one.script = two.script = hold
        tasks = [asyncio.create_task(http.post(CHAT, json=HELLO)) for _ in range(8)]
        async with asyncio.timeout(5):
            for worker in (one, two):
                while len(worker.requests) < 4:
                    worker.started.clear()
                    await worker.started.wait()
        assert Counter(worker.outstanding for worker in gateway.gateway.pool.workers) == {4: 2}
        release.set()
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
        assert Counter(worker.outstanding for worker in gateway.gateway.pool.workers) == {0: 2}


async def test_two_models_behind_one_door(tmp_path: Path) -> None:
    async with (
        ScriptedWorker(model="small") as small,
        ScriptedWorker(model="large", aliases=("big",)) as large,
        run_gateway(tmp_path, [small.address, large.address]) as gateway,
        client(gateway) as http,
    ):
        await all_ready(gateway)
        for model in ("small", "big", "large"):
            assert (await http.post(CHAT, json=HELLO | {"model": model})).status_code == 200
        assert [len(small.requests), len(large.requests)] == [1, 2]
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == [
            "big",
            "large",
            "small",
        ]


async def test_deadline(tmp_path: Path) -> None:
    async def never(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        if json.loads(request.body).get("stream"):
            yield head(stream=True)
            yield event(0, chat_chunk({"content": "half"}))
        await asyncio.Event().wait()
        yield finish()

    async with (
        ScriptedWorker() as worker,
        run_gateway(tmp_path, [worker.address], request_timeout_ms=300) as gateway,
        client(gateway) as http,
    ):
        worker.script = never
        reply = await http.post(CHAT, json=HELLO)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        reply = await http.post(CHAT, json=HELLO | {"stream": True})
        assert reply.status_code == 200
        assert "half" in reply.text
        assert '"deadline_exceeded"' in reply.text
        assert "[DONE]" not in reply.text
        await asyncio.wait_for(worker.cancelled.wait(), 5)


async def test_shutdown_lets_a_stream_finish(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, chat_chunk({"content": "first"}))
        await more.wait()
        yield event(1, chat_chunk({"content": "last"}, "stop"))
        yield finish()

    async with ScriptedWorker() as worker:
        worker.script = script
        running = run_gateway(tmp_path, [worker.address], drain_grace_ms=5000)
        gateway = await running.__aenter__()
        async with (
            client(gateway) as http,
            http.stream("POST", CHAT, json=HELLO | {"stream": True}) as reply,
        ):
            lines = reply.aiter_lines()
            assert "first" in await anext(lines)
            closing = asyncio.create_task(running.__aexit__(None, None, None))
            await asyncio.wait_for(until_refused(gateway), 5)
            more.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await closing


@pytest.mark.parametrize("api", ["openai", "native", "native sse"])
async def test_a_stream_that_outlasts_the_grace_ends_with_an_error_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str
) -> None:
    async def script(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        yield head(stream=True)
        yield event(0, chat_chunk({"content": "first"}))
        await asyncio.Event().wait()

    path, body = CHAT, HELLO | {"stream": True}
    if api != "openai":
        path = "/api/v1/models/echo:createChatCompletion"
        body = {"messages": [{"role": "ROLE_USER", "content": "hello"}]}
    headers = {"accept": "text/event-stream"} if api == "native sse" else {}
    async with ScriptedWorker() as worker:
        worker.script = script
        running = run_gateway(tmp_path, [worker.address], drain_grace_ms=500)
        gateway = await running.__aenter__()
        async with (
            client(gateway) as http,
            http.stream("POST", path, json=body, headers=headers) as reply,
        ):
            lines = reply.aiter_lines()
            assert "first" in await anext(lines)
            closing = asyncio.create_task(running.__aexit__(None, None, None))
            # No protocol error: the response is complete as HTTP goes, and says that it is not otherwise.
            rest = [line async for line in lines if line]
        await closing
        logged = capsys.readouterr().err
        await asyncio.wait_for(worker.cancelled.wait(), 5)
    assert "shutting down" in rest[-1]
    assert '"error"' in rest[-1]
    assert not any("[DONE]" in line for line in rest)
    assert "reason=OVERLOADED" in logged
    assert "ERROR" not in logged


def files(tls: TlsFiles) -> dict[str, Any]:
    return {"tls_ca": tls.ca, "tls_certificate": tls.certificate, "tls_key": tls.key}


async def test_workers_behind_mutual_tls(tmp_path: Path) -> None:
    authority = LocalAuthority(tmp_path / "tls").create()
    mine = files(authority.issue("gateway", "gateway-0"))
    async with (
        ScriptedWorker(credentials=server_credentials(authority.issue("worker", "worker-0"))) as worker,
        run_gateway(tmp_path, [worker.address], **mine) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post(CHAT, json=HELLO)).status_code == 200


@pytest.mark.parametrize("impostor", ["other role", "other authority"])
async def test_an_impostor_never_sees_a_request(tmp_path: Path, impostor: str) -> None:
    authority = LocalAuthority(tmp_path / "tls").create()
    mine = files(authority.issue("gateway", "gateway-0"))
    if impostor == "other role":
        theirs = authority.issue("kvstore", "kvstore-0")
    else:
        theirs = LocalAuthority(tmp_path / "foreign").create().issue("worker", "worker-0")
    async with (
        ScriptedWorker(credentials=server_credentials(theirs)) as worker,
        run_gateway(tmp_path, [worker.address], wait_ready=False, **mine) as gateway,
        client(gateway) as http,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await gateway.gateway.pool.wait_ready()
        assert (await http.post(CHAT, json=HELLO)).status_code == 503
        assert worker.requests == []


async def test_a_worker_that_refuses_the_gateway_is_not_the_callers_fault(tmp_path: Path) -> None:
    async def refuse(request: inference_pb2.ServeOpenAIRequest, context: Context) -> Messages:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "role gateway may not call this")
        yield head()

    async with (
        ScriptedWorker() as worker,
        run_gateway(tmp_path, [worker.address]) as gateway,
        client(gateway) as http,
    ):
        worker.script = refuse
        reply = await http.post(CHAT, json=HELLO)
        assert reply.status_code == 503
        assert "does not accept this gateway" in reply.json()["error"]["message"]


async def test_front_tls(tmp_path: Path) -> None:
    import ssl

    authority = LocalAuthority(tmp_path / "tls").create()
    front = authority.issue("gateway", "front")
    async with (
        ScriptedWorker() as worker,
        run_gateway(
            tmp_path, [worker.address], front_tls_certificate=front.certificate, front_tls_key=front.key
        ) as gateway,
    ):
        context = ssl.create_default_context(cafile=str(front.ca))
        async with httpx.AsyncClient(base_url=gateway.http, headers=gateway.headers, verify=context) as http:
            assert (await http.post(CHAT, json=HELLO)).status_code == 200
        credentials = grpc.ssl_channel_credentials(front.ca.read_bytes())
        async with grpc.aio.secure_channel(gateway.grpc, credentials) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
