"""The HTTP side of a service: liveness, readiness and metrics, and room for an application of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
        grace_s: how long open requests may take to finish at `stop`.
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
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )
        self._options = options
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
        """Refuses new connections and waits for open requests, up to the grace."""
        if self._task is not None:
            self.should_exit = True
            await self._task

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook: its listeners are made here."""
        await super().startup(sockets)
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook: signals belong to the runtime."""
        yield
