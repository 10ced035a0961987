"""`python -m sealmesh.security.vault`: the vault as a process."""

from __future__ import annotations

import asyncio
import resource
import sys

import grpc.aio
from sealmesh.protos.security.v1 import model_vault_pb2_grpc
from sealmesh.security.audit.sink import JsonLinesAuditSink
from sealmesh.security.errors import configuration_invalid
from sealmesh.security.tls import RoleAuthorizer, TlsFiles, server_credentials
from sealmesh.security.vault.core import Vault
from sealmesh.security.vault.service import ROLES, SERVICE, ModelVaultService
from sealmesh.security.vault.settings import VaultSettings
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import ServerSpec, serve
from sealmesh.telemetry.runtime.settings import EXIT_USAGE, load_settings
from sealmesh.telemetry.telemetry import Telemetry


def build(settings: VaultSettings, telemetry: Telemetry) -> ServerSpec:
    """The service as settings ask for, not started yet. Raises CONFIGURATION_INVALID without mTLS."""
    files = TlsFiles.from_settings(settings)
    if files is None:
        raise configuration_invalid(
            "the vault speaks mTLS only: set tls_ca, tls_certificate and tls_key in [vault]"
        )
    audit = JsonLinesAuditSink(settings.state_dir / "audit.jsonl", "vault")
    vault = Vault(settings, audit, telemetry.log)
    service = ModelVaultService(vault)

    def register(server: grpc.aio.Server) -> None:
        model_vault_pb2_grpc.add_ModelVaultServiceServicer_to_server(service, server)

    return ServerSpec(
        settings=settings,
        telemetry=telemetry,
        service_names=[SERVICE],
        register=register,
        authorize=RoleAuthorizer(ROLES),
        credentials=server_credentials(files),
        components=[audit, vault],
    )


def main() -> int:
    """Runs the vault until SIGTERM; the exit code says how it ended."""
    # A core dump of this process would hold root and data keys.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = load_settings(VaultSettings, "vault")
    telemetry = Telemetry.build("vault", settings)
    try:
        spec = build(settings, telemetry)
    except SealmeshError as exc:
        # What a person must act on is one line; a traceback would bury it.
        telemetry.log.error(exc.message, reason=exc.reason)  # noqa: TRY400
        return EXIT_USAGE
    return asyncio.run(serve(spec))


if __name__ == "__main__":
    sys.exit(main())
