"""The HTTP side of a service: liveness, readiness and metrics, and room for an application of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import uvicorn
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.health import Readiness

__all__ = ["AsgiApp", "HttpOptions", "HttpServer", "Receive", "Scope", "Send", "side_routes"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON: Final = "application/json"
# Time for responses to end once their tasks are cancelled.
_LAST_WORDS_S: Final = 1.0


def side_routes(
    metrics: Metrics, readiness: Callable[[], Readiness], application: AsgiApp | None = None
) -> AsgiApp:
    """An ASGI app with `/healthz`, `/readyz` and `/metrics`; all else goes to `application` or is 404.

    `/healthz` says that the process lives and its event loop turns; `/readyz` whether it can answer, with
    the reason when it cannot.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path") if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        if path == "/healthz":
            await _reply(send, 200, b'{"status":"alive"}', _JSON)
        elif path == "/readyz":
            state = readiness()
            body = {"status": "ready"} if state.ok else {"status": "not ready", "reason": state.reason}
            await _reply(send, 200 if state.ok else 503, json.dumps(body).encode(), _JSON)
        elif path == "/metrics":
            text, content_type = metrics.render()
            await _reply(send, 200, text, content_type)
        elif application is not None:
            await application(scope, receive, send)
        elif scope["type"] == "http":
            await _reply(send, 404, b'{"error":"only /healthz, /readyz and /metrics are here"}', _JSON)

    return app


async def _reply(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """What an HTTP front that strangers reach needs beyond the defaults.

    Attributes:
        certificate: PEM chain of the server; None speaks plain text.
        key: PEM private key of `certificate`.
        keep_alive_s: how long an idle connection is kept.
        max_connections: connections and requests at once; beyond it callers get 503. None: unbounded.
    """

    certificate: Path | None = None
    key: Path | None = None
    keep_alive_s: float = 5.0
    max_connections: int | None = None


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is already bound, leaving signals to the runtime.

    Args:
        app: raw ASGI application.
        grace_s: how long open requests may take to finish at `stop`, in seconds.
        options: TLS and limits.
    """

    def __init__(self, app: AsgiApp, grace_s: float, options: HttpOptions) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # What a client says about its own address is not believed.
                proxy_headers=False,
                ssl_certfile=options.certificate,
                ssl_keyfile=options.key,
                timeout_keep_alive=max(1, round(options.keep_alive_s)),
                limit_concurrency=options.max_connections,
                ws="none",
                interface="asgi3",
                # `stop` ends what is open; this is only a bound should that fail.
                timeout_graceful_shutdown=math.ceil(grace_s + 3 * _LAST_WORDS_S),
            )
        )
        self._options = options
        self._grace_s = grace_s
        self._hurried = asyncio.Event()
        self._listening = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Returns when connections are accepted; takes over the socket.

        Raises:
            SealmeshError: CONFIGURATION_INVALID when the certificate or its key cannot be used.
        """
        try:
            self.config.load()
        except OSError as exc:
            listener.close()
            raise SealmeshError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "CONFIGURATION_INVALID",
                f"cannot use {self._options.certificate} with {self._options.key}: {exc.strerror or exc}",
            ) from None
        self._task = asyncio.create_task(self.serve(sockets=[listener]), name="http")
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self._task

    async def stop(self) -> None:
        """Refuses new connections and lets open requests finish within the grace.

        A second before the grace is over (half of a short one), the tasks of applications that still answer
        are cancelled. An application that streams takes CancelledError as the word to end its response in
        an orderly way, say with an error event, within that second. Then the connections are cut.
        """
        if self._task is None:
            return
        self.should_exit = True
        last_words_s = min(_LAST_WORDS_S, self._grace_s / 2)
        hurried = asyncio.create_task(self._hurried.wait(), name="http hurried")
        try:
            await asyncio.wait(
                {self._task, hurried},
                timeout=self._grace_s - last_words_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            hurried.cancel()
        for request in tuple(self.server_state.tasks):
            request.cancel("the server is shutting down")
        await asyncio.wait({self._task}, timeout=last_words_s)
        for connection in tuple(self.server_state.connections):
            # Its application, if any, is told that the caller has gone.
            connection.transport.abort()
        await self._task

    def hurry(self) -> None:
        """Ends the grace of a `stop` that is under way, or yet to come, at once."""
        self._hurried.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook: its listeners are made here."""
        await super().startup(sockets)
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook: signals belong to the runtime."""
        yield
