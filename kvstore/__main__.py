"""`python -m sealmesh.kvstore`: the KV block store as a process."""

import asyncio
import sys

import grpc.aio
from sealmesh.kvstore.backend import Backend
from sealmesh.kvstore.metrics import KVStoreMetrics
from sealmesh.kvstore.service import KVStoreService
from sealmesh.kvstore.settings import KVStoreSettings
from sealmesh.protos.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from sealmesh.security.tls import RoleAuthorizer, TlsFiles, server_credentials
from sealmesh.telemetry.runtime.server import ServerSpec, serve
from sealmesh.telemetry.runtime.settings import load_settings
from sealmesh.telemetry.telemetry import Telemetry

_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KVStoreService"].full_name

#: Who may call what; see the contract.
ROLES = {
    f"/{_SERVICE}/LookupPrefix": ("worker",),
    f"/{_SERVICE}/GetBlocks": ("worker",),
    f"/{_SERVICE}/PutBlocks": ("worker",),
    f"/{_SERVICE}/DeleteTenant": ("gateway", "operator"),
    f"/{_SERVICE}/GetStats": ("operator", "worker", "gateway"),
    f"/{_SERVICE}/CreateCheckpoint": ("operator",),
    f"/{_SERVICE}/RestoreCheckpoint": ("operator",),
}


def build(settings: KVStoreSettings, telemetry: Telemetry) -> ServerSpec:
    """The service as settings ask for, not started yet."""
    metrics = KVStoreMetrics(telemetry.metrics)
    backend = Backend(settings, telemetry.tracing, metrics, telemetry.log)
    # The generated base answers UNIMPLEMENTED for the checkpoint RPCs; only its type stub is abstract.
    service = KVStoreService(  # type: ignore[abstract]
        backend.store,
        metrics,
        max_value_bytes=settings.max_value_bytes,
        lookup_timeout_s=settings.lookup_timeout_ms / 1e3,
    )

    def register(server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server(service, server)

    files = TlsFiles.from_settings(settings)
    return ServerSpec(
        settings=settings,
        telemetry=telemetry,
        service_names=[_SERVICE],
        register=register,
        authorize=RoleAuthorizer(ROLES),
        credentials=server_credentials(files) if files else None,
        components=[backend],
        ready=backend.ready,
    )


def main() -> int:
    """Runs the service until SIGTERM; the exit code says how it ended."""
    settings = load_settings(KVStoreSettings, "kvstore")
    return asyncio.run(serve(build(settings, Telemetry.build("kvstore", settings))))


if __name__ == "__main__":
    sys.exit(main())
