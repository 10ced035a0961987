"""`python -m sealmesh.inference`: an inference worker as a process."""

from __future__ import annotations

import asyncio
import sys

from sealmesh.inference.settings import WorkerSettings
from sealmesh.inference.worker import worker_spec
from sealmesh.telemetry.runtime.server import serve
from sealmesh.telemetry.runtime.settings import load_settings
from sealmesh.telemetry.telemetry import Telemetry


def main() -> int:
    """Runs the worker until SIGTERM; the exit code says how it ended."""
    settings = load_settings(WorkerSettings, "worker")
    return asyncio.run(serve(worker_spec(settings, Telemetry.build("worker", settings))))


# The guard matters: engine processes are started by `spawn`, which imports this module again.
if __name__ == "__main__":
    sys.exit(main())
