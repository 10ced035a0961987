"""Process identities, and finding and ending every process that belongs to a mesh.

A service may start processes of its own (vLLM's EngineCore, a daemonised Redis in another session), so a
process group is not enough. Two things tell its family, and either does: the session that each service
leads, which everything stays in that does not leave on purpose; and a mark in its environment,
`SEALMESH_SUPERVISED=<mesh id>/<service>`, which is inherited by what does leave. (The mark alone would not
do: programs that set their title, Redis and vLLM among them, write over the environment that others see.)
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


def family(
    mesh_id: str, service: str | None = None, sessions: Iterable[ProcessIdentity] = ()
) -> list[psutil.Process]:
    """Living processes of a mesh, or of one of its services: with the mark, or in one of the sessions.

    Args:
        mesh_id: of the mark.
        service: of the mark; None for all.
        sessions: the processes that lead the sessions, alive or not.

    Processes of other users are not looked into: this user cannot have started them.
    """
    own_sessions = {leader.pid for leader in sessions if not _replaced(leader)}
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) in own_sessions or _has_mark(process, mesh_id, service):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def _has_mark(process: psutil.Process, mesh_id: str, service: str | None) -> bool:
    mesh, _, name = process.environ().get(MARK_VARIABLE, "").partition("/")
    return mesh == mesh_id and service in (None, name)


def _replaced(leader: ProcessIdentity) -> bool:
    """Whether another process has the id of a session's leader by now: then the session is another's too."""
    now = ProcessIdentity.of(leader.pid)
    return now is not None and abs(now.start_time - leader.start_time) >= 1.0


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def end_family(
    mesh_id: str,
    service: str | None = None,
    sessions: Iterable[ProcessIdentity] = (),
    *,
    grace_s: float = 0.0,
    terminate: bool = True,
) -> list[int]:
    """Ends every process that `family` finds: SIGTERM, up to `grace_s` seconds, then SIGKILL. Blocks.

    With `terminate` unset nobody is asked: the processes have `grace_s` seconds to end by themselves.
    Returns the ids of the processes that were found.
    """
    leaders = list(sessions)
    processes = family(mesh_id, service, leaders)
    found = [process.pid for process in processes]
    if grace_s > 0 and processes:
        if terminate:
            signal_all(processes, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and (processes := family(mesh_id, service, leaders)):
            time.sleep(_POLL_S)
    # A process may be forking while we look: look again until none is left.
    for _ in range(100):
        processes = family(mesh_id, service, leaders)
        if not processes:
            break
        signal_all(processes, signal.SIGKILL)
        time.sleep(_POLL_S)
    return found
