"""`python -m sealmesh.gateway --config FILE`: the gateway's process."""

from __future__ import annotations

import sys

import uvloop
from sealmesh.gateway.gateway import Gateway
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.telemetry.runtime.server import serve
from sealmesh.telemetry.runtime.settings import load_settings
from sealmesh.telemetry.telemetry import Telemetry


async def _run(settings: GatewaySettings) -> int:
    telemetry = Telemetry.build("gateway", settings)
    return await serve(Gateway(settings, telemetry).spec())


def main() -> int:
    """Run until a signal; returns the exit code."""
    settings = load_settings(GatewaySettings, "gateway")
    return uvloop.run(_run(settings))


if __name__ == "__main__":
    sys.exit(main())
