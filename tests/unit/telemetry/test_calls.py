"""Everything that happens around a call, between a real server and real channels."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from sealmesh.telemetry.logging import configure_logging
from sealmesh.telemetry.runtime.channel import cancelled_on_exit
from sealmesh.telemetry.runtime.deadline import deadline_within, remaining_s
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.interceptors import Context, deny_all
from sealmesh.telemetry.runtime.settings import ServiceSettings
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.trace_store import SpanRecord

from .conftest import SERVICE, Echo, Serve, dial, dial_sync

Code = grpc.StatusCode
Call = Callable[[Any, bytes], Any]


async def parts(data: bytes) -> AsyncIterator[bytes]:
    for index in range(len(data)):
        yield data[index : index + 1]


async def unary(channel: Any, data: bytes) -> bytes:
    return bytes(await channel.unary_unary(f"/{SERVICE}/Unary")(data))


async def server_stream(channel: Any, data: bytes) -> bytes:
    return b"".join([bytes(part) async for part in channel.unary_stream(f"/{SERVICE}/ServerStream")(data)])


async def client_stream(channel: Any, data: bytes) -> bytes:
    return bytes(await channel.stream_unary(f"/{SERVICE}/ClientStream")(parts(data)))


async def both(channel: Any, data: bytes) -> bytes:
    return b"".join([bytes(p) async for p in channel.stream_stream(f"/{SERVICE}/Both")(parts(data))])


KINDS = [unary, server_stream, client_stream, both]


async def failure(call: Any) -> SealmeshError:
    with pytest.raises(grpc.RpcError) as info:
        await call
    return SealmeshError.from_rpc_error(info.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_passes_through(kind: Call, serve_echo: Serve, telemetry: Telemetry) -> None:
    server = await serve_echo()
    for observed in (None, telemetry):
        async with dial(server.grpc_address, telemetry=observed) as channel:
            assert await kind(channel, b"hello") == b"hello"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_keeps_its_details(kind: Call, serve_echo: Serve, echo: Echo) -> None:
    echo.raises = SealmeshError(
        Code.NOT_FOUND, "MODEL_NOT_FOUND", "no model 模型", field="model", retry_after_s=2
    )
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        error = await failure(kind(channel, b"hello"))
    assert vars(error) == vars(echo.raises)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_exception_leaks_nothing(
    kind: Call, serve_echo: Serve, echo: Echo, telemetry: Telemetry
) -> None:
    stream = io.StringIO()
    configure_logging("echo", log_format="json", stream=stream)
    echo.raises = ValueError("the secret prompt")
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        error = await failure(kind(channel, b"hello"))
    assert (error.code, error.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in error.message
    logged = [json.loads(line) for line in stream.getvalue().splitlines()]
    failed = next(line for line in logged if line["event"] == "call failed unexpectedly")
    assert failed["exception"].endswith("ValueError")
    assert "conftest.py" in failed["exception"]
    assert len(failed["trace_id"]) == 32
    assert "secret prompt" not in stream.getvalue()


async def test_a_stream_fails_with_a_status_after_its_messages(serve_echo: Serve, echo: Echo) -> None:
    echo.raises, echo.before = SealmeshError(Code.UNAVAILABLE, "ENGINE_FAILED", "engine stopped"), 2
    server = await serve_echo()
    got: list[bytes] = []
    async with dial(server.grpc_address) as channel:

        async def read() -> None:
            async for part in channel.unary_stream(f"/{SERVICE}/ServerStream")(b"hello"):
                got.append(part)

        error = await failure(read())
    assert (got, error.reason) == ([b"h", b"e"], "ENGINE_FAILED")


async def test_an_error_out_of_a_task_group_is_unwrapped(serve_echo: Serve, echo: Echo) -> None:
    inner = SealmeshError(Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", "too long")
    echo.raises = ExceptionGroup("tasks", [ExceptionGroup("more", [inner])])
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        assert vars(await failure(unary(channel, b"x"))) == vars(inner)


async def test_the_error_of_a_call_behind_is_passed_on(serve_echo: Serve, echo: Echo) -> None:
    behind = SealmeshError(Code.FAILED_PRECONDITION, "LAYOUT_MISMATCH", "layouts differ")
    status = behind.to_status().SerializeToString()
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", status))
    echo.raises = grpc.aio.AioRpcError(behind.code, trailing_metadata=trailers, details=behind.message)
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        assert (await failure(unary(channel, b"x"))).reason == "LAYOUT_MISMATCH"


async def test_a_servicer_may_abort_by_hand(
    serve_echo: Serve, echo: Echo, spans: Callable[[], list[SpanRecord]]
) -> None:
    async def abort(context: Context) -> None:
        await context.abort(Code.OUT_OF_RANGE, "beyond")

    echo.hook = abort
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        error = await failure(unary(channel, b"x"))
    assert (error.code, error.message) == (Code.OUT_OF_RANGE, "beyond")
    assert spans()[0].attributes["rpc.grpc.status_code"] == Code.OUT_OF_RANGE.value[0]


async def test_unknown_methods_say_so(serve_echo: Serve) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        error = await failure(channel.unary_unary(f"/{SERVICE}/Nothing")(b""))
    assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "UNKNOWN_METHOD")
    assert f"{SERVICE}/Nothing" in error.message


async def test_messages_are_bounded_in_both_directions(
    serve_echo: Serve, echo: Echo, telemetry: Telemetry
) -> None:
    limit = 64 * 1024
    server = await serve_echo(settings=ServiceSettings(http_address="", max_message_bytes=limit))
    big = b"x" * (limit + 1)
    async with dial(server.grpc_address) as channel:
        assert (await failure(unary(channel, big))).reason == "MESSAGE_TOO_LARGE"
    async with dial(server.grpc_address, max_message_bytes=limit // 2) as channel:
        error = await failure(unary(channel, b"x" * limit))
        assert (error.reason, error.http_status) == ("MESSAGE_TOO_LARGE", 413)
        assert await unary(channel, b"still works") == b"still works"


# --- authorisation -----------------------------------------------------------------------------------


async def test_nobody_may_call_by_default(serve_echo: Serve) -> None:
    server = await serve_echo(authorize=deny_all)

    def errors() -> list[SealmeshError]:
        # A sync channel, for grpc.aio loses the status of a call that ends while it sends (see open_channel).
        with dial_sync(server.grpc_address) as channel:
            calls: list[Callable[[], object]] = [
                lambda: channel.unary_unary(f"/{SERVICE}/Unary")(b"x", timeout=2),
                lambda: list(channel.unary_stream(f"/{SERVICE}/ServerStream")(b"x", timeout=2)),
                lambda: channel.stream_unary(f"/{SERVICE}/ClientStream")(iter([b"x"] * 3), timeout=2),
                lambda: list(channel.stream_stream(f"/{SERVICE}/Both")(iter([b"x"] * 3), timeout=2)),
            ]
            found: list[SealmeshError] = []
            for call in calls:
                with pytest.raises(grpc.RpcError) as info:
                    call()
                found.append(SealmeshError.from_rpc_error(info.value))
            return found

    for error in await asyncio.to_thread(errors):
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "ROLE_DENIED")


async def test_the_authorizer_sees_the_call(serve_echo: Serve) -> None:
    seen: list[str] = []

    async def authorize(context: Context, full_method: str) -> None:
        seen.append(full_method)
        metadata = dict(context.invocation_metadata() or ())
        if metadata.get("authorization") != "Bearer good":
            raise SealmeshError(Code.UNAUTHENTICATED, "CREDENTIAL_INVALID", "no key")

    server = await serve_echo(authorize=authorize)
    async with dial(server.grpc_address) as channel:
        assert (await failure(unary(channel, b"x"))).http_status == 401
        call = channel.unary_unary(f"/{SERVICE}/Unary")
        assert await call(b"x", metadata=(("authorization", "Bearer good"),)) == b"x"
    assert seen == [f"/{SERVICE}/Unary"] * 2


# --- deadlines and cancellation ----------------------------------------------------------------------


async def test_a_deadline_cancels_the_handler(
    serve_echo: Serve, echo: Echo, telemetry: Telemetry, spans: Callable[[], list[SpanRecord]]
) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        error = await failure(channel.unary_unary(f"/{SERVICE}/Hold")(b"x", timeout=0.2))
        await asyncio.wait_for(echo.left.wait(), 2)
    assert error.reason == "DEADLINE_EXCEEDED"
    assert echo.cancelled
    recorded = await eventually(lambda: [s for s in spans() if s.name.endswith("Hold")])
    assert recorded[0].attributes["error.type"] == "DEADLINE_EXCEEDED"


async def test_a_client_that_leaves_a_unary_call_cancels_it_fast(serve_echo: Serve, echo: Echo) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Hold")(b"x")
        await asyncio.wait_for(echo.entered.wait(), 2)
        call.cancel()
        await asyncio.wait_for(echo.left.wait(), 1)
    assert echo.cancelled


async def test_a_client_that_leaves_a_stream_closes_its_generator(
    serve_echo: Serve, echo: Echo, telemetry: Telemetry
) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address, telemetry=telemetry) as channel:
        with cancelled_on_exit(channel.unary_stream(f"/{SERVICE}/Forever")(b"x")) as call:
            async for part in call:
                assert part == b"x"
                break
        await asyncio.wait_for(echo.left.wait(), 1)
    assert echo.cancelled


async def test_the_deadline_travels_to_calls_behind(
    serve_echo: Serve, echo: Echo, telemetry: Telemetry
) -> None:
    """front calls behind without a timeout of its own: behind still ends when the client's time is up."""
    behind = await serve_echo()
    front = Echo()
    left: list[float] = []

    async with dial(behind.grpc_address, telemetry=telemetry) as channel:

        async def forward(context: Context) -> None:
            left.append(remaining_s() or -1)
            await channel.unary_unary(f"/{SERVICE}/Hold")(b"x")

        front.hook = forward
        server = await serve_echo(register=front.register)
        async with dial(server.grpc_address) as client:
            error = await failure(client.unary_unary(f"/{SERVICE}/Unary")(b"x", timeout=0.4))
        await asyncio.wait_for(echo.left.wait(), 2)
    assert error.reason == "DEADLINE_EXCEEDED"
    assert echo.cancelled
    assert 0.1 < left[0] <= 0.4


