"""Counters of the connector: what it looked up, moved, dropped and refused since the last report."""

import threading
from collections import Counter
from enum import StrEnum


class Count(StrEnum):
    """Names of the counters; units are part of the name."""

    LOOKUPS = "kv_lookups"
    LOOKUP_FAILURES = "kv_lookup_failures"
    ASKED_BLOCKS = "kv_asked_blocks"
    HIT_BLOCKS = "kv_hit_blocks"
    LOADED_BLOCKS = "kv_loaded_blocks"
    LOADED_BYTES = "kv_loaded_bytes"
    LOAD_MICROSECONDS = "kv_load_microseconds"
    FAILED_BLOCKS = "kv_failed_blocks"
    MISMATCHED_BLOCKS = "kv_mismatched_blocks"
    SAVED_BLOCKS = "kv_saved_blocks"
    SAVED_BYTES = "kv_saved_bytes"
    EXISTING_BLOCKS = "kv_existing_blocks"
    REFUSED_BLOCKS = "kv_refused_blocks"
    DROPPED_BLOCKS = "kv_dropped_blocks"
    BREAKER_OPENED = "kv_breaker_opened"


class KVCounters:
    """Thread-safe counters with a total and a part that was not reported yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()

    def add(self, name: Count, amount: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._total[name.value] += amount
            self._unreported[name.value] += amount

    def total(self, name: Count) -> int:
        """Sum since the start."""
        with self._lock:
            return self._total[name.value]

    def take(self) -> dict[str, int]:
        """Sums since the last call; empty when nothing happened."""
        with self._lock:
            taken = dict(self._unreported)
            self._unreported.clear()
            return taken
