"""`python -m sealmesh.inference`: an inference worker as a process."""

from __future__ import annotations

import asyncio
import os
import resource
import sys

from sealmesh.inference.settings import WorkerSettings
from sealmesh.inference.worker import worker_spec
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import serve
from sealmesh.telemetry.runtime.settings import EXIT_USAGE, load_settings
from sealmesh.telemetry.telemetry import Telemetry


def main() -> int:
    """Runs the worker until SIGTERM; the exit code says how it ended."""
    # A core dump of this process or of the engine's, which inherit this, would hold opened weights.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = load_settings(WorkerSettings, "worker")
    telemetry = Telemetry.build("worker", settings)
    try:
        spec = worker_spec(settings, telemetry)
    except SealmeshError as exc:
        # What a person must act on is one line; a traceback would bury it.
        telemetry.log.error(exc.message, reason=exc.reason)  # noqa: TRY400
        return EXIT_USAGE
    return asyncio.run(serve(spec))


# The guard matters: engine processes are started by `spawn`, which imports this module again.
if __name__ == "__main__":
    code = main()
    # Everything is closed by now; the interpreter would take seconds more to free torch's modules.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
