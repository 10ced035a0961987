"""Prometheus metrics of the kvstore service."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sealmesh.telemetry.metrics import Metrics


class KVStoreMetrics:
    """Counts of the service. Labels are fixed words only: no tenant and no key ever becomes one."""

    def __init__(self, metrics: Metrics) -> None:
        self._lookups = metrics.counter("sealmesh_kvstore_lookups", "LookupPrefix calls answered.")
        self._keys = metrics.counter("sealmesh_kvstore_lookup_keys", "Keys looked up, by result.", ["result"])
        self._blocks = metrics.counter("sealmesh_kvstore_blocks", "Blocks moved, by outcome.", ["outcome"])
        self._bytes = metrics.counter(
            "sealmesh_kvstore_bytes", "Bytes of block values, by direction.", ["direction"]
        )
        self._refused = metrics.counter(
            "sealmesh_kvstore_refused_blocks", "Blocks not stored, by reason.", ["reason"]
        )
        self._seconds = metrics.histogram(
            "sealmesh_kvstore_redis_seconds", "Time of one Redis command or pipeline.", ["operation"]
        )
        self._errors = metrics.counter(
            "sealmesh_kvstore_redis_errors", "Redis commands that failed.", ["operation"]
        )
        self._restarts = metrics.counter(
            "sealmesh_kvstore_embedded_restarts", "Restarts of the embedded Redis."
        )
        self._up = metrics.gauge("sealmesh_kvstore_redis_up", "Whether Redis answers: 1 or 0.")
        self.hit_count = 0
        self.miss_count = 0

    def looked_up(self, asked: int, present: int) -> None:
        """Counts a lookup of `asked` keys of which the first `present` were there."""
        self._lookups.inc()
        self._keys.labels("hit").inc(present)
        self._keys.labels("miss").inc(asked - present)
        self.hit_count += present
        self.miss_count += asked - present

    def read(self, size_bytes: int | None) -> None:
        """Counts a block that was sent, or one that was gone (None)."""
        self._blocks.labels("missing" if size_bytes is None else "read").inc()
        self._bytes.labels("read").inc(size_bytes or 0)

    def put(self, outcome: str, size_bytes: int) -> None:
        """Counts a block that a worker sent: "stored", "existing" or "refused"."""
        self._blocks.labels(outcome).inc()
        if outcome == "stored":
            self._bytes.labels("written").inc(size_bytes)

    def refused(self, reason: str) -> None:
        """Counts a block that was not stored: "size", "memory", "readonly", "error"."""
        self._refused.labels(reason).inc()

    def restarted(self) -> None:
        """Counts a restart of the embedded server."""
        self._restarts.inc()

    def redis_up(self, up: bool) -> None:
        """Sets whether Redis answers."""
        self._up.set(1 if up else 0)

    @contextmanager
    def redis_command(self, operation: str) -> Iterator[None]:
        """Times one command or pipeline and counts it as an error when it raises."""
        started = time.perf_counter()
        try:
            yield
        except Exception:
            self._errors.labels(operation).inc()
            raise
        finally:
            self._seconds.labels(operation).observe(time.perf_counter() - started)
