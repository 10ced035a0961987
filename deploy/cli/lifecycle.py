"""`sealmesh down` and `sealmesh status`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from sealmesh.deploy.local.record import MeshRecord
    from sealmesh.deploy.local.state import StateFolder

DOWN_EPILOG = """
Examples:\n
  sealmesh down             stop in order, letting running requests finish\n
  sealmesh down --force     stop at once\n
"""
STATUS_EPILOG = """
Examples:\n
  sealmesh status\n
  sealmesh status --json | jq -r .gateway_url\n
"""

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 3.0
_FORCE_GRACE_S = 5.0


def down(
    force: Annotated[bool, typer.Option("--force", help="Do not wait for running requests.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait before it is an error.")] = 120.0,
    state_dir: StateOption = None,
) -> None:
    """Stop the mesh of this state folder, in reverse order, and leave no process.

    Exit codes: 0 stopped or nothing ran, 1 it still runs after the timeout.
    """
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    state = find_state(state_dir)
    record = _read(state)
    if record is None:
        terminal.note(f"No mesh runs in {state.root}.")
        return
    with terminal.progress(), terminal.step("Stopping the mesh"):
        stop(state, record, force=force, timeout_s=timeout)


def stop(state: StateFolder, record: MeshRecord, *, force: bool = False, timeout_s: float = 120.0) -> None:
    """Stops a mesh; a supervisor that is gone already is cleaned up after.

    Raises CommandError when it still runs after `timeout_s` seconds.
    """
    import os
    import signal

    from sealmesh.deploy.local.processes import end_family
    from sealmesh.deploy.local.record import lock_is_held

    if record.supervisor.is_alive():
        os.kill(record.supervisor_pid, signal.SIGTERM)
        if force:
            # A second signal ends the supervisor's patience.
            os.kill(record.supervisor_pid, signal.SIGINT)
    deadline = time.monotonic() + timeout_s
    while record.supervisor.is_alive() or lock_is_held(state.lock_file):
        if time.monotonic() > deadline:
            raise CommandError(
                f"the mesh still runs {timeout_s:.0f} s after it was asked to stop "
                f"(pid {record.supervisor_pid}); `sealmesh down --force` does not wait"
            )
        time.sleep(_POLL_S)
    end_family(record.mesh_id, sessions=record.sessions(), grace_s=0.0 if force else _FORCE_GRACE_S)
    state.mesh_record.unlink(missing_ok=True)


def status(state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """Show what runs, where, and whether it is ready.

    Exit codes: 0 everything is ready, 1 it is not or nothing runs.
    """
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    state = find_state(state_dir)
    record = _read(state)
    if record is None or not record.supervisor.is_alive():
        if as_json:
            terminal.json({"state": str(state.root), "running": False, "ready": False, "services": []})
        elif record is None:
            terminal.note(f"No mesh runs in {state.root}; `sealmesh up` starts one.")
        else:
            terminal.warn(
                f"the supervisor (pid {record.supervisor_pid}) is gone; `sealmesh down` clears what it left"
            )
        raise typer.Exit(Exit.FAILED)
    services: list[dict[str, object]] = [
        {
            "name": service.name,
            "state": service.state,
            "ready": service.state == "ready" and _answers(service.ready_url),
            "pid": service.pid,
            "address": service.address,
            "http_address": service.http_address,
            "restarts": service.restarts,
            "last_failure": service.last_failure,
        }
        for service in record.services
    ]
    ready = record.state == "ready" and all(service["ready"] for service in services)
    if as_json:
        terminal.json(
            {
                "state": str(state.root),
                "running": True,
                "ready": ready,
                "mesh": record.state,
                "supervisor_pid": record.supervisor_pid,
                "uptime_s": round(time.time() - record.started_at, 1),
                "gateway_url": record.gateway_url,
                "model": record.model,
                "services": services,
            }
        )
    else:
        _show(terminal, record, services)
    if not ready:
        raise typer.Exit(Exit.FAILED)


def _show(terminal: Terminal, record: MeshRecord, services: list[dict[str, object]]) -> None:
    table = plain_table("Service", "State", "Address", "Process", "Restarts", "Last failure")
    for service in services:
        state = str(service["state"])
        shown = (
            "[green]ready[/]"
            if service["ready"]
            else f"[yellow]{'not ready' if state == 'ready' else state}[/]"
        )
        cells = (service["address"], service["pid"] or "", service["restarts"], service["last_failure"])
        table.add_row(str(service["name"]), shown, *(escape(str(cell)) for cell in cells))
    terminal.out.print(table)
    terminal.out.print(
        f"{record.gateway_url}/v1 serves {escape(record.model)}, "
        f"up for {time.time() - record.started_at:.0f} s"
    )


def _read(state: StateFolder) -> MeshRecord | None:
    from sealmesh.deploy.local.record import read_record

    try:
        return read_record(state.mesh_record)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=_PROBE_TIMEOUT_S, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False  # what status reports
