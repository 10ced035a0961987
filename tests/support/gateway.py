"""A gateway in the test's own process, on real sockets, in front of given workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sealmesh.gateway.access.keys import add_api_key
from sealmesh.gateway.access.tenants import create_secret_file
from sealmesh.gateway.gateway import Gateway
from sealmesh.gateway.privacy import PrivacyFilter
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.telemetry.runtime.server import ServiceServer
from sealmesh.telemetry.telemetry import Telemetry


@dataclass(frozen=True)
class RunningGateway:
    """Where it listens, and a key that it accepts."""

    http: str
    grpc: str
    key: str
    gateway: Gateway
    telemetry: Telemetry
    keys_file: Path

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.http}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """Authorization of `key`."""
        return {"authorization": f"Bearer {self.key}"}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The same for gRPC."""
        return (("authorization", f"Bearer {self.key}"),)


@asynccontextmanager
async def run_gateway(
    folder: Path,
    workers: Sequence[str],
    *,
    wait_ready: bool = True,
    privacy: PrivacyFilter | None = None,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """Start a gateway with fresh keys under `folder`; `settings` override those of GatewaySettings."""
    keys_file, secret_file = folder / "keys.toml", folder / "gateway.secret"
    key = add_api_key(keys_file, "acme")
    create_secret_file(secret_file)
    values: dict[str, Any] = {
        "grpc_address": "127.0.0.1:0",
        "http_address": "127.0.0.1:0",
        "workers": tuple(workers),
        "access_keys_file": keys_file,
        "secret_file": secret_file,
        "drain_grace_ms": 1000,
    }
    configured = GatewaySettings(**(values | settings))
    telemetry = Telemetry.build("gateway", configured)
    gateway = Gateway(configured, telemetry, privacy=privacy)
    scheme = "http" if configured.front_tls_certificate is None else "https"
    async with ServiceServer(gateway.spec()) as server:
        if wait_ready:
            await gateway.pool.wait_ready()
        yield RunningGateway(
            f"{scheme}://{server.http_address}", server.grpc_address, key, gateway, telemetry, keys_file
        )
    await telemetry.close()
