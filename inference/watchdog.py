"""Tells a busy engine from one that is stuck or dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import grpc
from sealmesh.inference.engine import Engine
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.health import READY, Readiness

__all__ = ["Watchdog"]

_INTERVAL_S: Final = 0.2


class Watchdog:
    """Watches engine steps while requests run.

    An engine that steps, however slowly, is never called stuck: besides `stall_s` it gets eight times its
    longest step so far.

    Args:
        engine: to watch.
        stall_s: seconds without a step, with requests unfinished, after which the worker is not ready.
        clock: monotonic seconds, for tests.
    """

    def __init__(
        self,
        engine: Engine,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._clock = clock
        self._steps = -1
        self._since = clock()
        self._longest_step_s = 0.0

    @property
    def stalled_s(self) -> float:
        """Seconds for which requests have waited without a step; 0 when the engine moves or idles."""
        return self._clock() - self._since if self._engine.unfinished else 0.0

    @property
    def patience_s(self) -> float:
        """Seconds after which the engine counts as stuck."""
        return max(self._stall_s, 8 * self._longest_step_s)

    def observe(self) -> None:
        """Reads the engine's progress; to be called several times a second."""
        now, steps = self._clock(), self._engine.steps
        if steps != self._steps or not self._engine.unfinished:
            if self._steps >= 0 and self._engine.unfinished:
                self._longest_step_s = max(self._longest_step_s, now - self._since)
            self._steps, self._since = steps, now

    def readiness(self) -> Readiness:
        """Whether the engine can answer."""
        if failure := self._engine.failure:
            return Readiness(False, failure)
        if self.stalled_s > self.patience_s:
            return Readiness(
                False, f"the engine has made no step for {self.stalled_s:.0f} s with requests open"
            )
        return READY

    async def run(self) -> None:
        """Watches until cancelled.

        Raises:
            SealmeshError: ENGINE_FAILED when the engine is dead, or stuck for twice the patience.
        """
        while True:
            self.observe()
            if failure := self._engine.failure:
                raise _failed(failure)
            if self.stalled_s > 2 * self.patience_s:
                raise _failed(
                    f"the engine has made no step for {self.stalled_s:.0f} s with {self._engine.unfinished} "
                    "requests open; the worker ends to be started anew (worker.engine_stall_ms)"
                )
            await asyncio.sleep(_INTERVAL_S)


def _failed(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", message)
