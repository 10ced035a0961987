"""HTTP without a framework: one ASGI request and its response, and a thin router.

A request costs one object and one dictionary look-up before its handler runs. Every response says
`no-store` (answers belong to one caller), carries the request's id and never an upstream header.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, TypeAlias, cast

import grpc
import orjson
from sealmesh.gateway.fields import JsonObject, invalid
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = [
    "JSON",
    "ClientGoneError",
    "DisconnectGuard",
    "Exchange",
    "Handler",
    "Headers",
    "new_request_id",
    "parse_object",
]

Event: TypeAlias = Mapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[dict[str, object]], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

JSON: Final = b"application/json"
_COMMON_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


def new_request_id() -> str:
    """A fresh id of a request; 28 characters."""
    return f"req-{secrets.token_hex(12)}"


class ClientGoneError(Exception):
    """The caller closed the connection; there is nobody to answer."""


class Exchange:
    """One HTTP request and its response.

    Attributes:
        method: as sent, for example "POST".
        path: decoded path.
        raw_path: path as sent, percent-encoded.
        query: raw query string.
        request_id: new and unique; answers carry it as `x-request-id`.
        route: what handled it, for logs and spans; never the raw path.
        status: of the response, 0 before it began.
        fields: facts for the access log, filled in by handlers; names and counts only.
    """

    __slots__ = (
        "_headers",
        "_receive",
        "_send",
        "completed",
        "fields",
        "method",
        "path",
        "query",
        "raw_path",
        "request_id",
        "route",
        "status",
    )

    def __init__(self, scope: Event, receive: Receive, send: Send) -> None:
        self._headers = cast("Sequence[tuple[bytes, bytes]]", scope["headers"])
        self._receive = receive
        self._send = send
        self.method = cast("str", scope["method"])
        self.path = cast("str", scope["path"])
        self.raw_path = cast("bytes", scope["raw_path"])
        self.query = cast("bytes", scope["query_string"])
        self.request_id = new_request_id()
        self.route = ""
        self.status = 0
        self.completed = False
        self.fields: dict[str, str | int | float] = {}

    def header(self, name: bytes) -> str | None:
        """Value of a header (lower-case name).

        Raises:
            SealmeshError: INVALID_REQUEST when it is given twice: two readers could choose differently.
        """
        found: bytes | None = None
        for key, value in self._headers:
            if key == name:
                if found is not None:
                    raise invalid(f"header {name.decode()} is given twice")
                found = value
        return found.decode("latin-1") if found is not None else None

    def count(self, name: bytes) -> int:
        """How often a header (lower-case name) is given."""
        return sum(key == name for key, _ in self._headers)

    async def body(self, limit: int, timeout_s: float) -> bytes:
        """The whole request body.

        Args:
            limit: most bytes.
            timeout_s: most seconds until the last byte is there.

        Raises:
            SealmeshError: MESSAGE_TOO_LARGE, INVALID_REQUEST (content-encoding), DEADLINE_EXCEEDED.
            ClientGoneError: the connection ended first.
        """
        encoding = self.header(b"content-encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            raise invalid("content-encoding of requests is not supported; send the body as it is")
        length = self.header(b"content-length")
        if length is not None and int(length) > limit:  # httptools only lets digits through
            raise _too_large(limit)
        event = await self._next_part(timeout_s)
        part = cast("bytes", event.get("body", b""))
        if len(part) > limit:
            raise _too_large(limit)
        if not event.get("more_body", False):
            return part
        parts, size = [part], len(part)
        try:
            async with asyncio.timeout(timeout_s):
                while event.get("more_body", False):
                    event = await self._next_part(None)
                    part = cast("bytes", event.get("body", b""))
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
        except TimeoutError:
            raise _too_slow(timeout_s) from None
        return b"".join(parts)

    async def _next_part(self, timeout_s: float | None) -> Event:
        try:
            if timeout_s is None:
                event = await self._receive()
            else:
                async with asyncio.timeout(timeout_s):
                    event = await self._receive()
        except TimeoutError:
            raise _too_slow(timeout_s or 0) from None
        if event["type"] == "http.disconnect":
            raise ClientGoneError
        return event

    async def wait_disconnect(self) -> None:
        """Return when the caller has gone (or the response is complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(self, status: int, content_type: bytes, body: bytes, headers: Headers = ()) -> None:
        """Send a whole response."""
        await self._start(status, content_type, ((b"content-length", b"%d" % len(body)), *headers))
        self.completed = True
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, content_type: bytes, headers: Headers = ()) -> None:
        """Begin a response of status 200 whose length is not known."""
        # Proxies of the nginx family hold back what they do not know to be a stream.
        await self._start(200, content_type, ((b"x-accel-buffering", b"no"), *headers))

    async def write(self, data: bytes) -> None:
        """Send a piece of a stream; waits while the caller does not keep up."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece of a stream."""
        self.completed = True
        await self._send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, content_type: bytes, headers: Headers) -> None:
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type),
                    *_COMMON_HEADERS,
                    (b"x-request-id", self.request_id.encode()),
                    *headers,
                ],
            }
        )


Handler = Callable[[Exchange], Awaitable[None]]


class DisconnectGuard:
    """Cancels the task inside the `async with` block as soon as the caller goes away.

    The cancellation reaches the RPC to the worker, and the worker aborts the engine's request. What comes
    out of the block is ClientGoneError, not CancelledError, unless the server itself cancels the task.
    """

    __slots__ = ("_exchange", "_task", "_watcher", "gone")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.gone = False

    async def __aenter__(self) -> DisconnectGuard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self.gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientGoneError from None

    async def _watch(self) -> None:
        await self._exchange.wait_disconnect()
        if not self._exchange.completed:
            self.gone = True
            self._task.cancel()


def parse_object(body: bytes) -> JsonObject:
    """A JSON object from a request body.

    Raises:
        SealmeshError: INVALID_REQUEST with line and column, or when it is not an object.
    """
    if not body:
        raise invalid("the body is empty; send a JSON object")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    if not isinstance(document, dict):
        raise invalid("the body must be a JSON object")
    return document


def _too_large(limit: int) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE",
        f"the body is longer than {limit} bytes, the limit of this gateway (max_body_bytes)",
        metadata={"limit_bytes": str(limit)},
    )


def _too_slow(timeout_s: float) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        f"the body was not complete after {timeout_s:g} s",
    )
