"""Whether a service can answer, as grpc.health.v1 and `/readyz` tell it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["READY", "Health", "Readiness", "add_reflection"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a service can answer now, and if not, why (one line, no content of requests)."""

    ok: bool
    reason: str = ""


READY: Final = Readiness(True)

_REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"


class Health:
    """Publishes readiness over grpc.health.v1 for the server ("") and each of its services.

    Args:
        service_names: full names of the services.
        ready: asked for the truth.
    """

    def __init__(self, service_names: Sequence[str], ready: Callable[[], Readiness]) -> None:
        self._names = ("", *service_names)
        self._ready = ready
        self._servicer = health.aio.HealthServicer()
        self._published: bool | None = None
        self._closed: Readiness | None = Readiness(False, "the service is starting")

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

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

    async def shut(self, reason: str) -> None:
        """NOT_SERVING for good."""
        self._closed = Readiness(False, reason)
        await self.publish()

    async def publish(self) -> bool:
        """Tells watchers when readiness changed; returns whether it did."""
        ok = self.readiness().ok
        if ok == self._published:
            return False
        self._published = ok
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, status.SERVING if ok else status.NOT_SERVING)
        return True


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
