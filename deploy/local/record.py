"""`run/mesh.json`, which `sealmesh status` and `down` read, and the lock that keeps a state to one mesh."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from sealmesh.deploy.local.processes import ProcessIdentity
from sealmesh.deploy.local.state import PRIVATE_FILE_MODE, write_private

FORMAT = 1


@dataclass(frozen=True)
class ServiceRecord:
    """One service of a running mesh."""

    name: str
    state: str
    pid: int | None
    start_time: float | None
    address: str
    http_address: str
    ready_url: str
    restarts: int
    last_failure: str

    def identity(self) -> ProcessIdentity | None:
        if self.pid is None or self.start_time is None:
            return None
        return ProcessIdentity(self.pid, self.start_time)


@dataclass(frozen=True)
class MeshRecord:
    """A running mesh."""

    mesh_id: str
    state: str
    """ "starting", "ready", "stopping" or "failed"."""
    supervisor_pid: int
    supervisor_start_time: float
    started_at: float
    """Seconds since the epoch."""
    ready_after_s: float | None
    model: str
    gateway_url: str
    services: tuple[ServiceRecord, ...]

    @property
    def supervisor(self) -> ProcessIdentity:
        return ProcessIdentity(self.supervisor_pid, self.supervisor_start_time)

    def sessions(self) -> list[ProcessIdentity]:
        """The services' processes, each of which leads a session."""
        found = (service.identity() for service in self.services)
        return [identity for identity in found if identity is not None]

    def write(self, path: Path) -> None:
        write_private(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=2).encode() + b"\n")


def read_record(path: Path) -> MeshRecord | None:
    """Reads the record; None when there is none. Raises ValueError when it is not one of ours."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; delete it once no mesh runs") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ValueError(f"{path} was written by another release; delete it once no mesh runs")
    try:
        services = tuple(ServiceRecord(**service) for service in data.pop("services"))
        return MeshRecord(services=services, **data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it once no mesh runs") from error


class MeshLock:
    """A lock that the kernel frees when its holder dies, so that no stale lock can exist (flock(2))."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Takes the lock without waiting; False when another process holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_is_held(path: Path) -> bool:
    """Whether some process holds the lock."""
    if not path.exists():
        return False
    lock = MeshLock(path)
    if lock.acquire():
        lock.release()
        return False
    return True
