"""A circuit breaker whose probes run beside the work: a broken store costs one deadline, then nothing."""

import random
import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed until a failure; open while background probes fail; closed again by the first that succeeds.

    Callers ask `closed` before each call and report a failure with `fail`. They never pay for a probe.

    Args:
        probe: Raises when the peer is still bad; runs in a thread of its own, with a deadline of its own.
        first_backoff_s: Wait before the first probe; doubled after each failed one, with jitter.
        max_backoff_s: Longest wait.
        on_change: Called with True when it opens and False when it closes.
    """

    def __init__(
        self,
        probe: Callable[[], None],
        *,
        first_backoff_s: float = 0.1,
        max_backoff_s: float = 5.0,
        on_change: Callable[[bool], None] = lambda opened: None,
    ) -> None:
        self._probe = probe
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._prober: threading.Thread | None = None
        self._open = False
        self._closed_at = -max_backoff_s
        self._backoff_s = first_backoff_s

    @property
    def closed(self) -> bool:
        """Whether calls may be made."""
        return not self._open

    def start(self) -> None:
        """Opens without a failure and probes at once: calls may be made when the peer has answered."""
        with self._lock:
            if not self._open and not self._stop.is_set():
                self._begin(wait_s=0.0)

    def fail(self) -> None:
        """Reports a failed or too slow call: opens, and starts to probe."""
        with self._lock:
            if self._open or self._stop.is_set():
                return
            # A peer that answers probes and fails calls must not be asked ten times a second.
            if time.monotonic() - self._closed_at > self._max_backoff_s:
                self._backoff_s = self._first_backoff_s
            self._begin(wait_s=self._backoff_s)
        self._on_change(True)

    def stop(self) -> None:
        """Ends probing."""
        self._stop.set()
        prober = self._prober
        if prober is not None and prober is not threading.current_thread():
            prober.join(timeout=1.0)

    def _begin(self, wait_s: float) -> None:
        self._open = True
        self._prober = threading.Thread(
            target=self._probe_until_good, args=(wait_s,), name="kv-breaker", daemon=True
        )
        self._prober.start()

    def _probe_until_good(self, wait_s: float) -> None:
        while not self._stop.wait(wait_s * random.uniform(0.8, 1.2)):
            try:
                self._probe()
            except Exception:  # noqa: BLE001 - whatever it was, the peer is still bad
                wait_s = self._backoff_s
                self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
                continue
            with self._lock:
                self._open = False
                self._closed_at = time.monotonic()
                # Doubles also after a success; `fail` starts over once the peer was good for long.
                self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
            self._on_change(False)
            return
