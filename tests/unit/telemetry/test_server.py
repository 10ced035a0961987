"""The life of a service: readiness, health, side routes, drain, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.health import Readiness
from sealmesh.telemetry.runtime.http import HttpOptions, Receive, Scope, Send
from sealmesh.telemetry.runtime.lifecycle import Component, running
from sealmesh.telemetry.runtime.server import EXIT_REFUSED, AddressInUseError
from sealmesh.telemetry.runtime.settings import ServiceSettings
from sealmesh.telemetry.trace_store import TraceStore

from .conftest import SERVICE, Echo, Serve, dial

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


@dataclass
class Part:
    """A component that writes down what happens to it."""

    name: str
    events: list[str]
    fails: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.events.append(f"+{self.name}")

    async def close(self) -> None:
        self.events.append(f"-{self.name}")


async def health(channel: Any, service: str = "") -> bytes:
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    return bytes(await channel.unary_unary("/grpc.health.v1.Health/Check")(request))


@pytest.fixture
def with_http(settings: ServiceSettings) -> ServiceSettings:
    return settings.model_copy(update={"http_address": "127.0.0.1:0"})


# --- components and readiness ------------------------------------------------------------------------


async def test_components_start_in_order_and_close_in_reverse(serve_echo: Serve) -> None:
    events: list[str] = []
    server = await serve_echo(components=[Part("a", events), Part("b", events)])
    assert events == ["+a", "+b"]
    await server.close()
    assert events == ["+a", "+b", "-b", "-a"]


async def test_a_component_that_cannot_start_closes_those_before_it(
    serve_echo: Serve, settings: ServiceSettings
) -> None:
    events: list[str] = []
    error = SealmeshError(grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", "no Redis")
    with pytest.raises(SealmeshError, match="no Redis"):
        await serve_echo(components=[Part("a", events), Part("b", events, error), Part("c", events)])
    assert events == ["+a", "-a"]


async def test_running_closes_all_although_one_cannot() -> None:
    events: list[str] = []

    class Stuck(Part):
        async def close(self) -> None:
            raise OSError("stuck")

    parts: list[Component] = [Part("a", events), Stuck("b", events), Part("c", events)]
    with pytest.raises(OSError, match="stuck"):
        async with running(parts):
            events.append("body")
    assert events == ["+a", "+b", "+c", "body", "-c", "-a"]


async def test_health_follows_readiness_and_tells_why(serve_echo: Serve, with_http: ServiceSettings) -> None:
    state = Readiness(False, "no worker is connected")
    server = await serve_echo(settings=with_http, ready=lambda: state)
    url = f"http://{server.http_address}"
    async with dial(server.grpc_address) as channel, httpx.AsyncClient() as http:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == NOT_SERVING
        assert await health(channel, SERVICE) == NOT_SERVING
        reply = await http.get(f"{url}/readyz")
        assert (reply.status_code, reply.json()["reason"]) == (503, "no worker is connected")
        assert (await http.get(f"{url}/healthz")).status_code == 200
        state = Readiness(True)
        assert await asyncio.wait_for(watch.read(), 2) == SERVING
        assert await health(channel) == await health(channel, SERVICE) == SERVING
        assert (await http.get(f"{url}/readyz")).status_code == 200
        with pytest.raises(grpc.RpcError):
            await health(channel, "test.v1.Unknown")
        watch.cancel()


async def test_a_readiness_check_that_fails_says_no(serve_echo: Serve) -> None:
    def ready() -> Readiness:
        raise SealmeshError(grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", "Redis is away")

    server = await serve_echo(ready=ready)
    assert server.readiness == Readiness(False, "Redis is away")


async def test_calls_are_refused_while_components_start(serve_echo: Serve, settings: ServiceSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    entered, gate = asyncio.Event(), asyncio.Event()

    class Slow(Part):
        async def start(self) -> None:
            entered.set()
            await gate.wait()

    address = f"127.0.0.1:{port}"
    starting = asyncio.ensure_future(
        serve_echo(
            settings=settings.model_copy(update={"grpc_address": address}), components=[Slow("slow", [])]
        )
    )
    await entered.wait()
    async with dial(address) as channel:
        assert await health(channel) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as info:
            await channel.unary_unary(f"/{SERVICE}/Unary")(b"x")
        error = SealmeshError.from_rpc_error(info.value)
        assert (error.reason, error.retry_after_s) == ("OVERLOADED", 1)
        gate.set()
        await starting
        assert await channel.unary_unary(f"/{SERVICE}/Unary")(b"x") == b"x"


async def test_reflection_lists_the_services_under_both_names(serve_echo: Serve) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        for version in ("v1", "v1alpha"):
            method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            call = channel.stream_stream(method)()
            await call.write(b"\x3a\x01*")
            assert SERVICE.encode() in await call.read()
            call.cancel()


# --- HTTP --------------------------------------------------------------------------------------------


async def test_side_routes_and_metrics(serve_echo: Serve, with_http: ServiceSettings) -> None:
    server = await serve_echo(settings=with_http)
    async with httpx.AsyncClient(base_url=f"http://{server.http_address}") as http:
        metrics = await http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert 'sealmesh_build_info{service="echo"' in metrics.text
        assert "process_resident_memory_bytes" in metrics.text
        assert (await http.get("/v1/models")).status_code == 404
        assert (await http.post("/healthz")).status_code == 404
        head = await http.head("/readyz")
        assert (head.status_code, head.content) == (200, b"")


async def test_an_application_gets_the_other_routes(serve_echo: Serve, with_http: ServiceSettings) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"app"})

    server = await serve_echo(settings=with_http, http_app=app)
    async with httpx.AsyncClient(base_url=f"http://{server.http_address}") as http:
        assert (await http.get("/v1/models")).text == "app"
        assert (await http.get("/healthz")).json() == {"status": "alive"}
    assert seen == ["/v1/models"]


# --- addresses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["grpc_address", "http_address"])
async def test_a_taken_port_is_named_with_its_setting(
    serve_echo: Serve, with_http: ServiceSettings, setting: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        changed = with_http.model_copy(update={setting: f"127.0.0.1:{port}"})
        with pytest.raises(AddressInUseError, match=rf"port {port} is in use.*--{setting.replace('_', '-')}"):
            await serve_echo(settings=changed)


async def test_two_servers_do_not_share_a_port_unless_asked(
    serve_echo: Serve, with_http: ServiceSettings
) -> None:
    first = await serve_echo(settings=with_http, reuse_port=True)
    same = with_http.model_copy(
        update={"grpc_address": first.grpc_address, "http_address": first.http_address}
    )
    with pytest.raises(AddressInUseError):
        await serve_echo(settings=same)
    second = await serve_echo(settings=same, reuse_port=True)
    assert second.grpc_address == first.grpc_address


@pytest.mark.parametrize("address", ["9101", "127.0.0.1:", "127.0.0.1:99999", ":9101", "127.0.0.1:http"])
async def test_an_address_must_be_host_and_port(
    serve_echo: Serve, settings: ServiceSettings, address: str
) -> None:
    with pytest.raises(SealmeshError, match="is not host:port"):
        await serve_echo(settings=settings.model_copy(update={"grpc_address": address}))


# --- drain -------------------------------------------------------------------------------------------


async def test_a_drain_lets_running_calls_finish(serve_echo: Serve, echo: Echo) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == SERVING
        held = channel.unary_unary(f"/{SERVICE}/Hold")(b"held")
        await asyncio.wait_for(echo.entered.wait(), 2)
        closing = asyncio.create_task(server.close())
        assert await watch.read() == NOT_SERVING
        echo.release.set()
        assert await held == b"held"
        await asyncio.wait_for(closing, 1.5)


async def test_the_grace_is_a_bound(serve_echo: Serve, echo: Echo, settings: ServiceSettings) -> None:
    server = await serve_echo(settings=settings.model_copy(update={"drain_grace_ms": 200}))
    async with dial(server.grpc_address) as channel:
        held = channel.unary_unary(f"/{SERVICE}/Hold")(b"held")
        await asyncio.wait_for(echo.entered.wait(), 2)
        await asyncio.wait_for(server.close(), 2)
        with pytest.raises(grpc.RpcError):
            await held
    await asyncio.wait_for(echo.left.wait(), 1)
    assert echo.cancelled


async def test_endless_streams_do_not_use_up_the_grace(
    serve_echo: Serve, echo: Echo, settings: ServiceSettings
) -> None:
    server = await serve_echo(
        settings=settings.model_copy(update={"drain_grace_ms": 60_000}), endless=[f"/{SERVICE}/Forever"]
    )
    async with dial(server.grpc_address) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Forever")(b"x")
        reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        idle = channel.stream_stream(reflection)()
        await idle.write(b"\x3a\x01*")
        await idle.read()
        assert await call.read() == b"x"
        await asyncio.wait_for(server.close(), 3)
        with pytest.raises(grpc.RpcError) as info:
            await call.read()
    error = SealmeshError.from_rpc_error(info.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "OVERLOADED")


# --- processes ---------------------------------------------------------------------------------------

ECHO = Path(__file__).with_name("echo_process.py")


class Process:
    """A running echo process and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out = ""
        self.err = ""

    async def said(self, text: str) -> None:
        """Waits until it printed a line with `text`."""
        assert self.process.stdout is not None
        while text not in self.out:
            line = await asyncio.wait_for(self.process.stdout.readline(), 15)
            assert line, f"ended before it said {text!r}: {self.out}"
            self.out += line.decode()

    async def logged(self, event: str) -> dict[str, Any]:
        """Waits for a log line of `event` and returns its fields."""
        assert self.process.stderr is not None
        while True:
            line = (await asyncio.wait_for(self.process.stderr.readline(), 15)).decode()
            assert line, f"ended before it logged {event!r}: {self.err}"
            self.err += line
            fields: dict[str, Any] = json.loads(line)
            if fields["event"] == event:
                return fields

    async def ended(self, within_s: float = 15) -> int:
        out, err = await asyncio.wait_for(self.process.communicate(), within_s)
        self.out += out.decode()
        self.err += err.decode()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def echo_process(*flags: str, fail: str = "") -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ECHO),
        "--log-format=json",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "FAIL": fail},
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def drain_has_begun(channel: Any) -> None:
    """Returns once new calls are refused."""
    while True:
        try:
            await channel.unary_unary("/test.v1.Echo/Hold")(b"0", timeout=2)
        except grpc.RpcError:
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_closes_flushes_and_exits_zero(number: signal.Signals, tmp_path: Path) -> None:
    async with echo_process(f"--trace-dir={tmp_path}") as process:
        ready = await process.logged("ready")
        async with dial(ready["grpc"]) as channel, httpx.AsyncClient() as http:
            held = channel.unary_unary("/test.v1.Echo/Hold")(b"0.7")
            watched = channel.unary_stream("/test.v1.Echo/Forever")(b"x")
            assert await watched.read() == b"x"
            await process.said("holding")
            page = asyncio.ensure_future(http.get(f"http://{ready['http']}/page"))
            await process.said("http")
            process.process.send_signal(number)
            assert await held == b"0.7"
            assert (await page).text == "first second"
        assert await process.ended() == 0
    assert process.out.splitlines()[-2:] == ["closed two", "closed one"]
    assert process.out.index("answered") < process.out.index("closed two")
    assert json.loads(process.err.splitlines()[-1])["event"] == "stopped"
    names = {span.name for trace in TraceStore(tmp_path).newest(10) for span in trace.spans}
    assert names == {"test.v1.Echo/Hold", "test.v1.Echo/Forever"}


