"""The ASGI application: finds the handler, and does around each request what every request needs.

One place opens the span, writes the access log, counts, and turns whatever a handler raises into the answer
of its skin. The log line names route, status, duration, tenant handle, shown key prefix and token counts:
never a path as sent, a header or a body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import grpc
from opentelemetry.trace import SpanKind, Status, StatusCode
from sealmesh.gateway.http import ClientGoneError, Exchange, Handler
from sealmesh.gateway.rest import native, openai
from sealmesh.gateway.rest.native import RestFront
from sealmesh.gateway.rest.openai import OpenAIFront
from sealmesh.telemetry.attributes import Attribute, set_attributes
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.http import Receive, Scope, Send
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.tracing import remote_context

__all__ = ["GatewayApp"]

ErrorWriter = Callable[[Exchange, SealmeshError, int], Awaitable[None]]
StreamEnder = Callable[[Exchange, SealmeshError], Awaitable[None]]

_CLIENT_GONE: Final = 499
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class _Route:
    name: str
    handle: Handler
    fail: ErrorWriter
    break_off: StreamEnder


class GatewayApp:
    """The HTTP front of the gateway; health and metrics routes are the runtime's.

    Args:
        openai_front: handlers of /v1.
        rest_front: handler of /api/v1.
        telemetry: spans, metrics and log.
    """

    def __init__(self, openai_front: OpenAIFront, rest_front: RestFront, telemetry: Telemetry) -> None:
        self._tracing = telemetry.tracing
        self._log = telemetry.log
        self._duration = telemetry.metrics.histogram(
            "http_server_request_duration_seconds",
            "Time from the head of a request to the last byte of its answer.",
            ("http_route", "http_response_status_code"),
        )
        self._active = telemetry.metrics.gauge("http_server_active_requests", "Requests being answered now.")

        def v1(path: str, handle: Handler) -> _Route:
            return _Route(path, handle, openai.respond_error, _end_openai_stream)

        self._exact: Mapping[str, Mapping[str, _Route]] = {
            "/v1/chat/completions": {"POST": v1("/v1/chat/completions", openai_front.chat_completions)},
            "/v1/completions": {"POST": v1("/v1/completions", openai_front.completions)},
            "/v1/embeddings": {"POST": v1("/v1/embeddings", openai_front.embeddings)},
            "/v1/models": {"GET": v1("/v1/models", openai_front.list_models)},
        }
        self._model = {"GET": v1("/v1/models/{id}", openai_front.get_model)}
        self._rest = _Route("/api/v1", rest_front.handle, native.respond_error, _end_native_stream)
        self._unknown_v1 = v1("/v1/*", openai_front.unknown)
        self._unknown = _Route("*", _not_found, native.respond_error, _end_native_stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        route, wrong_method = self._find(exchange)
        exchange.route = route.name
        traceparent = exchange.header(b"traceparent") if exchange.count(b"traceparent") == 1 else None
        started = time.perf_counter()
        self._active.inc()
        with self._tracing.span(
            f"{exchange.method if exchange.method in _METHODS else 'OTHER'} {route.name}",
            kind=SpanKind.SERVER,
            parent=remote_context(traceparent or ""),
        ) as span:
            try:
                await self._serve(exchange, route, wrong_method)
            finally:
                elapsed = time.perf_counter() - started
                self._active.dec()
                self._duration.labels(exchange.route, str(exchange.status)).observe(elapsed)
                set_attributes(
                    span,
                    {
                        Attribute.HTTP_METHOD: exchange.method,
                        Attribute.HTTP_ROUTE: exchange.route,
                        Attribute.HTTP_STATUS: exchange.status,
                        Attribute.REQUEST_ID: exchange.request_id,
                    },
                )
                if exchange.status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                self._log.info(
                    "request",
                    request_id=exchange.request_id,
                    method=exchange.method,
                    route=exchange.route,
                    status=exchange.status,
                    duration_ms=round(elapsed * 1000, 2),
                    **exchange.fields,
                )

    def _find(self, exchange: Exchange) -> tuple[_Route, str]:
        """The route, and the methods to name when the path is known but the method is not."""
        path = exchange.path
        routes = self._exact.get(path)
        if routes is None:
            if path.startswith("/api/v1/"):
                return self._rest, ""
            if not path.startswith("/v1/models/"):
                return (self._unknown_v1 if path.startswith("/v1/") else self._unknown), ""
            routes = self._model
        route = routes.get(exchange.method)
        if route is None:
            return next(iter(routes.values())), ", ".join(routes)
        return route, ""

    async def _serve(self, exchange: Exchange, route: _Route, wrong_method: str) -> None:
        try:
            if wrong_method:
                await _method_not_allowed(exchange, wrong_method)
            else:
                await route.handle(exchange)
        except ClientGoneError:
            exchange.status = _CLIENT_GONE
        except SealmeshError as error:
            await self._fail(exchange, route, error)
        except asyncio.CancelledError:
            # The server is shutting down and its grace is nearly over (HttpServer.stop).
            await self._fail(exchange, route, _shutting_down())
        except Exception as error:  # noqa: BLE001  # the boundary: the caller gets an answer, the log the cause
            self._log.failure("request failed unexpectedly", error, request_id=exchange.request_id)
            await self._fail(exchange, route, SealmeshError.internal())

    async def _fail(self, exchange: Exchange, route: _Route, error: SealmeshError) -> None:
        exchange.fields["reason"] = error.reason
        if exchange.status == 0:
            await route.fail(exchange, error, error.http_status)
        elif not exchange.completed:
            # Too late for a status: the error is the last event of the stream.
            await route.break_off(exchange, error)


async def _end_openai_stream(exchange: Exchange, error: SealmeshError) -> None:
    await exchange.finish(b"data: %b\n\n" % openai.error_body(error))


async def _end_native_stream(exchange: Exchange, error: SealmeshError) -> None:
    sse = "text/event-stream" in (exchange.header(b"accept") or "").lower()
    frame = b"data: %b\n\n" if sse else b"%b\n"
    await exchange.finish(frame % native.status_body(error, error.http_status))


async def _not_found(exchange: Exchange) -> None:
    raise SealmeshError(
        grpc.StatusCode.NOT_FOUND, "UNKNOWN_METHOD", "no such path; the API is under /v1 (OpenAI) and /api/v1"
    )


async def _method_not_allowed(exchange: Exchange, allowed: str) -> None:
    error = SealmeshError(grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD", f"this path takes {allowed} only")
    await exchange.respond(
        405, b"application/json", openai.error_body(error, 405), [(b"allow", allowed.encode())]
    )


def _shutting_down() -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.UNAVAILABLE,
        "OVERLOADED",
        "the gateway is shutting down; try again",
        retry_after_s=1.0,
    )
