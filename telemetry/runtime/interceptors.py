"""What happens around every call: admission, authorisation, deadline, trace, metrics, errors, log.

Server side one interceptor does it all in a fixed order, because the parts need each other (the span
needs the status, the log the trace, the metrics the reason). Client side the same record is kept by
`OutgoingCalls`, used by both kinds of channel in `channel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from sealmesh.telemetry.attributes import Attribute, set_attributes
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.runtime.deadline import deadline_within
from sealmesh.telemetry.runtime.errors import STATUS_DETAILS_KEY, Reason, SealmeshError, reason_of
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.tracing import Tracing, extract_context, inject_context

__all__ = [
    "HEALTH_AND_REFLECTION",
    "Authorizer",
    "Context",
    "OutgoingCalls",
    "ServiceInterceptor",
    "deny_all",
]

# Quoted: these classes are generic for type checkers only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# Decides whether the peer of a call may make it: returns, or raises SealmeshError.
Authorizer: TypeAlias = Callable[[Context, str], Awaitable[None]]

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"
_Behaviour: TypeAlias = Callable[[Any, Context], Any]
Admission = Literal["starting", "serving", "draining"]

# Probes and tools of any peer that got through the handshake may ask whether and what a server serves.
_REFLECTION: Final = frozenset(
    {
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
HEALTH_AND_REFLECTION: Final = _REFLECTION | {
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
}


_DRAINING: Final[tuple[grpc.StatusCode, Reason, str]] = (
    grpc.StatusCode.UNAVAILABLE,
    "OVERLOADED",
    "the service is shutting down; another may answer",
)


async def deny_all(context: Context, full_method: str) -> None:
    """The authorizer of a server that was given none: nobody may call anything."""
    raise SealmeshError(
        grpc.StatusCode.PERMISSION_DENIED, "ROLE_DENIED", f"no caller may use {full_method.lstrip('/')} here"
    )


@dataclass(frozen=True, slots=True)
class _Method:
    full: str
    service: str
    name: str

    @classmethod
    def parse(cls, full: str) -> _Method:
        service, _, name = full.lstrip("/").rpartition("/")
        return cls(full, service, name)

    @property
    def span_name(self) -> str:
        return f"{self.service}/{self.name}"

    def attributes(self) -> Mapping[Attribute, str]:
        return {
            Attribute.RPC_SYSTEM: "grpc",
            Attribute.RPC_SERVICE: self.service,
            Attribute.RPC_METHOD: self.name,
        }


@dataclass(slots=True)
class _Outcome:
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str = ""

    def on_span(self, span: Span) -> None:
        set_attributes(span, {Attribute.RPC_STATUS: self.code.value[0]})
        if self.code is not grpc.StatusCode.OK:
            if self.reason:
                set_attributes(span, {Attribute.ERROR_REASON: self.reason})
            set_attributes(span, {Attribute.ERROR_TYPE: self.code.name})
            span.set_status(Status(StatusCode.ERROR))


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    Args:
        telemetry: where spans, metrics and logs go.
        authorize: asked for every call but health and reflection.
        endless: full methods (`/package.Service/Method`) of streams that end only with the server; they
            are ended when it drains, so that they do not use up its grace.
    """

    def __init__(
        self, telemetry: Telemetry, authorize: Authorizer = deny_all, endless: Collection[str] = ()
    ) -> None:
        self._telemetry = telemetry
        self._authorize = authorize
        self._endless_methods = frozenset(endless) | _REFLECTION
        self._endless: set[asyncio.Task[Any]] = set()
        self._ended: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._wrapped: dict[str, tuple[_Handler, _Handler]] = {}
        self.admission: Admission = "starting"

    def end_endless_calls(self) -> None:
        """Ends the endless streams with UNAVAILABLE. To be called once, when the server drains."""
        self.admission = "draining"
        for task in tuple(self._endless):
            self._ended.add(task)
            task.cancel()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        full = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(_unknown_method(full))
        known = self._wrapped.get(full)
        if known is None or known[0] is not handler:
            known = self._wrapped[full] = (handler, self._wrap(handler, _Method.parse(full)))
        return known[1]

    def _wrap(self, handler: _Handler, method: _Method) -> _Handler:
        behaviour = cast(
            "_Behaviour",
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream,
        )

        async def answer(request: Any, context: Context) -> Any:
            return await self._serve(method, context, lambda: behaviour(request, context))

        async def stream(request: Any, context: Context) -> None:
            await self._serve(method, context, lambda: _pump(behaviour(request, context), context))

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(
            stream if handler.response_streaming else answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _serve(self, method: _Method, context: Context, body: Callable[[], Awaitable[Any]]) -> Any:
        tracing, metrics = self._telemetry.tracing, self._telemetry.metrics
        parent = extract_context(_text_metadata(context.invocation_metadata()))
        probe = method.full in HEALTH_AND_REFLECTION
        span = (
            trace.INVALID_SPAN
            if probe
            else tracing.tracer.start_span(method.span_name, context=parent, kind=SpanKind.SERVER)
        )
        set_attributes(span, method.attributes())
        token = otel_context.attach(trace.set_span_in_context(span, parent))
        active = metrics.rpc_server_active.labels(method.service, method.name)
        active.inc()
        started, outcome = time.perf_counter(), _Outcome()
        try:
            with self._ended_on_drain(method), deadline_within(_time_left(context)):
                await self._admit(method, context)
                answer = await body()
                outcome.code = _code_of(context)
                return answer
        except asyncio.CancelledError:
            outcome.code, outcome.reason = self._why_cancelled(context)
            if outcome.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            _uncancel()
            await _fail(context, SealmeshError(*_DRAINING), outcome)
        except grpc.aio.AbortError:
            outcome.code = _code_of(context)
            outcome.reason = reason_of(outcome.code)
            raise
        except NotImplementedError:
            # How the generated base class answers for an RPC that the servicer leaves to it.
            await _fail(context, _not_served(method.full), outcome)
        except Exception as exc:  # noqa: BLE001  # the boundary: whatever it was, the caller gets a status
            error = _meaning(exc)
            if error is None:
                self._telemetry.log.failure("call failed unexpectedly", exc, method=method.span_name)
                error = SealmeshError.internal()
            await _fail(context, error, outcome)
        finally:
            elapsed = time.perf_counter() - started
            active.dec()
            _measure(metrics, method, outcome, elapsed)
            outcome.on_span(span)
            log = self._telemetry.log.debug if probe else self._telemetry.log.info
            log(
                "call",
                method=method.span_name,
                code=outcome.code.name,
                duration_ms=round(elapsed * 1000, 2),
                **({"reason": outcome.reason} if outcome.reason else {}),
            )
            span.end()
            otel_context.detach(token)

    async def _admit(self, method: _Method, context: Context) -> None:
        if method.full in HEALTH_AND_REFLECTION:
            return
        await self._authorize(context, method.full)
        if self.admission == "starting":
            raise SealmeshError(
                grpc.StatusCode.UNAVAILABLE, "OVERLOADED", "the service is starting", retry_after_s=1
            )

    @contextlib.contextmanager
    def _ended_on_drain(self, method: _Method) -> Iterator[None]:
        task = asyncio.current_task()
        if task is None or method.full not in self._endless_methods:
            yield
            return
        self._endless.add(task)
        try:
            yield
        finally:
            self._endless.discard(task)

    def _why_cancelled(self, context: Context) -> tuple[grpc.StatusCode, Reason]:
        """Tells a deadline that passed from a server that drains from a client that left."""
        left = _time_left(context)
        if left is not None and left <= 0:
            return grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"
        if self.admission == "draining" and asyncio.current_task() in self._ended:
            return grpc.StatusCode.UNAVAILABLE, "OVERLOADED"
        return grpc.StatusCode.CANCELLED, "CANCELLED"


async def _pump(produced: Any, context: Context) -> None:
    """Sends what a streaming handler yields; its generator is closed at once when the call ends early."""
    if inspect.isawaitable(produced):
        await produced
        return
    async with contextlib.aclosing(cast("Any", produced)) as responses:
        async for response in responses:
            await context.write(response)


def _meaning(exc: Exception) -> SealmeshError | None:
    """What an exception of a servicer means to the caller; None for a defect.

    An error out of a task group comes wrapped; a failed call that the servicer had nothing to add to is
    passed on as what it meant here.
    """
    while isinstance(exc, ExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    if isinstance(exc, SealmeshError):
        return exc
    return SealmeshError.from_rpc_error(exc) if isinstance(exc, grpc.RpcError) else None


def _uncancel() -> None:
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


async def _fail(context: Context, error: SealmeshError, outcome: _Outcome) -> NoReturn:
    outcome.code, outcome.reason = error.code, error.reason
    status = error.to_status()
    await context.abort(error.code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))


def _not_served(full: str) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.UNIMPLEMENTED,
        "UNKNOWN_METHOD",
        f"this release does not serve {full.lstrip('/')}",
    )


