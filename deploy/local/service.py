"""One supervised service: start, watch, restart with backoff, give up, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import httpx
from sealmesh.deploy.local.processes import (
    MARK_VARIABLE,
    ProcessIdentity,
    end_family,
    mark,
)
from sealmesh.deploy.local.service_log import ServiceLog
from sealmesh.deploy.local.specs import ServiceSpec

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_FROZEN_GRACE_S = 2.0
_STARTUP_INTERVAL_S = 0.2
_READ_BYTES = 65536


class ServiceState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Service:
    """Keeps one service running until it is stopped or given up.

    `run` is the whole life. Start it from the thread that stays until the end: the kernel ties the
    children to it.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        mesh_id: str,
        log: ServiceLog,
        client: httpx.AsyncClient,
        on_change: Callable[[Service, str], None],
    ) -> None:
        self.spec = spec
        self.state = ServiceState.WAITING
        self.identity: ProcessIdentity | None = None
        self.restarts = 0
        self.last_failure = ""
        self.last_exit_code: int | None = None
        self.ready_after_s: float | None = None
        self._mesh_id = mesh_id
        self._log = log
        self._client = client
        self._on_change = on_change
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._ready_since: float | None = None

    @property
    def tail(self) -> list[str]:
        """The last lines that the service wrote."""
        return list(self._log.tail)

    def request_stop(self) -> None:
        self._stop.set()

    def force_stop(self) -> None:
        """Ends the grace of a stop at once."""
        self._stop.set()
        self._force.set()

    async def run(self) -> None:
        """Returns when the service is stopped or given up; `state` says which.

        Raises OSError when the log file cannot be written.
        """
        self._log.open()
        try:
            await self._keep_running()
        finally:
            self._log.close()

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stop.is_set():
            self._change(ServiceState.STARTING, "restarting" if failures or self.restarts else "starting")
            self._ready_since = None
            failure, final = await self._run_once()
            if self._stop.is_set():
                break
            stable = (
                self._ready_since is not None
                and time.monotonic() - self._ready_since >= self.spec.restart.stable_s
            )
            failures = 1 if stable else failures + 1
            self.last_failure = failure
            restart = self.spec.restart
            limit = restart.max_first_failures if self.ready_after_s is None else restart.max_quick_failures
            if final or failures >= limit:
                count = "" if failures == 1 else f", {failures} times in a row"
                self._change(ServiceState.FAILED, f"given up: {failure}{count}")
                return
            wait_s = self.spec.restart.backoff_s(failures)
            self.restarts += 1
            self._change(ServiceState.RESTARTING, f"{failure}; restart in {wait_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)
        self._change(ServiceState.STOPPED, "stopped")

    async def _run_once(self) -> tuple[str, bool]:
        """One life of the process: why it ended, and whether another start is pointless."""
        started = time.monotonic()
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                # A pipe of our own: grandchildren may hold it open, and waiting for the process must not
                # wait for them.
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env={
                    **os.environ,
                    **self.spec.environment,
                    MARK_VARIABLE: mark(self._mesh_id, self.spec.name),
                },
                cwd=self.spec.working_folder,
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_end)
            return f"cannot be started: {error}", True
        finally:
            os.close(write_end)
        self.identity = ProcessIdentity.of(process.pid)
        self._log.note(f"started, pid {process.pid}")
        pump = asyncio.create_task(self._pump(read_end), name=f"log {self.spec.name}")
        exited = asyncio.create_task(process.wait(), name=f"wait {self.spec.name}")
        try:
            failure, final = await self._watch(exited, started)
            self._log.note(failure)
            return failure, final
        finally:
            await self._end(process, exited)
            self.identity = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pump, 2.0)

    def _command(self) -> list[str]:
        return [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *self.spec.command]

    async def _watch(self, exited: asyncio.Task[int], started: float) -> tuple[str, bool]:
        probe = self.spec.probe
        stop = asyncio.create_task(self._stop.wait())
        try:
            problem = "no answer yet"
            while True:
                await asyncio.wait(
                    {exited, stop},
                    timeout=min(probe.interval_s, _STARTUP_INTERVAL_S),
                    return_when="FIRST_COMPLETED",
                )
                if stop.done():
                    return "stopped", False
                if exited.done():
                    return self._describe_exit(exited.result())
                problem = await self._probe(self.spec.ready_url)
                if not problem:
                    break
                if time.monotonic() - started > probe.startup_timeout_s:
                    return f"not ready within {probe.startup_timeout_s:.0f} s ({problem})", False
            self._ready_since = time.monotonic()
            self.ready_after_s = self._ready_since - started
            self._change(ServiceState.READY, f"ready after {self.ready_after_s:.1f} s")
            failed = 0
            while True:
                await asyncio.wait({exited, stop}, timeout=probe.interval_s, return_when="FIRST_COMPLETED")
                if stop.done():
                    return "stopped", False
                if exited.done():
                    return self._describe_exit(exited.result())
                problem = await self._probe(self.spec.live_url)
                failed = failed + 1 if problem else 0
                if failed >= probe.failures:
                    return f"{failed} health checks in a row failed ({problem})", False
        finally:
            stop.cancel()

    def _describe_exit(self, code: int) -> tuple[str, bool]:
        self.last_exit_code = code
        if code < 0:
            return f"killed by {signal.Signals(-code).name}", False
        return f"exited with code {code}", code in self.spec.restart.final_exit_codes

    async def _probe(self, url: str) -> str:
        """Empty when the answer was 200, else what was wrong."""
        try:
            response = await self._client.get(url, timeout=self.spec.probe.timeout_s)
        except httpx.HTTPError as error:
            return f"{url}: {str(error) or type(error).__name__}"
        if response.status_code != httpx.codes.OK:
            return f"{url}: HTTP {response.status_code} {response.text[:200].strip()}".rstrip()
        return ""

    async def _pump(self, read_end: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            try:
                while data := await reader.read(_READ_BYTES):
                    self._log.feed(data)
            finally:
                transport.close()

    async def _end(self, process: asyncio.subprocess.Process, exited: asyncio.Task[int]) -> None:
        """Leaves nothing of this life: the process, its group, and whatever else it started.

        SIGTERM goes to the process alone, because it must drain before its own children go.
        """
        if not exited.done():
            wanted = self._stop.is_set()
            if wanted:
                self._change(ServiceState.STOPPING, "stopping")
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            force = asyncio.create_task(self._force.wait())
            grace_s = self.spec.stop_grace_s if wanted else min(_FROZEN_GRACE_S, self.spec.stop_grace_s)
            await asyncio.wait({exited, force}, timeout=grace_s, return_when="FIRST_COMPLETED")
            force.cancel()
            if not exited.done() and wanted and not self._force.is_set():
                self._log.note(f"still running {grace_s:.0f} s after SIGTERM: killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await exited
        # What it started ends by itself once it is gone, if it is any good: Redis has data to write.
        grace_s = 0.0 if self._force.is_set() else self.spec.leftover_grace_s
        sessions = [] if self.identity is None else [self.identity]
        await asyncio.to_thread(
            end_family, self._mesh_id, self.spec.name, sessions, grace_s=grace_s, terminate=False
        )

    def _change(self, state: ServiceState, message: str) -> None:
        self.state = state
        self._on_change(self, message)
