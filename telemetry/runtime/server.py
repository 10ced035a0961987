"""`serve(spec)`: the life of a service, the same for each.

Bind → listen (NOT_SERVING) → start components → SERVING when ready → SIGTERM or SIGINT → NOT_SERVING →
drain → close components in reverse → flush spans → exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import grpc
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.health import READY, Health, Readiness, add_reflection
from sealmesh.telemetry.runtime.http import AsgiApp, HttpOptions, HttpServer, side_routes
from sealmesh.telemetry.runtime.interceptors import Authorizer, ServiceInterceptor, deny_all
from sealmesh.telemetry.runtime.lifecycle import Component
from sealmesh.telemetry.runtime.settings import EXIT_USAGE, ServiceSettings
from sealmesh.telemetry.telemetry import Telemetry

__all__ = [
    "EXIT_ADDRESS_IN_USE",
    "EXIT_FAILED",
    "EXIT_REFUSED",
    "ServerSpec",
    "ServiceServer",
    "serve",
    "server_options",
]

# Exit codes of every service, beside 0 (an orderly stop) and EXIT_USAGE (2, the configuration is wrong).
# 1 may be worth another attempt; the others come back until a person acts.
EXIT_FAILED: Final = 1
EXIT_ADDRESS_IN_USE: Final = 3
EXIT_REFUSED: Final = 4
"""Something sealed was refused: it was changed, an unknown signer signed it, or its key was not given."""

_REFUSALS: Final = frozenset({"INTEGRITY_FAILURE", "KEY_DENIED", "KEY_SLOT_MISMATCH"})

_READINESS_INTERVAL_S: Final = 0.2


def _always_ready() -> Readiness:
    return READY


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What makes one service different from another.

    Attributes:
        settings: addresses, limits and grace.
        telemetry: of this process; `serve` closes it.
        service_names: full names of the gRPC services, for health and reflection.
        register: adds the servicers to the server.
        authorize: decides who may call what; health and reflection are open. Default: nobody.
        credentials: of `security.tls`; None speaks plain text.
        components: started in order before the service is ready, closed in reverse.
        ready: asked several times a second whether the service can answer; must be cheap.
        http_app: ASGI application for the HTTP address, behind the side routes.
        http_options: TLS and limits of the HTTP address.
        endless: full methods of streams that end only with the server (`/pkg.Service/WatchX`).
        watch: runs while the service serves; when it raises SealmeshError the process ends with its
            message and a failure code, so that a supervisor can start it anew.
        reuse_port: lets several processes share the addresses (SO_REUSEPORT).
    """

    settings: ServiceSettings
    telemetry: Telemetry
    service_names: Sequence[str]
    register: Callable[[grpc.aio.Server], None]
    authorize: Authorizer = deny_all
    credentials: grpc.ServerCredentials | None = None
    components: Sequence[Component] = ()
    ready: Callable[[], Readiness] = _always_ready
    http_app: AsgiApp | None = None
    http_options: HttpOptions = field(default_factory=HttpOptions)
    endless: Collection[str] = field(default_factory=frozenset)
    watch: Callable[[], Awaitable[None]] | None = None
    reuse_port: bool = False


class AddressInUseError(SealmeshError):
    """Another process listens there."""


def server_options(max_message_bytes: int, *, reuse_port: bool = False) -> list[tuple[str, int]]:
    """gRPC server arguments: bounds, and patience with clients that ping every second."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Finds clients that vanished without a word, so that their calls are cancelled.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # Default on: two servers would share a port by accident, and neither would say so.
        ("grpc.so_reuseport", int(reuse_port)),
    ]


class ServiceServer:
    """A running service without its process: for tests, and for `serve`.

    `start` and `close` once each, or `async with`. Addresses are known after `start`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._log = spec.telemetry.log
        self._interceptor = ServiceInterceptor(spec.telemetry, spec.authorize, spec.endless)
        self._health = Health(spec.service_names, spec.ready)
        self._components = contextlib.AsyncExitStack()
        self._grpc: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.grpc_address = ""
        self.http_address = ""
        self.was_open = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def readiness(self) -> Readiness:
        """What health and `/readyz` say now."""
        return self._health.readiness()

    async def start(self) -> None:
        """Listens, starts the components and lets calls in.

        Raises:
            AddressInUseError: when an address is taken.
            SealmeshError: of a component; everything that was started is closed.
        """
        try:
            await self._listen()
            self._log.info("listening", grpc=self.grpc_address, http=self.http_address)
            for component in self._spec.components:
                await component.start()
                self._components.push_async_callback(component.close)
            self._interceptor.admission = "serving"
            self._health.open()
            self.was_open = True
            self._publish()
            self._watcher = asyncio.create_task(self._watch_readiness(), name="readiness")
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """NOT_SERVING, drain for up to the grace, then the components in reverse."""
        grace_s = self._spec.settings.drain_grace_ms / 1000
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        # First, so that clients with a health watch go elsewhere before anything ends.
        self._health.shut("the service is shutting down")
        self._interceptor.end_endless_calls()
        try:
            await asyncio.gather(self._stop_grpc(grace_s), self._stop_http())
        finally:
            await self._components.aclose()

    async def hurry(self) -> None:
        """Ends a drain that is under way: open calls are cancelled."""
        if self._http is not None:
            self._http.hurry()
        await self._stop_grpc(0)

    async def _listen(self) -> None:
        settings, spec = self._spec.settings, self._spec
        if settings.http_address:
            listener = _bind(settings.http_address, "http_address", reuse_port=spec.reuse_port)
            self.http_address = _name(listener)
            app = side_routes(spec.telemetry.metrics, self._health.readiness, spec.http_app)
            self._http = HttpServer(app, settings.drain_grace_ms / 1000, spec.http_options)
            await self._http.start(listener)

        # gRPC reports a taken port in several lines of its own log: find out first.
        _bind(settings.grpc_address, "grpc_address", reuse_port=spec.reuse_port).close()
        server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=server_options(settings.max_message_bytes, reuse_port=spec.reuse_port),
        )
        spec.register(server)
        self._health.add_to(server)
        add_reflection(server, spec.service_names)
        try:
            if spec.credentials is None:
                port = server.add_insecure_port(settings.grpc_address)
            else:
                port = server.add_secure_port(settings.grpc_address, spec.credentials)
        except RuntimeError:
            raise _taken(settings.grpc_address, "grpc_address") from None
        host, _ = _split(settings.grpc_address, "grpc_address")
        self.grpc_address = _join(host, port)
        self._grpc = server
        self._health.publish()
        await server.start()

    async def _stop_grpc(self, grace_s: float) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace_s)

    async def _stop_http(self) -> None:
        if self._http is not None:
            await self._http.stop()

    async def _watch_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READINESS_INTERVAL_S)
            self._publish()

    def _publish(self) -> None:
        if self._health.publish():
            state = self._health.readiness()
            if state.ok:
                self._log.info("ready", grpc=self.grpc_address, http=self.http_address)
            else:
                self._log.warning("not ready", cause=state.reason)