async def test_a_second_signal_cuts_the_drain_short() -> None:
    async with echo_process("--drain-grace-ms=60000") as process:
        ready = await process.logged("ready")
        async with dial(ready["grpc"]) as channel:
            held = channel.unary_unary("/test.v1.Echo/Hold")(b"50")
            await process.said("holding")
            process.process.send_signal(signal.SIGTERM)
            await drain_has_begun(channel)
            process.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                await held
        assert await process.ended(5) == 0
    assert process.out.endswith("closed two\nclosed one\n")


async def test_a_signal_during_the_start_ends_it() -> None:
    async with echo_process(fail="two-slow") as process:
        await process.said("starting two")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended(5) == 0
    assert process.out.splitlines() == ["started one", "starting two", "closed one"]
    assert '"ready"' not in process.err


async def test_a_component_that_cannot_start_is_one_line_and_a_failure() -> None:
    async with echo_process(fail="two") as process:
        assert await process.ended() == 1
    errors = [json.loads(line) for line in process.err.splitlines() if '"level": "error"' in line]
    assert [(line["event"], line["reason"]) for line in errors] == [
        ("Redis at nowhere:1 does not answer", "DEPENDENCY_UNAVAILABLE")
    ]
    assert process.out.splitlines() == ["started one", "closed one"]


