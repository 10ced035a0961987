"""Whether a service can answer, as grpc.health.v1 and `/readyz` tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["READY", "Health", "Readiness", "add_reflection"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a service can answer now, and if not, why (one line, no content of requests)."""

    ok: bool
    reason: str = ""


READY: Final = Readiness(True)

_REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
_Status: Final = health_pb2.HealthCheckResponse


class Health:
    """Publishes readiness over grpc.health.v1 for the server ("") and each of its services.

    The servicer of grpcio-health-checking keeps watches open for ever, so that a drain would always take
    all of its grace; here a watch hears NOT_SERVING and then ends.

    Args:
        service_names: full names of the services.
        ready: asked for the truth.
    """

    def __init__(self, service_names: Sequence[str], ready: Callable[[], Readiness]) -> None:
        self._names = frozenset(("", *service_names))
        self._ready = ready
        self._closed: Readiness | None = Readiness(False, "the service is starting")
        self._published: bool | None = None
        self._shut = False
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def readiness(self) -> Readiness:
        """Readiness as of now: what `ready` says between `open` and `shut`; a check that fails says no."""
        if self._closed is not None:
            return self._closed
        try:
            return self._ready()
        except SealmeshError as exc:
            return Readiness(False, exc.message)

    def open(self) -> None:
        """From now on `ready` decides."""
        self._closed = None

    def shut(self, reason: str) -> None:
        """NOT_SERVING for good; watches end once they have said so."""
        self._closed = Readiness(False, reason)
        self._shut = True
        self._wake()

    def publish(self) -> bool:
        """Tells watches when readiness changed; returns whether it did."""
        ok = self.readiness().ok
        if ok == self._published:
            return False
        self._published = ok
        self._wake()
        return True

    async def Check(self, request: Any, context: Any) -> Any:
        """grpc.health.v1.Health/Check."""
        if request.service not in self._names:
            raise SealmeshError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", f"no service {request.service} here")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1.Health/Watch."""
        told: int | None = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != told:
                told = status
                yield _Status(status=status)
            if self._shut:
                return
            await changed.wait()

    async def List(self, request: Any, context: Any) -> Any:
        """grpc.health.v1.Health/List."""
        statuses = {name: _Status(status=self._status(name)) for name in self._names}
        return health_pb2.HealthListResponse(statuses=statuses)

    def _status(self, service: str) -> int:
        if service not in self._names:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if self.readiness().ok else _Status.NOT_SERVING)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Server reflection under both of its names; their messages are the same on the wire."""
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1)
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )
