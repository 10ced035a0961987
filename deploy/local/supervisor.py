"""Runs a mesh on one machine: ordered start, watching, ordered stop, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import ParamSpec, Protocol

import httpx
from sealmesh.deploy.local.processes import ProcessIdentity, end_family
from sealmesh.deploy.local.record import MeshLock, MeshRecord, ServiceRecord, read_record
from sealmesh.deploy.local.service import Service, ServiceState
from sealmesh.deploy.local.service_log import ServiceLog
from sealmesh.deploy.local.specs import ServiceSpec
from sealmesh.deploy.local.state import StateFolder

_LEFTOVER_GRACE_S = 5.0
_Event = ParamSpec("_Event")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class MeshState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class Listener(Protocol):
    """Is told what happens. Called from the event loop: return quickly and raise nothing."""

    def service_changed(self, service: Service, message: str) -> None: ...

    def log_line(self, service: str, line: str) -> None: ...

    def mesh_ready(self, elapsed_s: float) -> None: ...

    def stopping(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Failure:
    """Why a mesh ended that nobody stopped."""

    service: str
    reason: str
    tail: tuple[str, ...]
    """The last lines that the service wrote, oldest first."""

    exit_code: int | None = None
    """Of the service's last process; None when it was not its end that counted."""


@dataclass(frozen=True)
class MeshPlan:
    """What a supervisor runs."""

    services: tuple[ServiceSpec, ...]
    model: str
    gateway_url: str


class AlreadyRunsError(Exception):
    """Another supervisor holds this state folder."""


