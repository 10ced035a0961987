"""One real mesh for a whole test session: `sealmesh up` with free ports in a state folder of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from sealmesh.deploy.local.addresses import free_port_offset
from sealmesh.deploy.local.mesh_config import DEFAULT_PORTS, LOCAL_NAME, tls_files
from sealmesh.deploy.local.processes import ProcessIdentity, family
from sealmesh.deploy.local.record import MeshRecord, ServiceRecord, read_record
from sealmesh.deploy.local.state import StateFolder
from sealmesh.security.tls import TlsFiles

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 4096
START_TIMEOUT_S = 900


@dataclass
class RunningMesh:
    """Addresses and secrets of the mesh, and hands to stop, start and hurt it."""

    state: StateFolder
    port_offset: int
    settings: tuple[str, ...] = (
        f"worker.max_model_len={MAX_MODEL_LEN}",
        "worker.kv_cache_gib=1",
        "worker.dtype=float32",
        # Other processes want this machine too; a look-up that comes late is a miss.
        "worker.kv_lookup_deadline_ms=2000",
    )
    model: str = MODEL
    seen: set[ProcessIdentity] = field(default_factory=set)
    """Every process that was ever seen to belong to it."""

    @property
    def url(self) -> str:
        """The gateway's HTTP root."""
        return f"http://127.0.0.1:{8080 + self.port_offset}"

    @property
    def grpc_address(self) -> str:
        """The gateway's gRPC front (no TLS on loopback)."""
        return f"127.0.0.1:{9090 + self.port_offset}"

    @property
    def vault_address(self) -> str:
        return f"127.0.0.1:{9101 + self.port_offset}"

    @property
    def kvstore_address(self) -> str:
        return f"127.0.0.1:{9102 + self.port_offset}"

    @property
    def worker_address(self) -> str:
        return f"127.0.0.1:{9111 + self.port_offset}"

    @property
    def api_key(self) -> str:
        return self.state.api_key.read_text(encoding="ascii").strip()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def metrics_url(self, service: str) -> str:
        """`/metrics` of vault, kvstore, worker-0 or gateway."""
        return f"http://{self.service(service).http_address}/metrics"

    def tls(self, role: str, name: str = LOCAL_NAME) -> TlsFiles:
        """Certificate of an identity of this mesh: operator, gateway, … or worker with its name."""
        certificate, key = tls_files(self.state, role, name)
        return TlsFiles(self.state.tls / "ca.pem", certificate, key)

    def record(self) -> MeshRecord:
        record = read_record(self.state.mesh_record)
        assert record is not None, "the mesh does not run"
        return record

    def service(self, name: str) -> ServiceRecord:
        return {service.name: service for service in self.record().services}[name]

    def process(self, name: str) -> psutil.Process:
        """The living process of a service."""
        pid = self.service(name).pid
        assert pid is not None, f"{name} does not run"
        return psutil.Process(pid)

    def cli(
        self, *arguments: str, timeout_s: float = 120, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Runs `sealmesh …` on this state folder."""
        return run_cli(*arguments, state=self.state.root, timeout_s=timeout_s, check=check)

    def up(self) -> float:
        """Starts the mesh; returns the seconds until it was ready."""
        started = time.monotonic()
        flags = [flag for setting in self.settings for flag in ("--set", setting)]
        self.cli(
            "up", "--detach", "--port-offset", str(self.port_offset), *flags,
            timeout_s=START_TIMEOUT_S, check=True,
        )  # fmt: skip
        self.look()
        return time.monotonic() - started

    def look(self) -> list[psutil.Process]:
        """All processes of the mesh as they are now: supervisor, keeper, services and what these started."""
        record = self.record()
        supervisor = psutil.Process(record.supervisor_pid)
        found = {
            process.pid: process
            for process in (
                *(supervisor, *supervisor.children(recursive=True)),
                *family(record.mesh_id, sessions=record.sessions()),
            )
        }
        identities = map(ProcessIdentity.of, found)
        self.seen.update(identity for identity in identities if identity is not None)
        return list(found.values())

    def down(self) -> None:
        """Stops the mesh in order; asserts that no process of it is left."""
        self.look()
        self.cli("down", check=True)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """None of the processes that `look` ever saw is alive."""
        left = [psutil.Process(identity.pid) for identity in self.seen if identity.is_alive()]
        assert left == [], "the mesh left processes behind"

    async def whole(self, service: str, *, restarts: int, timeout_s: float = 300) -> float:
        """Waits until the service has been restarted that often and everything is ready; seconds waited."""
        started = time.monotonic()
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(timeout_s):
            while True:
                record = self.record()
                done = {entry.name: entry.restarts for entry in record.services}[service] >= restarts
                if done and all(entry.state == "ready" for entry in record.services):
                    answers = [await _status(client, entry.ready_url) for entry in record.services]
                    if all(status == httpx.codes.OK for status in answers):
                        return time.monotonic() - started
                await asyncio.sleep(0.1)


def new_mesh(root: Path) -> RunningMesh:
    """A mesh that is not started yet."""
    return RunningMesh(StateFolder(root), free_port_offset(DEFAULT_PORTS))


def run_cli(
    *arguments: str, state: Path, timeout_s: float = 120, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs `sealmesh …`; with `check` a failure shows what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "sealmesh.deploy.cli.main", *arguments],
        env={**cli_environment(), "SEALMESH_STATE": str(state)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert not check or done.returncode == 0, f"sealmesh {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done


def cli_environment() -> dict[str, str]:
    """This environment without settings of sealmesh, which would reach into the test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SEALMESH_")}


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The JSON object that a command printed."""
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def contains_any(path: Path, needles: Sequence[bytes], *, block_bytes: int = 1 << 22) -> bytes | None:
    """The first needle that stands in the file, or None. Needles may lie across blocks."""
    overlap = max(map(len, needles)) - 1
    tail = b""
    with path.open("rb") as file:
        while block := file.read(block_bytes):
            text = tail + block
            for needle in needles:
                if needle in text:
                    return needle
            tail = text[-overlap:]
    return None


async def _status(client: httpx.AsyncClient, url: str) -> int:
    try:
        return (await client.get(url, timeout=5)).status_code
    except httpx.HTTPError:
        return 0
