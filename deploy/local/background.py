"""The supervisor of a detached mesh: `python -m sealmesh.deploy.local.background STATE_FOLDER`.

Reads `run/mesh.toml`, which `sealmesh up --detach` has written, and says on standard output what happens.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from pathlib import Path

from sealmesh.deploy.local.mesh_config import plan_mesh, read_mesh_config
from sealmesh.deploy.local.service import Service
from sealmesh.deploy.local.state import StateFolder
from sealmesh.deploy.local.supervisor import AlreadyRunsError, Failure, Supervisor
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import EXIT_REFUSED
from sealmesh.telemetry.runtime.settings import EXIT_USAGE


class _PlainListener:
    """Prints the life of the mesh; the services' own lines are in their log files."""

    def service_changed(self, service: Service, message: str) -> None:
        _say(f"{service.spec.name}: {message}")

    def log_line(self, service: str, line: str) -> None:
        pass

    def mesh_ready(self, elapsed_s: float) -> None:
        _say(f"ready after {elapsed_s:.1f} s")

    def stopping(self, reason: str) -> None:
        _say(f"stopping: {reason}")


def _say(message: str) -> None:
    print(f"{datetime.now():%H:%M:%S.%f}"[:12], message, flush=True)


def describe_failure(failure: Failure, log: Path) -> str:
    """The reason, then the last lines of the service."""
    tail = "".join(f"\n  {failure.service} | {line}" for line in failure.tail)
    return f"{failure.service} was given up: {failure.reason}; its log: {log}{tail}"


def main() -> int:
    state = StateFolder(Path(sys.argv[1]))
    try:
        mesh, sections = read_mesh_config(state.mesh_config)
        failure = asyncio.run(Supervisor(state, plan_mesh(state, mesh, sections), _PlainListener()).run())
    except (AlreadyRunsError, SealmeshError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    if failure is not None:
        print(f"error: {describe_failure(failure, state.log_of(failure.service))}", flush=True)
        return failure.exit_code if failure.exit_code in (EXIT_USAGE, EXIT_REFUSED) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