class Supervisor:
    """Runs one mesh in the calling thread's event loop, which must be the main thread's.

    `run` returns None after an ordered stop and the `Failure` otherwise. Should the supervisor be killed,
    its services have `leftover_grace_s` seconds to end before they are killed as well.
    """

    def __init__(
        self,
        state: StateFolder,
        plan: MeshPlan,
        listener: Listener,
        *,
        leftover_grace_s: float = _LEFTOVER_GRACE_S,
    ) -> None:
        self._state = state
        self._plan = plan
        self._listener = listener
        self._leftover_grace_s = leftover_grace_s
        self._mesh_id = secrets.token_hex(8)
        self._mesh_state = MeshState.STARTING
        self._started_at = 0.0
        self._ready_after_s: float | None = None
        self._services: list[Service] = []
        self._wake = asyncio.Event()
        self._stop_reason = ""
        self._interrupts = 0

    async def run(self) -> Failure | None:
        """Raises AlreadyRunsError when this state folder is in use, OSError when it cannot be written."""
        lock = MeshLock(self._state.lock_file)
        if not lock.acquire():
            raise AlreadyRunsError(describe_running(self._state))
        try:
            await asyncio.to_thread(self._end_leftovers)
            return await self._run_locked()
        finally:
            lock.release()

    def stop(self, reason: str) -> None:
        """Asks for an ordered stop; a second call ends all waiting."""
        self._interrupts += 1
        if self._interrupts > 1:
            for service in self._services:
                service.force_stop()
        self._stop_reason = self._stop_reason or reason
        self._wake.set()

    def _end_leftovers(self) -> None:
        """Ends what a killed supervisor of this state left; its keeper normally has done so."""
        try:
            old = read_record(self._state.mesh_record)
        except ValueError:
            return  # of another release or damaged; it is replaced
        if old is not None:
            end_family(old.mesh_id, sessions=old.sessions(), grace_s=self._leftover_grace_s)

    async def _run_locked(self) -> Failure | None:
        self._started_at = time.time()
        keeper = self._start_keeper()
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        tasks: dict[Service, asyncio.Task[None]] = {}
        try:
            # Probes go to loopback: no proxy from the environment.
            async with httpx.AsyncClient(trust_env=False, follow_redirects=False) as client:
                self._services = [self._service(spec, client) for spec in self._plan.services]
                try:
                    return await self._start_and_watch(tasks)
                finally:
                    await self._stop_services(tasks)
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
            self._state.mesh_record.unlink(missing_ok=True)
            await asyncio.to_thread(self._stop_keeper, keeper)

    def _service(self, spec: ServiceSpec, client: httpx.AsyncClient) -> Service:
        log = ServiceLog(
            self._state.log_of(spec.name), lambda line: self._tell(self._listener.log_line, spec.name, line)
        )
        return Service(spec, mesh_id=self._mesh_id, log=log, client=client, on_change=self._changed)

    async def _start_and_watch(self, tasks: dict[Service, asyncio.Task[None]]) -> Failure | None:
        for stage in stages(self._services):
            for service in stage:
                tasks[service] = asyncio.create_task(service.run(), name=service.spec.name)
                tasks[service].add_done_callback(lambda _: self._wake.set())
            # While the mesh starts, a service that was given up is always a failure: someone is there to
            # read the reason.
            while not all(service.state is ServiceState.READY for service in stage):
                if failure := self._failure(tasks, essential_only=False):
                    return failure
                if self._interrupts:
                    return None
                await self._woken()
        self._ready_after_s = time.time() - self._started_at
        self._mesh_state = MeshState.READY
        self._write_record()
        self._tell(self._listener.mesh_ready, self._ready_after_s)
        while not self._interrupts:
            if failure := self._failure(tasks, essential_only=True):
                return failure
            await self._woken()
        return None

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def _failure(self, tasks: dict[Service, asyncio.Task[None]], *, essential_only: bool) -> Failure | None:
        for service, task in tasks.items():
            if task.done() and (error := task.exception()) is not None:
                return Failure(service.spec.name, f"{type(error).__name__}: {error}", tuple(service.tail))
            if service.state is ServiceState.FAILED and (service.spec.essential or not essential_only):
                return Failure(
                    service.spec.name, service.last_failure, tuple(service.tail), service.last_exit_code
                )
        return None

    async def _stop_services(self, tasks: dict[Service, asyncio.Task[None]]) -> None:
        self._mesh_state = MeshState.STOPPING
        self._tell(self._listener.stopping, self._stop_reason or "a service failed")
        self._write_record()
        for stage in reversed(stages(self._services)):
            for service in stage:
                service.request_stop()
            started = [service for service in stage if service in tasks]
            results = await asyncio.gather(*(tasks[service] for service in started), return_exceptions=True)
            for service, result in zip(started, results, strict=True):
                if result is not None:
                    line = f"ERROR {type(result).__name__}: {result}"
                    self._tell(self._listener.log_line, service.spec.name, line)

    def _changed(self, service: Service, message: str) -> None:
        self._write_record()
        self._tell(self._listener.service_changed, service, message)
        self._wake.set()

    def _tell(self, listener: Callable[_Event, None], *event: _Event.args, **named: _Event.kwargs) -> None:
        # The terminal may be gone (closed window, reader of a pipe): no reason to drop the mesh unordered.
        with contextlib.suppress(OSError):
            listener(*event, **named)

    def _write_record(self) -> None:
        own = ProcessIdentity.of(os.getpid())
        if own is None:
            raise RuntimeError("the supervisor cannot find itself among the processes")
        MeshRecord(
            mesh_id=self._mesh_id,
            state=self._mesh_state.value,
            supervisor_pid=own.pid,
            supervisor_start_time=own.start_time,
            started_at=self._started_at,
            ready_after_s=self._ready_after_s,
            model=self._plan.model,
            gateway_url=self._plan.gateway_url,
            services=tuple(map(_service_record, self._services)),
        ).write(self._state.mesh_record)

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        arguments = (self._mesh_id, str(self._state.mesh_record), str(self._leftover_grace_s))
        return subprocess.Popen(
            [sys.executable, "-m", "sealmesh.deploy.local.keeper", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _stop_keeper(self, keeper: subprocess.Popen[bytes]) -> None:
        if keeper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
        try:
            keeper.wait(self._leftover_grace_s + 5)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()


def stages(services: Sequence[Service]) -> list[list[Service]]:
    """The services by stage, in order of start."""
    ordered = sorted(services, key=lambda service: service.spec.stage)
    return [list(group) for _, group in groupby(ordered, key=lambda service: service.spec.stage)]


def describe_running(state: StateFolder) -> str:
    """One line about the mesh that runs on this state folder."""
    try:
        record = read_record(state.mesh_record)
    except ValueError:
        record = None
    if record is None:
        return f"a mesh is being started or stopped in {state.root}"
    return f"a mesh runs already in {state.root}: {record.gateway_url} (pid {record.supervisor_pid})"


def _service_record(service: Service) -> ServiceRecord:
    identity = service.identity
    return ServiceRecord(
        name=service.spec.name,
        state=service.state.value,
        pid=identity.pid if identity else None,
        start_time=identity.start_time if identity else None,
        address=service.spec.address,
        http_address=service.spec.http_address,
        ready_url=service.spec.ready_url,
        restarts=service.restarts,
        last_failure=service.last_failure,
    )