@pytest.mark.parametrize("reason", ["INTEGRITY_FAILURE", "KEY_DENIED", "KEY_SLOT_MISMATCH"])
async def test_a_refusal_of_something_sealed_is_the_last_line_and_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setenv("REASON", reason)
    async with echo_process(fail="two-refused") as process:
        assert await process.ended() == EXIT_REFUSED
    last = json.loads(process.err.splitlines()[-1])
    assert (last["event"], last["reason"]) == ("a tensor was changed", reason)


async def test_a_defect_at_the_start_says_what_and_where() -> None:
    async with echo_process(fail="two-defect") as process:
        assert await process.ended() == 1
    failed = json.loads(process.err.splitlines()[-1])
    assert failed["cause"] == "a defect"
    assert "echo_process.py" in failed["exception"]


async def test_a_watch_that_fails_ends_the_process() -> None:
    async with echo_process(fail="watch") as process:
        assert await process.ended() == 1
    assert json.loads(process.err.splitlines()[-1])["event"] == "the engine process ended"
    assert process.out.splitlines()[-2:] == ["closed two", "closed one"]


async def test_a_taken_port_is_one_line_and_its_own_exit_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with echo_process(f"--grpc-address=127.0.0.1:{port}") as process:
            assert await process.ended() == 3
    assert len(process.err.splitlines()) == 1
    assert f"port {port} is in use" in process.err


