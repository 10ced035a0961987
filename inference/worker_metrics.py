"""Metrics of a worker, beside those that every service and the engine itself have."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sealmesh.telemetry.metrics import Metrics

__all__ = ["WorkerMetrics"]


class WorkerMetrics:
    """Registers the worker's metrics.

    Args:
        metrics: of this process.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.tokens = metrics.counter(
            "sealmesh_worker_tokens", "Tokens by kind: prompt, cached (part of prompt), output.", ("kind",)
        )
        self.time_to_first_token = metrics.histogram(
            "gen_ai_server_time_to_first_token_seconds", "From the engine request to its first token."
        )
        self.time_per_output_token = metrics.histogram(
            "gen_ai_server_time_per_output_token_seconds", "Mean time between tokens after the first."
        )
        self.aborted = metrics.counter("sealmesh_worker_aborted_calls", "Calls whose client went away.")
        self.stalled = metrics.gauge(
            "sealmesh_worker_engine_stalled", "1 while the engine makes no progress."
        )
        metrics.registry.register(_EngineMetrics())


class _EngineMetrics(Collector):
    """vLLM registers its metrics in prometheus_client's default registry; they are shown with ours."""

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.name.startswith("vllm:"):
                yield metric