def _unknown_method(full: str) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
    async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
        error = SealmeshError(
            grpc.StatusCode.UNIMPLEMENTED,
            "UNKNOWN_METHOD",
            f"no RPC {full.lstrip('/')} here; server reflection lists those that are",
        )
        await _fail(context, error, _Outcome())

    return refuse


def _text_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _time_left(context: Context) -> float | None:
    return cast("float | None", context.time_remaining())


def _code_of(context: Context) -> grpc.StatusCode:
    """The status that a servicer set by hand, else OK.

    grpc.aio gives a number or None where its stub says StatusCode.
    """
    code = cast("object", context.code()) or 0
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)


def _measure(metrics: Metrics, method: _Method, outcome: _Outcome, elapsed_s: float) -> None:
    labels = (method.service, method.name, outcome.code.name)
    metrics.rpc_server_duration.labels(*labels).observe(elapsed_s)
    if outcome.code is not grpc.StatusCode.OK:
        metrics.rpc_server_errors.labels(*labels, outcome.reason).inc()


# --- outgoing calls ----------------------------------------------------------------------------------


class OutgoingCalls:
    """Keeps the record of the calls that one channel makes.

    Args:
        tracing: where CLIENT spans go.
        metrics: holds `rpc_client_duration_seconds`; None measures nothing.
    """

    def __init__(self, tracing: Tracing, metrics: Metrics | None = None) -> None:
        self._tracing = tracing
        self._metrics = metrics
        self._methods: dict[str, _Method] = {}

    def begin(self, full_method: str) -> OutgoingCall:
        """The record of a call that is about to be made."""
        method = self._methods.get(full_method)
        if method is None:
            method = self._methods[full_method] = _Method.parse(full_method)
        span = self._tracing.tracer.start_span(method.span_name, kind=SpanKind.CLIENT)
        set_attributes(span, method.attributes())
        return OutgoingCall(method, span, self._metrics)


class OutgoingCall:
    """One call: its span, its trace metadata and its end."""

    __slots__ = ("_method", "_metrics", "_span", "_started")

    def __init__(self, method: _Method, span: Span, metrics: Metrics | None) -> None:
        self._method = method
        self._span = span
        self._metrics = metrics
        self._started = time.perf_counter()

    def metadata(self, given: Iterable[tuple[str, str | bytes]] | None) -> list[tuple[str, str | bytes]]:
        """The caller's metadata with the trace context of this call in it."""
        carrier: dict[str, str] = {}
        inject_context(carrier, trace.set_span_in_context(self._span))
        return [pair for pair in given or () if pair[0] not in carrier] + list(carrier.items())

    def end(self, code: grpc.StatusCode) -> None:
        """Closes the record."""
        _Outcome(code).on_span(self._span)
        self._span.end()
        if self._metrics is not None:
            labels = (self._method.service, self._method.name, code.name)
            self._metrics.rpc_client_duration.labels(*labels).observe(time.perf_counter() - self._started)
