"""Checks of `sealmesh doctor` that depend on a mesh's settings and state."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import redis
from sealmesh.deploy.local.addresses import taken_addresses
from sealmesh.deploy.local.doctor_check import Check, fail, ok, warn
from sealmesh.deploy.local.doctor_host import GIB, MIB, check_cpu, size
from sealmesh.deploy.local.doctor_packages import Packages, check_engine_device
from sealmesh.deploy.local.mesh_config import (
    DEMO_MODEL_NAME,
    MeshSettings,
    Sections,
    ServedModel,
    complete_sections,
    listen_addresses,
    load_mesh_settings,
    settings_class,
)
from sealmesh.deploy.local.record import lock_is_held
from sealmesh.deploy.local.state import StateFolder
from sealmesh.inference.devices import Device, DeviceError, Footprint, detect_device
from sealmesh.inference.devices.cpu import CpuDevice
from sealmesh.inference.settings import WorkerSettings
from sealmesh.kvstore.embedded import find_server
from sealmesh.kvstore.settings import KVStoreSettings
from sealmesh.kvstore.store import StoreUnavailableError
from sealmesh.telemetry.runtime.errors import SealmeshError

FAMILIES: tuple[Literal["auto", "cpu", "cuda", "ascend"], ...] = ("auto", "cpu", "cuda", "ascend")
_REDIS_TIMEOUT_S = 1.0
_OLDEST_REDIS = (6, 2)
_DEMO_WEIGHT_BYTES = 270 * MIB
_LOG_TAIL_BYTES = 1 << 16

SYMPTOMS: Mapping[str, str] = {
    r"operator torchvision::nms does not exist": (
        "a CUDA build of torchvision stands beside a CPU build of torch: "
        "pip uninstall -y torchvision torchaudio torchcodec"
    ),
    r"undefined symbol: \w*(?:c10|torch|at\d)": "torch is not the build that vLLM wants: run `make up`",
    r"Illegal instruction|SIGILL": "this build of the engine wants CPU features that the processor has not",
    r"Failed to infer device type": "vLLM found no device: install the build for this machine with `make up`",
    r"No space left on device": "a disk, or /dev/shm, is full: free some space there",
    r"Cannot allocate memory|std::bad_alloc|MemoryError": "memory ran out: lower worker.kv_cache_gib",
    r"Too many open files": "raise the limit: ulimit -n 4096",
    r"CERTIFICATE_VERIFY_FAILED|certificate has expired": (
        "a certificate is not valid: stop the mesh, remove the state's tls folder and start it again"
    ),
}
"""What is known to stand in logs when something breaks, and what to do about it."""


@dataclass(frozen=True)
class MeshView:
    """What the settings say, or why they cannot be read."""

    state: StateFolder
    mesh: MeshSettings
    sections: Sections
    problem: str
    """Why the settings are refused; "" when they are not. The other fields are then the defaults."""
    running: bool
    """Whether a mesh runs on this state now."""

    @classmethod
    def of(cls, state: StateFolder) -> Self:
        """The view that `sealmesh up` would have, from config.toml and the environment."""
        problem = ""
        defaults = MeshSettings()
        mesh, sections = defaults, _sections(StateFolder(state.root / "none"), defaults)
        try:
            mesh = load_mesh_settings(state, {})
            sections = _sections(state, mesh)
        except SealmeshError as error:
            problem = error.message
        return cls(state, mesh, sections, problem, lock_is_held(state.lock_file))

    @property
    def wanted_device(self) -> str:
        """The device family that the worker is set to; "auto" as a rule."""
        named = os.environ.get("SEALMESH_WORKER_DEVICE") or os.environ.get("SEALMESH_DEVICE")
        return named or str(self._of_worker("device"))

    def device(self) -> Device:
        """The device that the worker would take. Raises DeviceError when it is not there."""
        family = next((name for name in FAMILIES if name == self.wanted_device), None)
        if family is None:
            raise DeviceError(
                f"{self.wanted_device!r} is no device: set worker.device to {', '.join(FAMILIES)}"
            )
        return detect_device(family)

    def check_device(self) -> Iterator[Check]:
        """The device that a worker would take."""
        try:
            device = self.device()
        except DeviceError as error:
            yield fail(str(error), "set worker.device to auto")
            return
        yield from check_cpu(device) if isinstance(device, CpuDevice) else [ok(device.describe())]

    def check_engine_device(self, packages: Packages) -> Iterator[Check]:
        """Whether the installed build of the engine is the one for that device."""
        with contextlib.suppress(DeviceError):  # check_device says so
            yield from check_engine_device(packages, self.device().name)

    @property
    def private_dir(self) -> Path:
        """The worker's folder for opened files."""
        return Path(str(self._of_worker("private_dir")))

    def _of_worker(self, field: str) -> object:
        default: object = WorkerSettings.model_fields[field].default
        return self.sections.get("worker", {}).get(field, default)

    def check_settings(self) -> Iterator[Check]:
        """Whether the settings files and the environment can be read."""
        if self.problem:
            yield fail(self.problem, f"correct it there, or start without {self.state.user_config.name}")
            return
        there = self.state.user_config.is_file()
        yield ok(str(self.state.user_config) if there else "defaults (there is no config.toml)")

    def check_ports(self) -> Iterator[Check]:
        """Whether every address is free, or held by the mesh that runs."""
        addresses = listen_addresses(self.mesh, self.sections)
        if self.running:
            yield ok(f"the running mesh holds its {len(addresses)} addresses")
            return
        taken = taken_addresses(addresses)
        if taken:
            listed = "; ".join(f"{purpose}: {reason}" for purpose, reason in taken.items())
            yield fail(listed, "stop what listens there (ss -ltnp), or: sealmesh up --port-offset 1000")
            return
        yield ok(f"all {len(addresses)} are free: {', '.join(addresses.values())}")

    def check_memory(self) -> Iterator[Check]:
        """Whether weights and KV space fit, by the device's own rule."""
        if self.running:
            yield ok("the running mesh has its memory")
            return
        device = self.device()
        dtype = str(self._of_worker("dtype"))
        weights = self._weight_bytes() * (2 if "float32" in (dtype, device.dtype()) else 1)
        count = self.mesh.workers
        cache = int(str(self._of_worker("kv_cache_gib"))) * GIB
        try:
            device.check(Footprint(weights=weights * count, kv_cache=cache * count))
        except DeviceError as error:
            yield fail(str(error), "see the settings named there; or run fewer workers")
            return
        yield ok(f"{size((weights + cache) * count)} for weights and KV space fit ({device.name})")

    def _weight_bytes(self) -> int:
        """Size of the model on disk, in the format that it is stored in (2 bytes a weight, as a rule)."""
        folder = self.mesh.model or self.state.models / DEMO_MODEL_NAME
        if not folder.is_dir():
            return _DEMO_WEIGHT_BYTES
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())

    def check_redis(self) -> Iterator[Check]:
        """The server behind the KV store: the configured one answers, or one can be embedded."""
        if not self.mesh.kvstore:
            yield ok("not used: the KV store is off")
            return
        table = self.sections.get("kvstore", {})
        url = os.environ.get("SEALMESH_KVSTORE_REDIS_URL") or str(
            table.get("redis_url", KVStoreSettings.model_fields["redis_url"].default)
        )
        yield ask_redis(url) if url else embedded_redis()