async def test_cancellation_travels_to_calls_behind(
    serve_echo: Serve, echo: Echo, telemetry: Telemetry
) -> None:
    behind = await serve_echo()
    front = Echo()
    async with dial(behind.grpc_address, telemetry=telemetry) as channel:

        async def forward(context: Context) -> None:
            await channel.unary_unary(f"/{SERVICE}/Hold")(b"x")

        front.hook = forward
        server = await serve_echo(register=front.register)
        async with dial(server.grpc_address) as client:
            call = client.unary_unary(f"/{SERVICE}/Unary")(b"x")
            await asyncio.wait_for(echo.entered.wait(), 2)
            call.cancel()
            await asyncio.wait_for(echo.left.wait(), 1)
    assert echo.cancelled


def test_deadlines_only_tighten() -> None:
    assert remaining_s() is None
    with deadline_within(10):
        with deadline_within(100):
            assert 9 < (remaining_s() or 0) <= 10
        with deadline_within(1):
            assert (remaining_s() or 9) <= 1
        with deadline_within(None):
            assert (remaining_s() or 0) > 9
    assert remaining_s() is None


# --- traces, metrics, logs ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_one_trace_over_client_and_server(
    kind: Call, serve_echo: Serve, telemetry: Telemetry, spans: Callable[[], list[SpanRecord]]
) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address, telemetry=telemetry) as channel:
        with telemetry.tracing.span("request"):
            assert await kind(channel, b"hello") == b"hello"
    recorded = await eventually(lambda: spans() if len(spans()) == 3 else [])
    by_kind = {span.kind: span for span in recorded}
    assert by_kind["server"].parent_span_id == by_kind["client"].span_id
    assert by_kind["client"].parent_span_id == by_kind["internal"].span_id
    assert {span.trace_id for span in recorded} == {by_kind["internal"].trace_id}
    assert by_kind["server"].name.startswith(f"{SERVICE}/")
    assert by_kind["server"].attributes["rpc.service"] == SERVICE
    assert by_kind["server"].status == "unset"


