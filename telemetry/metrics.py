"""Prometheus metrics of one process, in a registry of its own.

Names follow the OpenTelemetry semantic conventions in Prometheus form: dots become underscores, the unit
is a suffix (`rpc.server.duration` in seconds is `rpc_server_duration_seconds`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

__all__ = ["BYTES_BUCKETS", "LATENCY_BUCKETS_S", "BoundedLabel", "Metrics", "exponential_buckets"]


def exponential_buckets(start: float, factor: float, count: int) -> tuple[float, ...]:
    """`count` upper bounds, each `factor` times the one before, rounded to three significant digits."""
    if start <= 0 or factor <= 1 or count < 1:
        raise ValueError("buckets need start > 0, factor > 1 and count >= 1")
    return tuple(float(f"{start * factor**i:.3g}") for i in range(count))


LATENCY_BUCKETS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
BYTES_BUCKETS: Final = exponential_buckets(1024, 4, 11)


class BoundedLabel:
    """Keeps the number of values of a label finite: from the `limit`-th new one on, all are `other`.

    Args:
        limit: how many distinct values are kept.
        allowed: values that are always kept, for example configured tenants.
    """

    OTHER: Final = "other"

    def __init__(self, limit: int = 64, allowed: Iterable[str] = ()) -> None:
        self._limit = limit
        self._seen = set(allowed)
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        with self._lock:
            if len(self._seen) >= self._limit:
                return self.OTHER
            self._seen.add(value)
        return value


class Metrics:
    """A registry, and the metrics that every service has.

    Args:
        service: name of the service, a label of `sealmesh_build_info`.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        build = self.gauge(
            "sealmesh_build_info", "Version of this process; always 1.", ("service", "version")
        )
        build.labels(service, _version()).set(1)

        rpc = ("rpc_service", "rpc_method")
        self.rpc_server_duration = self.histogram(
            "rpc_server_duration_seconds",
            "Time from the arrival of a call to its status.",
            (*rpc, "rpc_grpc_status_code"),
        )
        self.rpc_server_active = self.gauge("rpc_server_active_requests", "Calls being answered now.", rpc)
        self.rpc_server_errors = self.counter(
            "rpc_server_errors",
            "Calls that ended with a status other than OK.",
            (*rpc, "rpc_grpc_status_code", "reason"),
        )
        self.rpc_client_duration = self.histogram(
            "rpc_client_duration_seconds",
            "Time from the start of an outgoing call to its status.",
            (*rpc, "rpc_grpc_status_code"),
        )

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """A counter; its exposed name ends in `_total`."""
        return Counter(name, documentation, labels, registry=self.registry)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """A gauge."""
        return Gauge(name, documentation, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """A histogram; the default buckets suit latencies in seconds."""
        return Histogram(name, documentation, labels, registry=self.registry, buckets=buckets)

    def render(self) -> tuple[bytes, str]:
        """The text exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def _version() -> str:
    try:
        return version("sealmesh")
    except PackageNotFoundError:
        # Run from a source tree that is not installed.
        return "unknown"
