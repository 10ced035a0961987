"""Channels to other services: bounded, kept alive, verified by role, traced, retried where that is safe."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar, cast

import grpc
from sealmesh.telemetry.runtime.deadline import tightest_timeout_s
from sealmesh.telemetry.runtime.interceptors import OutgoingCall, OutgoingCalls
from sealmesh.telemetry.telemetry import Telemetry

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "cancelled_on_exit",
    "channel_options",
    "open_channel",
    "open_sync_channel",
    "role_host",
]

DEFAULT_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

_Result = TypeVar("_Result")
_Cancellable = TypeVar("_Cancellable", bound="_CanCancel")
Option = tuple[str, str | int]


class _CanCancel(Protocol):
    def cancel(self) -> bool: ...


def role_host(role: str) -> str:
    """The DNS name that certificates of a role carry, whatever host the service runs on."""
    return f"{role}.sealmesh.internal"


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    expected_role: str | None = None,
    telemetry: Telemetry | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    load_balanced: bool = False,
) -> grpc.aio.Channel:
    """An asyncio channel. Connects lazily; to be closed by the caller.

    Args:
        target: `host:port`, or `dns:///name:port` when load balanced.
        credentials: of `security.tls`; None for plain text, which only loopback fronts speak.
        expected_role: role that the server's certificate must carry; its host name is not checked then.
        telemetry: traces and measures the calls when given.
        max_message_bytes: largest message, each way.
        load_balanced: spread calls over every address of the target, only over healthy ones.

    A stream that is left before its end must be cancelled: see `cancelled_on_exit`. grpc.aio may report
    INTERNAL in place of the server's status when a server ends a call while requests still stream to it
    (grpc/grpc#36066, open with grpcio 1.85); sync channels do not.
    """
    options = channel_options(
        expected_role=expected_role, max_message_bytes=max_message_bytes, load_balanced=load_balanced
    )
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    if telemetry is None:
        return channel
    return _ObservedChannel(channel, OutgoingCalls(telemetry.tracing, telemetry.metrics))


def open_sync_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    expected_role: str | None = None,
    telemetry: Telemetry | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    load_balanced: bool = False,
) -> grpc.Channel:
    """As `open_channel`, for threads without an event loop."""
    options = channel_options(
        expected_role=expected_role, max_message_bytes=max_message_bytes, load_balanced=load_balanced
    )
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    if telemetry is None:
        return channel
    calls = OutgoingCalls(telemetry.tracing, telemetry.metrics)
    return grpc.intercept_channel(channel, _SyncInterceptor(calls))


def channel_options(
    *,
    expected_role: str | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    load_balanced: bool = False,
) -> list[Option]:
    """gRPC channel arguments: bounds, keepalive, retries and balancing."""
    service_config: dict[str, object] = {
        "methodConfig": [
            {
                "name": [{}],
                # gRPC retries only before the first response message, which is when it is safe.
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
    if load_balanced:
        service_config["loadBalancingConfig"] = [{"round_robin": {}}]
        service_config["healthCheckConfig"] = {"serviceName": ""}
    options: list[Option] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Pings alone do not eject a frozen peer; the ping timeout does (docs/operations.md).
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(service_config)),
    ]
    if expected_role is not None:
        options.append(("grpc.ssl_target_name_override", role_host(expected_role)))
    return options


@contextlib.contextmanager
def cancelled_on_exit(call: _Cancellable) -> Iterator[_Cancellable]:
    """Cancels a call when the block is left in any way; a call that is complete does not mind.

    Without it a stream that is abandoned half read lives on until it is garbage collected.
    """
    try:
        yield call
    finally:
        call.cancel()


# --- asyncio -----------------------------------------------------------------------------------------


class _ObservedChannel(grpc.aio.Channel):
    """A channel whose calls are traced and bounded by the deadline of the call being served.

    grpc.aio's own client interceptors put a task and a second call object between caller and call, for
    every message; wrapping the four factories costs nothing per message and keeps cancellation direct.
    """

    def __init__(self, channel: grpc.aio.Channel, calls: OutgoingCalls) -> None:
        self._channel = channel
        self._calls = calls

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._channel.__aexit__(exc_type, exc_val, exc_tb)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    # The four factories take what generated stubs pass, `_registered_method` included, which the type
    # stubs leave out.
    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.stream_stream(method, *args, **kwargs))

    def _observed(self, method: str, invoke: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            request: Any = None, *, timeout: float | None = None, metadata: Any = None, **options: Any
        ) -> Any:
            record = self._calls.begin(method)
            started = invoke(
                request, timeout=tightest_timeout_s(timeout), metadata=record.metadata(metadata), **options
            )
            started.add_done_callback(lambda done: record.end(_aio_code(done)))
            return started

        return call


def _aio_code(call: Any) -> grpc.StatusCode:
    """The status of a grpc.aio call that is done."""
    # The status is there when done callbacks run, so the coroutine ends in its first step.
    pending = cast("Coroutine[Any, Any, grpc.StatusCode]", call.code())
    try:
        pending.send(None)
    except StopIteration as result:
        return cast("grpc.StatusCode", result.value)
    pending.close()
    return grpc.StatusCode.UNKNOWN


# --- threads -----------------------------------------------------------------------------------------


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _SyncInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, calls: OutgoingCalls) -> None:
        self._calls = calls

    def _observe(self, continuation: Any, details: Any, request: Any) -> Any:
        record: OutgoingCall = self._calls.begin(_text(details.method))
        call = continuation(
            _CallDetails(
                details.method,
                tightest_timeout_s(details.timeout),
                record.metadata(details.metadata),
                details.credentials,
                getattr(details, "wait_for_ready", None),
                getattr(details, "compression", None),
            ),
            request,
        )
        call.add_done_callback(lambda done: record.end(done.code()))
        return call

    # One shape serves all four kinds; the stubs type each apart.
    intercept_unary_unary = _observe  # type: ignore[assignment]
    intercept_unary_stream = _observe  # type: ignore[assignment]
    intercept_stream_unary = _observe  # type: ignore[assignment]
    intercept_stream_stream = _observe  # type: ignore[assignment]


def _text(method: str | bytes) -> str:
    return method.decode("ascii") if isinstance(method, bytes) else method