async def serve(spec: ServerSpec) -> int:
    """Runs a service until SIGTERM or SIGINT and returns the exit code of the process.

    0 after an orderly stop, EXIT_ADDRESS_IN_USE for a taken port, EXIT_USAGE when a component finds the
    configuration wrong, EXIT_REFUSED when it finds something sealed changed or is given no key for it,
    EXIT_FAILED for all else. Each failure is logged as one line. A second signal cuts the drain short.
    Closes the telemetry of the spec.
    """
    server = ServiceServer(spec)
    log = spec.telemetry.log
    try:
        async with _signals(server) as stopped:
            await _until_stopped(server, spec, stopped)
        log.info("stopped")
        return 0
    except SealmeshError as exc:
        # What a person must act on is one line; a traceback would bury it.
        log.error(exc.message, reason=exc.reason)  # noqa: TRY400
        return _exit_code(exc)
    except Exception as exc:  # noqa: BLE001  # the boundary of the process: log it and say so in the exit code
        # Before the first request the text of an exception cannot quote one, and it says what to mend.
        cause = {} if server.was_open else {"cause": str(exc)}
        log.failure("the service failed unexpectedly", exc, **cause)
        return EXIT_FAILED
    finally:
        await spec.telemetry.close()


def _exit_code(error: SealmeshError) -> int:
    if isinstance(error, AddressInUseError):
        return EXIT_ADDRESS_IN_USE
    if error.reason in _REFUSALS:
        return EXIT_REFUSED
    return EXIT_USAGE if error.reason == "CONFIGURATION_INVALID" else EXIT_FAILED


async def _until_stopped(server: ServiceServer, spec: ServerSpec, stopped: asyncio.Event) -> None:
    signalled = asyncio.create_task(stopped.wait(), name="signal")
    try:
        await _first(asyncio.create_task(server.start(), name="start"), signalled)
        if stopped.is_set() and not server.readiness.ok:
            spec.telemetry.log.info("stopped before it was ready")
        try:
            if not stopped.is_set():
                if spec.watch is not None:
                    await _first(asyncio.ensure_future(spec.watch()), signalled)
                await signalled
        finally:
            await server.close()
    finally:
        signalled.cancel()


async def _first(work: asyncio.Future[None], signalled: asyncio.Task[bool]) -> None:
    """Waits for the work or the signal; on the signal the work is cancelled. Raises what the work raised."""
    both: set[asyncio.Future[Any]] = {work, signalled}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error


@contextlib.asynccontextmanager
async def _signals(server: ServiceServer) -> AsyncIterator[asyncio.Event]:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    hurried: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if stopped.is_set():
            hurried.append(loop.create_task(server.hurry()))
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopped
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await asyncio.gather(*hurried)


# --- addresses ---------------------------------------------------------------------------------------


def _split(address: str, setting: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise SealmeshError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "CONFIGURATION_INVALID",
            f"{setting} = {address!r} is not host:port (for example 127.0.0.1:9101)",
        )
    return host.strip("[]"), int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _name(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return _join(str(host), int(port))


def _bind(address: str, setting: str, *, reuse_port: bool) -> socket.socket:
    host, port = _split(address, setting)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024, reuse_port=reuse_port)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise _taken(address, setting) from None
        cause = exc.strerror or str(exc)
        raise SealmeshError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "CONFIGURATION_INVALID",
            f"cannot listen on {setting} = {address}: {cause}",
        ) from None


def _taken(address: str, setting: str) -> AddressInUseError:
    return AddressInUseError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "CONFIGURATION_INVALID",
        f"port {address.rpartition(':')[2]} is in use: stop what listens on {address}, or set another "
        f"{setting} (--{setting.replace('_', '-')})",
    )
