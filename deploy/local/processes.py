"""Process identities, and finding and ending every process that belongs to a mesh.

A service may start processes of its own (vLLM's EngineCore, a daemonised Redis in another session), so a
process group is not enough. Every service therefore carries a mark in its environment,
`SEALMESH_SUPERVISED=<mesh id>/<service>`, which its descendants inherit however they are started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

MARK_VARIABLE = "SEALMESH_SUPERVISED"
_POLL_S = 0.02


@dataclass(frozen=True)
class ProcessIdentity:
    """A process id together with its start time, so that a reused id is not taken for the process."""

    pid: int
    start_time: float
    """Seconds since the epoch as the operating system gives it."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a living process, None when there is none of that id."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie counts as gone."""
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.start_time) < 1.0
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


def mark(mesh_id: str, service: str) -> str:
    return f"{mesh_id}/{service}"


def marked_processes(mesh_id: str, service: str | None = None) -> list[psutil.Process]:
    """Living processes that carry the mark of a mesh, or of one of its services.

    Processes of other users are not looked into: this user cannot have started them.
    """
    found: list[psutil.Process] = []
    own = os.getpid()
    for process in psutil.process_iter():
        if process.pid == own:
            continue
        try:
            value = process.environ().get(MARK_VARIABLE, "")
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
        except (psutil.Error, OSError):
            continue
        mesh, _, name = value.partition("/")
        if mesh == mesh_id and (service is None or name == service):
            found.append(process)
    return found


def signal_group(pid: int, number: int) -> None:
    """Sends a signal to the process group that `pid` leads; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def end_marked(
    mesh_id: str, service: str | None = None, *, grace_s: float = 0.0, terminate: bool = True
) -> list[int]:
    """Ends every marked process: SIGTERM, up to `grace_s` seconds, then SIGKILL. Blocks.

    With `terminate` unset nobody is asked: the processes have `grace_s` seconds to end by themselves.
    Returns the ids of the processes that were found.
    """
    processes = marked_processes(mesh_id, service)
    found = [process.pid for process in processes]
    if grace_s > 0 and processes:
        if terminate:
            signal_all(processes, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and (processes := marked_processes(mesh_id, service)):
            time.sleep(_POLL_S)
    # A process may be forking while we look: look again until none is left.
    for _ in range(100):
        processes = marked_processes(mesh_id, service)
        if not processes:
            break
        signal_all(processes, signal.SIGKILL)
        time.sleep(_POLL_S)
    return found
