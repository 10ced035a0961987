"""Settings of the gateway."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator
from sealmesh.gateway.fields import MAX_CHOICES
from sealmesh.telemetry.runtime.settings import ServiceSettings

__all__ = ["GatewaySettings", "is_loopback"]

_MIB: Final = 1024 * 1024


class GatewaySettings(ServiceSettings):
    """The gateway: OpenAI, REST and gRPC for callers, one filter chain, workers behind.

    `tls_*` are the files of the inner (mutual TLS) side; `front_tls_*` those of the side that callers see.
    """

    grpc_address: str = Field("127.0.0.1:9090", description="host:port of the public gRPC server")
    http_address: str = Field(
        "127.0.0.1:8080", description="host:port of /v1, /api/v1, /healthz, /readyz and /metrics"
    )
    workers: tuple[str, ...] = Field(
        ("127.0.0.1:9111",), min_length=1, description="host:port of each worker"
    )
    access_keys_file: Path = Field(
        Path("access/keys.toml"), description="TOML file with the digests of API keys"
    )
    secret_file: Path = Field(
        Path("keys/gateway.secret"),
        description="file with the 32-byte secret (hex) that tenants are derived from",
    )
    max_body_bytes: int = Field(
        8 * _MIB, ge=1024, le=1024 * _MIB, description="largest HTTP request body, in bytes"
    )
    body_timeout_ms: int = Field(
        30_000, ge=100, le=600_000, description="how long a caller may take to send a body, in milliseconds"
    )
    request_timeout_ms: int = Field(
        600_000, ge=100, le=86_400_000, description="longest time for one answer, in milliseconds"
    )
    pii_timeout_ms: int = Field(
        5_000,
        ge=10,
        le=60_000,
        description="longest time of the privacy filter for one request, in milliseconds",
    )
    max_choices: int = Field(
        MAX_CHOICES, ge=1, le=1024, description="most answers to one request (n); more is refused"
    )
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="HTTP connections and requests at once; beyond it callers get 503",
    )
    keep_alive_ms: int = Field(
        30_000, ge=0, le=3_600_000, description="how long an idle HTTP connection is kept, in milliseconds"
    )
    front_tls_certificate: Path | None = Field(None, description="PEM certificate chain that callers see")
    front_tls_key: Path | None = Field(None, description="PEM private key of front_tls_certificate")
    insecure_front: bool = Field(
        False, description="listen without TLS on an address other than loopback (behind a TLS proxy)"
    )

    @model_validator(mode="after")
    def _front_is_safe(self) -> Self:
        if (self.front_tls_certificate is None) != (self.front_tls_key is None):
            raise ValueError("front_tls_certificate and front_tls_key must be set together")
        if self.front_tls_certificate is None and not self.insecure_front:
            for name in ("http_address", "grpc_address"):
                address: str = getattr(self, name)
                if not is_loopback(address):
                    raise ValueError(
                        f"{name} {address} is not loopback and has no TLS: set front_tls_certificate and "
                        "front_tls_key, or insecure_front=true when a TLS proxy stands before it"
                    )
        return self


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
