"""`python -m sealmesh.gateway --config FILE`: the gateway's process."""

from __future__ import annotations

import sys

import uvloop
from sealmesh.gateway.gateway import Gateway
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import serve
from sealmesh.telemetry.runtime.settings import EXIT_USAGE, load_settings
from sealmesh.telemetry.telemetry import Telemetry


async def _run(settings: GatewaySettings) -> int:
    telemetry = Telemetry.build("gateway", settings)
    try:
        spec = Gateway(settings, telemetry).spec()
    except SealmeshError as error:
        telemetry.log.error(error.message, reason=error.reason)  # noqa: TRY400  # one line, no traceback
        await telemetry.close()
        return EXIT_USAGE
    return await serve(spec)


def main() -> int:
    """Run until a signal; returns the exit code."""
    settings = load_settings(GatewaySettings, "gateway")
    return uvloop.run(_run(settings))


if __name__ == "__main__":
    sys.exit(main())
