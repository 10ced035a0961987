"""What the supervisor is told about each service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ProbePolicy:
    """How a service's health is asked."""

    interval_s: float = 1.0
    timeout_s: float = 2.0
    """A probe without an answer after this time has failed."""
    failures: int = 3
    """Failed liveness probes in a row after which the service is restarted."""
    startup_timeout_s: float = 60.0
    """From the start of the process to its first ready answer."""


@dataclass(frozen=True)
class RestartPolicy:
    """When and how often a service that ended is started again."""

    backoff_initial_s: float = 0.5
    backoff_max_s: float = 15.0
    stable_s: float = 60.0
    """A service that was ready for this long starts again with a clean record."""
    max_quick_failures: int = 4
    """Failures in a row, none of them after a stable time, after which the service is given up."""
    max_first_failures: int = 2
    """The same for a service that has not been ready once: more likely wrong than unlucky."""
    final_exit_codes: frozenset[int] = frozenset()
    """Exit codes that say that starting again cannot help (wrong configuration)."""

    def backoff_s(self, failures: int) -> float:
        """Wait before the start that follows the `failures`-th failure in a row (1 or more)."""
        return min(self.backoff_max_s, self.backoff_initial_s * 2.0 ** (failures - 1))


@dataclass(frozen=True)
class ServiceSpec:
    """One service: a command, its addresses and how it is watched."""

    name: str
    command: tuple[str, ...]
    stage: int
    """Services of a stage start together, after every service of the stage before is ready."""
    ready_url: str
    """Answers 200 once the service can do its work."""
    live_url: str
    """Answers 200 as long as a restart would not help."""
    address: str
    """Where clients reach it, host:port."""
    http_address: str = ""
    """Health and metrics, host:port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    working_folder: Path | None = None
    stop_grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    leftover_grace_s: float = 3.0
    """From the end of the process to the end of what it started and left."""
    essential: bool = True
    """Whether the mesh stops when this service is given up; a cache is not essential."""
    probe: ProbePolicy = ProbePolicy()
    restart: RestartPolicy = RestartPolicy()