async def test_an_unknown_setting_is_one_line_and_exit_code_two() -> None:
    async with echo_process("--grpc-adress=127.0.0.1:1") as process:
        assert await process.ended() == 2
    line = "sealmesh kvstore: unknown flag --grpc-adress; did you mean --grpc-address"
    assert process.err.startswith(line)
    assert process.err.count("\n") == 1


async def test_a_certificate_that_cannot_be_used_is_said_at_the_start(
    serve_echo: Serve, with_http: ServiceSettings, tmp_path: Path
) -> None:
    wrong = tmp_path / "front.pem"
    wrong.write_text("not a certificate")
    with pytest.raises(SealmeshError, match=r"cannot use .*front\.pem"):
        await serve_echo(settings=with_http, http_options=HttpOptions(certificate=wrong, key=wrong))


async def test_a_caller_that_does_not_read_holds_up_no_stop(
    serve_echo: Serve, with_http: ServiceSettings, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.Event()
    told: list[type[BaseException]] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
        asked.set()
        try:
            for _ in range(64):
                await send(piece)
        except asyncio.CancelledError:
            told.append(asyncio.CancelledError)
            # Nobody reads this either.
            await send({"type": "http.response.body", "body": b"bye"})

    settings = with_http.model_copy(update={"drain_grace_ms": 400})
    server = await serve_echo(settings=settings, http_app=endless)
    host, _, port = server.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET /page HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.wait_for(asked.wait(), 5)
    started = asyncio.get_running_loop().time()
    await server.close()
    assert asyncio.get_running_loop().time() - started < 2
    assert told == [asyncio.CancelledError]
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []
    writer.close()
