"""Runs a supervisor as a process of its own, for tests that signal or kill it.

Arguments: state folder, then per service a JSON object with the fields of `Stand`. Prints `ready` once
everything is, and the failure when there was one.
"""

import asyncio
import json
import sys
from pathlib import Path

from sealmesh.deploy.local.service import Service
from sealmesh.deploy.local.specs import ProbePolicy, ServiceSpec
from sealmesh.deploy.local.state import StateFolder
from sealmesh.deploy.local.supervisor import MeshPlan, Supervisor

STAND_IN = Path(__file__).with_name("stand_in_service.py")


class Printer:
    def service_changed(self, service: Service, message: str) -> None:
        print(f"{service.spec.name}: {message}", flush=True)

    def log_line(self, service: str, line: str) -> None:
        print(f"{service} | {line}", flush=True)

    def mesh_ready(self, elapsed_s: float) -> None:
        print("ready", flush=True)

    def stopping(self, reason: str) -> None:
        print(f"stopping: {reason}", flush=True)


def main() -> int:
    state = StateFolder(Path(sys.argv[1]))
    state.create()
    specs: list[ServiceSpec] = []
    for stage, argument in enumerate(sys.argv[2:]):
        service = json.loads(argument)
        url = f"http://127.0.0.1:{service['port']}"
        flags = ["--name", service["name"], "--port", str(service["port"]), *service["flags"]]
        specs.append(
            ServiceSpec(
                name=service["name"],
                command=(sys.executable, "-S", str(STAND_IN), *flags),
                stage=stage,
                ready_url=f"{url}/readyz",
                live_url=f"{url}/healthz",
                address=url,
                stop_grace_s=service.get("stop_grace_s", 5.0),
                leftover_grace_s=0.1,
                probe=ProbePolicy(interval_s=0.05),
            )
        )
    plan = MeshPlan(tuple(specs), model="none", gateway_url="http://127.0.0.1:1")
    failure = asyncio.run(Supervisor(state, plan, Printer(), leftover_grace_s=0.5).run())
    if failure is not None:
        print(failure, flush=True)
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