def _sections(state: StateFolder, mesh: MeshSettings) -> Sections:
    model = ServedModel(mesh.name or DEMO_MODEL_NAME, state.models, None, None, state.verifying_key)
    sections = complete_sections(state, mesh, model)
    for name, table in sections.items():
        settings_class(name)  # an import that fails is found here
        table.setdefault("grpc_address", "")
    return sections


def ask_redis(url: str) -> Check:
    """Whether the configured server answers. The address is shown without its password."""
    shown = re.sub(r"//[^@/]*@", "//***@", url)
    try:
        with redis.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        ) as client:
            release = str(client.info("server").get("redis_version", ""))
    except (redis.RedisError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return fail(f"{shown} does not answer: {reason}", "start it, or correct kvstore.redis_url")
    return _judge_redis(release, f"{release} at {shown}")


def embedded_redis() -> Check:
    """The server that the KV store would start itself."""
    try:
        server = find_server()
    except StoreUnavailableError as error:
        return fail(str(error), "Debian and Ubuntu: apt-get install redis-server")
    said = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=False, timeout=5)
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", said.stdout)
    if said.returncode or not found:
        return fail(f"{server} does not start: {(said.stderr or said.stdout).strip()[:200]}", "reinstall it")
    return _judge_redis(found[1], f"{found[1]} embedded, {server}")


def _judge_redis(release: str, detail: str) -> Check:
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers and numbers < _OLDEST_REDIS:
        return fail(detail, "Redis 6.2 or newer, or Valkey, is needed")
    return ok(detail)


def check_permissions(state: StateFolder) -> Iterator[Check]:
    """Whether others on this machine can read keys."""
    if not state.root.exists():
        yield ok(f"{state.root} will be made by `sealmesh up`")
        return
    if not os.access(state.root, os.R_OK | os.W_OK | os.X_OK):
        yield fail(f"{state.root} cannot be written by this user", "own it, or set SEALMESH_STATE elsewhere")
        return
    secret = [state.keys, state.tls, *_files(state.keys), *state.tls.glob("*.key")]
    open_ = [path for path in secret if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]
    private = [path for path in open_ if path.suffix != ".pub"]
    if private:
        named = ", ".join(str(path.relative_to(state.root)) for path in private[:4])
        yield fail(
            f"others on this machine may read {named}",
            f"chmod -R go-rwx {state.keys} {state.tls}, and rotate what was exposed",
        )
        return
    yield ok(f"{state.root}, closed to others")


def _files(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def check_logs(state: StateFolder) -> Iterator[Check]:
    """Known symptoms at the end of the services' logs."""
    found = False
    for path in sorted(state.logs.glob("*.log")) if state.logs.is_dir() else []:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
        for pattern, remedy in SYMPTOMS.items():
            symptom = re.search(pattern, tail)
            if symptom:
                found = True
                yield warn(f"{path.name} says: {symptom[0]}", remedy)
    if not found:
        yield ok("no known trouble in the services' logs")
