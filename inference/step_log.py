"""Counts engine steps and remembers the load, as vLLM's stat logger interface reports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sealmesh.inference.engine import EngineLoad
from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

__all__ = ["StepCounter", "stat_logger_factory"]


class StepCounter:
    """Steps and load over all engines (data parallel ranks) of a worker."""

    def __init__(self) -> None:
        self.steps = 0
        self._loads: dict[int, EngineLoad] = {}

    @property
    def load(self) -> EngineLoad:
        """Sums of requests and the highest KV usage over the ranks."""
        loads = tuple(self._loads.values())
        return EngineLoad(
            sum(load.running_requests for load in loads),
            sum(load.waiting_requests for load in loads),
            max((load.kv_usage_ratio for load in loads), default=0.0),
        )

    def record(self, rank: int, scheduler_stats: SchedulerStats | None) -> None:
        """Notes a step."""
        self.steps += 1
        if scheduler_stats is not None:
            self._loads[rank] = EngineLoad(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                float(scheduler_stats.kv_cache_usage),
            )


class _StepLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM's types are not followed
    def __init__(self, counter: StepCounter, rank: int) -> None:
        self._counter = counter
        self._rank = rank

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        self._counter.record(engine_idx, scheduler_stats)

    def log_engine_initialized(self) -> None:
        return


def stat_logger_factory(counter: StepCounter) -> Callable[[VllmConfig, int], StatLoggerBase]:
    """What vLLM calls to build the stat logger of each engine rank; all feed `counter`."""

    def build(vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        return _StepLogger(counter, engine_index)

    return build
