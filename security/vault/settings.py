"""Settings of the vault: section [vault]."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from sealmesh.telemetry.runtime.settings import ServiceSettings


class VaultSettings(ServiceSettings):
    """Vault: serves sealed models and releases their keys to workers that are allowed to have them."""

    grpc_address: str = Field("127.0.0.1:9101", description="host:port of the gRPC server")
    http_address: str = Field("127.0.0.1:9201", description="host:port of /healthz, /readyz and /metrics")
    models_dir: Path = Field(Path("models"), description="folder whose subfolders are sealed models")
    state_dir: Path = Field(Path("vault"), description="folder for wrapped tenant keys and the audit log")
    root_key_file: Path | None = Field(None, description="root key that opens the models' key-file slots")
    passphrase_file: Path | None = Field(
        None, description="private file with the passphrase of the models' slots, instead of a root key"
    )
    verifying_key_file: Path | None = Field(
        None, description="public key (PEM) that must have signed every model; required"
    )
    allow: dict[str, list[str]] = Field(
        default_factory=dict,
        description=(
            "who gets which key: model name, or tenant:HANDLE, or tenant:*, to identities such as "
            "worker/worker-0 or worker/*; what is not listed is denied"
        ),
    )
    lease_lifetime_ms: int = Field(
        600_000,
        ge=1_000,
        le=86_400_000,
        description="how long an opened model may be read and its key fetched",
    )
    max_leases: int = Field(1_024, ge=1, le=1_000_000, description="most open leases at once")
