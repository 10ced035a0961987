"""The connector's counters in vLLM's own statistics: its periodic log line and its Prometheus metrics."""

from collections.abc import Mapping, Sequence

from sealmesh.inference.kv_counters import Count
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class KVStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types for strict use
    """Sums of one interval; `data` maps counter names to amounts."""

    data: dict[str, int]

    def reset(self) -> None:
        """Starts a new interval."""
        self.data.clear()

    def aggregate(self, other: "KVStats") -> "KVStats":
        """Adds another rank's or interval's sums to these."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums as they are logged."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class KVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """A Prometheus counter for each of ours, `sealmesh_kv_…_total`, by engine."""

    def __init__(
        self,
        vllm_config: object,
        metric_types: Mapping[object, object],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            count.value: self._counter_cls(
                name=f"sealmesh_{count.value}",
                documentation=f"KV connector: {count.value.removeprefix('kv_').replace('_', ' ')}.",
                labelnames=labelnames,
            )
            for count in Count
        }

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Adds an interval's sums."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