async def test_calls_are_measured(serve_echo: Serve, echo: Echo, telemetry: Telemetry) -> None:
    server = await serve_echo()
    async with dial(server.grpc_address, telemetry=telemetry) as channel:
        await unary(channel, b"x")
        echo.raises = SealmeshError(Code.NOT_FOUND, "MODEL_NOT_FOUND", "x")
        await failure(unary(channel, b"x"))
        held = channel.unary_unary(f"/{SERVICE}/Hold")(b"x")
        await asyncio.wait_for(echo.entered.wait(), 2)
        value = telemetry.metrics.registry.get_sample_value
        hold = {"rpc_service": SERVICE, "rpc_method": "Hold"}
        assert value("rpc_server_active_requests", hold) == 1
        echo.release.set()
        await held
    assert value("rpc_server_active_requests", hold) == 0
    labels = {"rpc_service": SERVICE, "rpc_method": "Unary"}
    for name in ("rpc_server_duration_seconds_count", "rpc_client_duration_seconds_count"):
        for code in ("OK", "NOT_FOUND"):
            assert value(name, {**labels, "rpc_grpc_status_code": code}) == 1, (name, code)
    errors = {**labels, "rpc_grpc_status_code": "NOT_FOUND", "reason": "MODEL_NOT_FOUND"}
    assert value("rpc_server_errors_total", errors) == 1


