"""Channels: retries, balancing over healthy servers, patience with pings."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import grpc
import pytest
from sealmesh.telemetry.runtime.channel import channel_options
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.health import Readiness
from sealmesh.telemetry.runtime.interceptors import Context

from .conftest import SERVICE, Echo, Serve, dial

UNARY, SERVER_STREAM = f"/{SERVICE}/Unary", f"/{SERVICE}/ServerStream"


async def test_unavailable_before_the_first_message_is_retried(serve_echo: Serve, echo: Echo) -> None:
    attempts = 0

    async def fail_once(context: Context) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise SealmeshError(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", "engine restarts")

    echo.hook = fail_once
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        assert await channel.unary_unary(UNARY)(b"x") == b"x"
    assert attempts == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_other_failures_are_not_retried(serve_echo: Serve, echo: Echo, code: grpc.StatusCode) -> None:
    attempts = 0

    async def fail(context: Context) -> None:
        nonlocal attempts
        attempts += 1
        raise SealmeshError(code, "INTERNAL", "no")

    echo.hook = fail
    server = await serve_echo()
    async with dial(server.grpc_address) as channel:
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary(UNARY)(b"x")
    assert attempts == 1


async def test_a_stream_that_has_begun_is_not_retried(serve_echo: Serve, echo: Echo) -> None:
    echo.raises, echo.before = SealmeshError(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", "gone"), 1
    server = await serve_echo()
    got: list[bytes] = []
    async with dial(server.grpc_address) as channel:
        call = channel.unary_stream(SERVER_STREAM)(b"abc")
        got.append(await call.read())
        with pytest.raises(grpc.RpcError):
            got.append(await call.read())
    assert got == [b"a"]


async def test_calls_are_spread_over_healthy_servers_only(serve_echo: Serve) -> None:
    answered: Counter[str] = Counter()
    states = {name: Readiness(True) for name in "abc"}
    states["c"] = Readiness(False, "loading")

    def counting(name: str) -> Echo:
        async def count(context: Context) -> None:
            answered[name] += 1

        return Echo(hook=count)

    addresses = []
    for name in states:
        server = await serve_echo(register=counting(name).register, ready=lambda name=name: states[name])
        addresses.append(server.grpc_address)

    async with dial("ipv4:" + ",".join(addresses), load_balanced=True) as channel:

        async def until(expected: set[str]) -> None:
            """Calls until exactly the expected servers answered a run of calls."""
            async with asyncio.timeout(5):
                while True:
                    answered.clear()
                    for _ in range(12):
                        assert await channel.unary_unary(UNARY)(b"x", timeout=2) == b"x"
                    if set(answered) == expected:
                        return

        await until({"a", "b"})
        states["c"] = Readiness(True)
        await until({"a", "b", "c"})
        assert max(answered.values()) <= 6
        states["a"] = Readiness(False, "its engine stopped")
        await until({"b", "c"})


@pytest.mark.full
async def test_pings_every_second_during_a_long_silence_are_welcome(serve_echo: Serve, echo: Echo) -> None:
    """A server with gRPC's defaults ends the connection with too_many_pings after three, about 3 s."""
    server = await serve_echo()
    options = [(key, 100 if key == "grpc.keepalive_time_ms" else value) for key, value in channel_options()]
    async with grpc.aio.insecure_channel(server.grpc_address, options=options) as channel:
        raw: Any = channel
        call = raw.unary_unary(f"/{SERVICE}/Hold")(b"prefill")
        await asyncio.wait_for(echo.entered.wait(), 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(echo.left.wait(), 5)
        echo.release.set()
        assert await call == b"prefill"


def test_options_name_the_role_and_bound_messages() -> None:
    options = dict(channel_options(expected_role="vault", max_message_bytes=123, load_balanced=True))
    assert options["grpc.ssl_target_name_override"] == "vault.sealmesh.internal"
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 123
    assert options["grpc.keepalive_time_ms"] == options["grpc.http2.ping_timeout_ms"] == 1000
    config = json.loads(str(options["grpc.service_config"]))
    assert config["loadBalancingConfig"] == [{"round_robin": {}}]
    assert config["healthCheckConfig"] == {"serviceName": ""}
    plain = dict(channel_options())
    assert "grpc.ssl_target_name_override" not in plain
    assert "loadBalancingConfig" not in json.loads(str(plain["grpc.service_config"]))
