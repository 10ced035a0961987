"""The REST skin of the gRPC services: HTTP in front of the transcoder.

Streams are newline-delimited JSON (`application/x-ndjson`), or server-sent events when the caller accepts
`text/event-stream`. Errors are `google.rpc.Status` in JSON under "error", as AIP-193 shows them, with the
matching HTTP status; within a stream that has begun, the same object is the last line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

import grpc
import orjson
from google.protobuf import json_format
from google.protobuf.message import Message

# Imported so that the descriptor pool can render error details.
from google.rpc import error_details_pb2 as _error_details  # noqa: F401
from sealmesh.gateway.access.identity import Authenticator
from sealmesh.gateway.http import JSON, DisconnectGuard, Exchange
from sealmesh.gateway.pipeline import GRACE_S, Caller, deadline_exceeded
from sealmesh.gateway.rest.openai import retry_headers
from sealmesh.gateway.rest.transcode import Encoding, Match, NoMatch, Transcoder, full_method
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["RestFront", "respond_error", "status_body"]

_NDJSON: Final = b"application/x-ndjson"
_SSE: Final = b"text/event-stream; charset=utf-8"


class RestFront:
    """Handler of `/api/v1/…`.

    Args:
        transcoder: routes to the services' handlers.
        operations: what each RPC does, by `package.Service/Method`; an RPC without one is refused.
        authenticator: checks keys.
        settings: limits.
    """

    def __init__(
        self,
        transcoder: Transcoder[Caller],
        operations: Mapping[str, str],
        authenticator: Authenticator,
        settings: GatewaySettings,
    ) -> None:
        self._transcoder = transcoder
        self._operations = operations
        self._authenticator = authenticator
        self._max_body_bytes = settings.max_body_bytes
        self._body_timeout_s = settings.body_timeout_ms / 1000
        self._timeout_s = settings.request_timeout_ms / 1000

    async def handle(self, exchange: Exchange) -> None:
        """Serve one request; raises SealmeshError while nothing has been sent."""
        principal = self._authenticator.authenticate(exchange.header(b"authorization"))
        exchange.fields["tenant"] = principal.context.handle
        exchange.fields["key"] = principal.key_prefix
        match = self._transcoder.find(exchange.method, exchange.raw_path)
        if isinstance(match, NoMatch):
            await _no_route(exchange, match)
            return
        method = full_method(match.route.method)
        exchange.route = match.route.template.source
        principal.require(self._operations.get(method, ""))
        body = await exchange.body(self._max_body_bytes, self._body_timeout_s)
        request, encoding = match.decode(exchange.query, body)
        caller = Caller(principal, exchange.request_id, time.monotonic() + self._timeout_s)
        async with DisconnectGuard(exchange):
            try:
                async with asyncio.timeout(self._timeout_s + GRACE_S):
                    if match.route.unary is not None:
                        response = await match.route.unary(request, caller)
                        await exchange.respond(200, JSON, match.encode(response, encoding))
                    else:
                        await self._stream(exchange, match, request, caller, encoding)
            except TimeoutError:
                raise deadline_exceeded() from None

    async def _stream(
        self, exchange: Exchange, match: Match[Caller], request: Message, caller: Caller, encoding: Encoding
    ) -> None:
        assert match.route.stream is not None
        accept = exchange.header(b"accept") or ""
        sse = "text/event-stream" in accept.lower()
        frame = b"data: %b\n\n" if sse else b"%b\n"
        async with aclosing(match.route.stream(request, caller)) as responses:
            started = False
            try:
                async for response in responses:
                    # The head waits for the first message: an early failure gets its real status.
                    if not started:
                        await exchange.start_stream(_SSE if sse else _NDJSON)
                        started = True
                    await exchange.write(frame % match.encode(response, encoding))
            except SealmeshError as error:
                if not started:
                    raise
                exchange.fields["reason"] = error.reason
                await exchange.finish(frame % status_body(error, error.http_status))
                return
            if not started:
                await exchange.start_stream(_SSE if sse else _NDJSON)
            await exchange.finish()


async def _no_route(exchange: Exchange, match: NoMatch) -> None:
    if match.allowed:
        allowed = ", ".join(match.allowed)
        error = SealmeshError(
            grpc.StatusCode.UNIMPLEMENTED,
            "UNKNOWN_METHOD",
            f"{exchange.method} is not served here; use {allowed}",
        )
        await exchange.respond(405, JSON, status_body(error, 405), [(b"allow", allowed.encode())])
        return
    raise SealmeshError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_METHOD", "no such path under /api/v1")


async def respond_error(exchange: Exchange, error: SealmeshError, status: int) -> None:
    """Answer with `google.rpc.Status` as JSON."""
    await exchange.respond(status, JSON, status_body(error, status), retry_headers(error))


def status_body(error: SealmeshError, http_status: int) -> bytes:
    """`{"error": {"code", "message", "status", "details"}}`; `code` is the HTTP status (AIP-193)."""
    details = [json_format.MessageToDict(detail) for detail in error.to_status().details]
    return orjson.dumps(
        {
            "error": {
                "code": http_status,
                "message": error.message,
                "status": error.code.name,
                "details": details,
            }
        }
    )