async def test_the_access_log_carries_the_trace_and_no_probes(
    serve_echo: Serve, telemetry: Telemetry, spans: Callable[[], list[SpanRecord]]
) -> None:
    server = await serve_echo()
    stream = io.StringIO()
    configure_logging("echo", log_format="json", stream=stream)
    async with dial(server.grpc_address) as channel:
        await unary(channel, b"x")
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["method"], line["code"]) for line in lines] == [
        ("call", f"{SERVICE}/Unary", "OK")
    ]
    assert lines[0]["trace_id"] == spans()[0].trace_id
    assert logging.getLogger().level == logging.WARNING


async def test_sync_channels_do_the_same(
    serve_echo: Serve, echo: Echo, telemetry: Telemetry, spans: Callable[[], list[SpanRecord]]
) -> None:
    server = await serve_echo()

    def work() -> SealmeshError:
        with (
            dial_sync(server.grpc_address, telemetry=telemetry) as channel,
            telemetry.tracing.span("thread"),
        ):
            call = channel.unary_unary(f"/{SERVICE}/Unary")
            assert call(b"hi", timeout=2) == b"hi"
            assert call.future(b"hi", timeout=2).result() == b"hi"
            stream = channel.unary_stream(f"/{SERVICE}/ServerStream")
            assert list(stream(b"abc", timeout=2)) == [b"a", b"b", b"c"]
            both_ways = channel.stream_stream(f"/{SERVICE}/Both")
            assert list(both_ways(iter([b"1", b"2"]), timeout=2)) == [b"1", b"2"]
            assert channel.stream_unary(f"/{SERVICE}/ClientStream")(iter([b"1", b"2"]), timeout=2) == b"12"
            with pytest.raises(grpc.RpcError) as info, deadline_within(0.2):
                channel.unary_unary(f"/{SERVICE}/Hold")(b"x")
            return SealmeshError.from_rpc_error(info.value)

    assert (await asyncio.to_thread(work)).reason == "DEADLINE_EXCEEDED"
    clients = await eventually(lambda: found if len(found := of_kind(spans(), "client")) == 6 else [])
    assert len({span.trace_id for span in clients}) == 1
    assert {span.attributes["rpc.grpc.status_code"] for span in clients} == {0, 4}


def of_kind(found: list[SpanRecord], kind: str) -> list[SpanRecord]:
    return [span for span in found if span.kind == kind]


async def eventually(read: Callable[[], list[SpanRecord]], within_s: float = 3.0) -> list[SpanRecord]:
    """Waits for what another task records after the caller already has its answer."""
    async with asyncio.timeout(within_s):
        # The span of a call is closed after its answer is sent: there is no event to wait for.
        while not (found := read()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found
