"""A real service on loopback: an echo with all four kinds of RPC, on raw bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from sealmesh.telemetry.runtime.channel import open_channel, open_sync_channel
from sealmesh.telemetry.runtime.interceptors import Context
from sealmesh.telemetry.runtime.server import ServerSpec, ServiceServer
from sealmesh.telemetry.runtime.settings import ServiceSettings
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.trace_store import SpanRecord, TraceStore

SERVICE = "test.v1.Echo"


async def allow_all(context: Context, full_method: str) -> None:
    """For tests that are about something else."""


@dataclass
class Echo:
    """Answers with what it got; `raises`, when set, is raised instead, after `before` stream messages."""

    raises: BaseException | None = None
    before: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    hook: Callable[[Context], Awaitable[None]] | None = None
    cancelled: bool = False

    async def unary(self, request: bytes, context: Context) -> bytes:
        if self.hook is not None:
            await self.hook(context)
        if self.raises is not None:
            raise self.raises
        return request

    async def server_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        for index in range(len(request)):
            if self.raises is not None and index == self.before:
                raise self.raises
            yield request[index : index + 1]

    async def client_stream(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        parts = [part async for part in requests]
        if self.raises is not None:
            raise self.raises
        return b"".join(parts)

    async def both(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for part in requests:
            if self.raises is None:
                yield part
        if self.raises is not None:
            raise self.raises

    async def hold(self, request: bytes, context: Context) -> bytes:
        """Answers when released; remembers whether it was cancelled."""
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.left.set()
        return request

    async def forever(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """Yields once and then waits; says when its generator is closed."""
        try:
            yield request
            self.entered.set()
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.left.set()

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "ServerStream": grpc.unary_stream_rpc_method_handler(self.server_stream),
            "ClientStream": grpc.stream_unary_rpc_method_handler(self.client_stream),
            "Both": grpc.stream_stream_rpc_method_handler(self.both),
            "Hold": grpc.unary_unary_rpc_method_handler(self.hold),
            "Forever": grpc.unary_stream_rpc_method_handler(self.forever),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """Telemetry.build points the process's log at stderr; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    """Without the HTTP port, whose orderly end takes uvicorn 0.2 s; tests about it set one."""
    return ServiceSettings(http_address="", trace_dir=tmp_path / "traces", drain_grace_ms=2000)


@pytest.fixture
async def telemetry(settings: ServiceSettings) -> AsyncIterator[Telemetry]:
    built = Telemetry.build("echo", settings)
    yield built
    await built.close()


@asynccontextmanager
async def dial(address: str, **options: Any) -> AsyncIterator[Any]:
    """A channel for raw bytes (its factories are typed for generated stubs only)."""
    async with open_channel(address, options.pop("credentials", None), **options) as channel:
        yield channel


@contextmanager
def dial_sync(address: str, **options: Any) -> Iterator[Any]:
    """As `dial`, for threads."""
    with open_sync_channel(address, options.pop("credentials", None), **options) as channel:
        yield channel


Serve = Callable[..., Awaitable[ServiceServer]]


@pytest.fixture
async def serve_echo(echo: Echo, settings: ServiceSettings, telemetry: Telemetry) -> AsyncIterator[Serve]:
    """Starts the echo service with changes to its spec; closes it after the test."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> ServiceServer:
            spec = ServerSpec(
                settings=settings,
                telemetry=telemetry,
                service_names=[SERVICE],
                register=echo.register,
                authorize=allow_all,
            )
            return await stack.enter_async_context(ServiceServer(replace(spec, **changes)))

        yield start
        echo.release.set()


@pytest.fixture
def spans(telemetry: Telemetry, settings: ServiceSettings) -> Callable[[], list[SpanRecord]]:
    """All spans so far, flushed and read back from disk."""

    def read() -> list[SpanRecord]:
        assert telemetry.tracing.flush()
        assert settings.trace_dir is not None
        return [span for trace in TraceStore(settings.trace_dir).newest(1000) for span in trace.spans]

    return read
