"""The supervisor with real, tiny processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from sealmesh.deploy.local.processes import ProcessIdentity
from sealmesh.deploy.local.record import read_record
from sealmesh.deploy.local.service import Service
from sealmesh.deploy.local.specs import ProbePolicy, RestartPolicy, ServiceSpec
from sealmesh.deploy.local.state import StateFolder
from sealmesh.deploy.local.supervisor import AlreadyRunsError, Failure, MeshPlan, Supervisor

HERE = Path(__file__).parent
STAND_IN = HERE / "stand_in_service.py"
QUICK_PROBE = ProbePolicy(interval_s=0.03, timeout_s=0.5, failures=3, startup_timeout_s=10)
QUICK_RESTART = RestartPolicy(backoff_initial_s=0.02, max_quick_failures=3, max_first_failures=2)


@dataclass
class Recorder:
    """A listener whose events can be awaited."""

    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def _add(self, event: str) -> None:
        self.events.append(event)
        self.changed.set()

    def service_changed(self, service: Service, message: str) -> None:
        self._add(f"{service.spec.name} {service.state.value}: {message}")

    def log_line(self, service: str, line: str) -> None:
        self.lines.append(f"{service} | {line}")

    def mesh_ready(self, elapsed_s: float) -> None:
        self._add("mesh ready")

    def stopping(self, reason: str) -> None:
        self._add(f"mesh stopping: {reason}")

    async def wait_for(self, wanted: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(10):
            while not wanted(self.events):
                self.changed.clear()
                await self.changed.wait()

    def count(self, text: str) -> int:
        return sum(text in event for event in self.events)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def spec(name: str, stage: int, *flags: str) -> ServiceSpec:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    return ServiceSpec(
        name=name,
        command=(sys.executable, "-S", str(STAND_IN), "--name", name, "--port", str(port), *flags),
        stage=stage,
        ready_url=f"{url}/readyz",
        live_url=f"{url}/healthz",
        address=f"127.0.0.1:{port}",
        stop_grace_s=5,
        leftover_grace_s=0.1,
        probe=QUICK_PROBE,
        restart=QUICK_RESTART,
    )


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    folder.create()
    return folder


@dataclass
class Running:
    supervisor: Supervisor
    task: asyncio.Task[Failure | None]
    recorder: Recorder


@contextlib.asynccontextmanager
async def running(state: StateFolder, *specs: ServiceSpec) -> AsyncIterator[Running]:
    recorder = Recorder()
    supervisor = Supervisor(state, MeshPlan(specs, "demo", "http://127.0.0.1:1"), recorder)
    task = asyncio.create_task(supervisor.run())
    try:
        yield Running(supervisor, task, recorder)
    finally:
        supervisor.stop("the test is over")
        await asyncio.wait_for(task, 20)


async def until_ready(mesh: Running) -> None:
    ready = asyncio.create_task(mesh.recorder.wait_for(lambda events: "mesh ready" in events))
    await asyncio.wait({ready, mesh.task}, return_when="FIRST_COMPLETED")
    assert ready.done(), mesh.task.result()
    await ready


def pid_of(state: StateFolder, name: str) -> int:
    record = read_record(state.mesh_record)
    assert record is not None
    pid = {service.name: service.pid for service in record.services}[name]
    assert pid is not None
    return pid


async def test_starts_stage_by_stage_and_stops_in_reverse_order(state: StateFolder, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    names = ("vault", "kvstore", "worker", "gateway")
    specs = [spec(name, stage, "--journal", str(journal)) for stage, name in enumerate(names)]
    async with running(state, *reversed(specs)) as mesh:
        await until_ready(mesh)
        record = read_record(state.mesh_record)
        assert record is not None
        assert record.state == "ready"
        assert all(service.state == "ready" for service in record.services)
    assert mesh.task.result() is None
    assert journal.read_text().splitlines() == [
        *(f"start {name}" for name in names),
        *(f"stop {name}" for name in reversed(names)),
    ]
    assert not state.mesh_record.exists()
    assert "vault | vault listens" in mesh.recorder.lines
    assert "vault listens" in state.log_of("vault").read_text()
    assert state.log_of("vault").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("flags", [[], ["--nameless"]], ids=["left the session", "shows no environment"])
async def test_a_killed_service_comes_back_and_its_grandchild_goes(
    state: StateFolder, tmp_path: Path, flags: list[str]
) -> None:
    grandchild_file = tmp_path / "grandchild"
    async with running(state, spec("worker", 0, "--grandchild", str(grandchild_file), *flags)) as mesh:
        await until_ready(mesh)
        killed = pid_of(state, "worker")
        grandchild = ProcessIdentity.of(int(grandchild_file.read_text()))
        assert grandchild is not None
        os.kill(killed, signal.SIGKILL)
        await mesh.recorder.wait_for(lambda _: mesh.recorder.count("worker ready") == 2)
        assert pid_of(state, "worker") != killed
        assert not grandchild.is_alive()
        assert mesh.recorder.count("killed by SIGKILL") == 1
        record = read_record(state.mesh_record)
        assert record is not None
        assert record.services[0].restarts == 1
        second = ProcessIdentity.of(int(grandchild_file.read_text()))
        assert second is not None
    assert not second.is_alive()


async def test_a_service_that_fails_three_health_checks_is_restarted(
    state: StateFolder, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    async with running(state, spec("worker", 0, "--sick-file", str(sick))) as mesh:
        await until_ready(mesh)
        sick.touch()
        await mesh.recorder.wait_for(lambda _: mesh.recorder.count("3 health checks in a row failed") > 0)
        sick.unlink()
        await mesh.recorder.wait_for(lambda _: mesh.recorder.count("worker ready") == 2)


async def test_a_frozen_service_is_restarted(state: StateFolder) -> None:
    frozen = replace(spec("worker", 0), stop_grace_s=0.2, probe=replace(QUICK_PROBE, timeout_s=0.1))
    async with running(state, frozen) as mesh:
        await until_ready(mesh)
        os.kill(pid_of(state, "worker"), signal.SIGSTOP)
        await mesh.recorder.wait_for(lambda _: mesh.recorder.count("worker ready") == 2)


async def test_gives_up_with_the_reason_and_the_last_lines(state: StateFolder) -> None:
    async with running(state, spec("vault", 0), spec("worker", 1, "--exit", "7")) as mesh:
        failure = await asyncio.wait_for(asyncio.shield(mesh.task), 15)
    assert failure is not None
    assert failure.service == "worker"
    assert failure.reason == "exited with code 7"
    assert failure.tail[-2:] == ("first line of the reason", "second line of the reason")
    assert mesh.recorder.count("worker starting") == QUICK_RESTART.max_first_failures
    assert mesh.recorder.count("vault stopped") == 1


async def test_a_service_that_was_ready_once_gets_more_chances(state: StateFolder, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    async with running(state, spec("worker", 0, "--sick-file", str(sick))) as mesh:
        await until_ready(mesh)
        sick.touch()
        failure = await asyncio.wait_for(asyncio.shield(mesh.task), 15)
    assert failure is not None
    assert "3 health checks in a row failed" in failure.reason
    assert mesh.recorder.count("worker ready") == QUICK_RESTART.max_quick_failures


async def test_a_final_exit_code_is_not_tried_again(state: StateFolder) -> None:
    once = replace(spec("worker", 0, "--exit", "7"), restart=RestartPolicy(final_exit_codes=frozenset({7})))
    async with running(state, once) as mesh:
        failure = await asyncio.wait_for(asyncio.shield(mesh.task), 15)
    assert failure is not None
    assert failure.exit_code == 7
    assert mesh.recorder.count("worker starting") == 1


async def test_the_mesh_goes_on_without_a_service_that_is_not_essential(
    state: StateFolder, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    cache = replace(
        spec("kvstore", 0, "--sick-file", str(sick)),
        essential=False,
        restart=replace(QUICK_RESTART, max_quick_failures=1),
    )
    async with running(state, cache, spec("gateway", 1)) as mesh:
        await until_ready(mesh)
        sick.touch()
        await mesh.recorder.wait_for(lambda _: mesh.recorder.count("kvstore failed: given up") == 1)
        assert not mesh.task.done()
        assert psutil.pid_exists(pid_of(state, "gateway"))


async def test_a_command_that_does_not_exist_is_a_clear_failure(state: StateFolder) -> None:
    broken = replace(spec("worker", 0), command=("/nonexistent/python", "-m", "nothing"))
    async with running(state, broken) as mesh:
        failure = await asyncio.wait_for(asyncio.shield(mesh.task), 15)
    assert failure is not None
    assert "exited with code 1" in failure.reason
    assert any("/nonexistent/python" in line or "No such file" in line for line in failure.tail)


async def test_a_service_that_never_becomes_ready_is_given_up(state: StateFolder) -> None:
    deaf = replace(
        spec("worker", 0),
        ready_url=f"http://127.0.0.1:{free_port()}/readyz",
        probe=replace(QUICK_PROBE, startup_timeout_s=0.3),
        restart=replace(QUICK_RESTART, max_quick_failures=1),
    )
    async with running(state, deaf) as mesh:
        failure = await asyncio.wait_for(asyncio.shield(mesh.task), 15)
    assert failure is not None
    assert failure.reason.startswith("not ready within 0 s")


async def test_a_second_supervisor_of_the_same_state_is_refused(state: StateFolder) -> None:
    async with running(state, spec("gateway", 0)) as mesh:
        await until_ready(mesh)
        second = Supervisor(state, MeshPlan((), "demo", ""), Recorder())
        with pytest.raises(AlreadyRunsError, match=rf"runs already in .* \(pid {os.getpid()}\)"):
            await second.run()
        assert state.mesh_record.exists()


# --- the supervisor as a process of its own ----------------------------------------------------------


@dataclass
class Process:
    popen: subprocess.Popen[str]
    state: StateFolder

    def wait_for_line(self, wanted: str) -> None:
        assert self.popen.stdout is not None
        seen: list[str] = []
        for line in self.popen.stdout:
            seen.append(line)
            if wanted in line:
                return
        pytest.fail(f"{wanted!r} never came: {''.join(seen)}")

    def everything(self) -> list[ProcessIdentity]:
        """The supervisor, its services, their children, and the keeper."""
        supervisor = psutil.Process(self.popen.pid)
        family = [supervisor, *supervisor.children(recursive=True)]
        identities = [ProcessIdentity.of(process.pid) for process in family]
        return [identity for identity in identities if identity is not None]


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, stop_grace_s: float = 5.0) -> Process:
        state = StateFolder(tmp_path / "state")
        service = {"name": "worker", "port": free_port(), "flags": flags, "stop_grace_s": stop_grace_s}
        popen = subprocess.Popen(
            [sys.executable, str(HERE / "run_supervisor.py"), str(state.root), json.dumps(service)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(popen)
        process = Process(popen, state)
        process.wait_for_line("ready\n")
        return process

    yield start
    for popen in started:
        popen.kill()
        popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()


def wait_until_gone(identities: list[ProcessIdentity], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [identity for identity in identities if identity.is_alive()]:
        assert time.monotonic() < deadline, f"still alive: {[psutil.Process(i.pid).cmdline() for i in alive]}"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_in_order_and_leaves_no_process(
    start_process: Callable[..., Process], tmp_path: Path, number: signal.Signals
) -> None:
    journal, grandchild = tmp_path / "journal", tmp_path / "grandchild"
    process = start_process("--journal", str(journal), "--grandchild", str(grandchild))
    family = process.everything()
    orphan = ProcessIdentity.of(int(grandchild.read_text()))
    assert orphan is not None
    assert orphan in family
    process.popen.send_signal(number)
    assert process.popen.wait(20) == 0
    assert [identity for identity in family if identity.is_alive()] == []
    assert journal.read_text().splitlines() == ["start worker", "stop worker"]
    assert not process.state.mesh_record.exists()


def test_a_second_interrupt_ends_the_wait_for_a_service_that_ignores_the_first(
    start_process: Callable[..., Process],
) -> None:
    process = start_process("--ignore-term", stop_grace_s=300)
    family = process.everything()
    process.popen.send_signal(signal.SIGINT)
    process.wait_for_line("worker: stopping")
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(20) == 0
    assert [identity for identity in family if identity.is_alive()] == []


@pytest.mark.parametrize("flags", [[], ["--nameless"]], ids=["left the session", "shows no environment"])
def test_nothing_survives_a_killed_supervisor(
    start_process: Callable[..., Process], tmp_path: Path, flags: list[str]
) -> None:
    grandchild = tmp_path / "grandchild"
    process = start_process("--grandchild", str(grandchild), *flags)
    family = process.everything()
    orphan = ProcessIdentity.of(int(grandchild.read_text()))
    assert orphan is not None
    process.popen.kill()
    process.popen.wait(10)
    wait_until_gone([*family, orphan])


def test_services_get_sigterm_from_the_kernel_when_supervisor_and_keeper_are_killed(
    start_process: Callable[..., Process], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    process = start_process("--journal", str(journal))
    family = process.everything()
    for child in psutil.Process(process.popen.pid).children():
        if "sealmesh.deploy.local.keeper" in child.cmdline():
            child.kill()
    process.popen.kill()
    process.popen.wait(10)
    wait_until_gone(family)
    assert journal.read_text().splitlines() == ["start worker", "stop worker"]
