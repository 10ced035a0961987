"""Medians with their spread. Machines are shared and noisy: ratios of paired runs are what counts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

_RESAMPLES = 2000
_SEED = 20261130


@dataclass(frozen=True)
class Summary:
    """Order statistics of a sample, in the sample's own unit."""

    count: int
    median: float
    p10: float
    p90: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Raises ValueError for an empty sample."""
        if not values:
            raise ValueError("there is nothing to summarise: every measurement failed")
        ordered = sorted(values)
        return cls(
            count=len(ordered),
            median=statistics.median(ordered),
            p10=quantile(ordered, 0.1),
            p90=quantile(ordered, 0.9),
            minimum=ordered[0],
            maximum=ordered[-1],
        )

    def json(self) -> dict[str, float | int]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the nearest ranks of a sorted sample."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def confidence_95(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float] = statistics.median
) -> tuple[float, float]:
    """95 % bootstrap interval of a statistic (Efron, percentile method), with a fixed seed."""
    source = random.Random(_SEED)
    resampled = sorted(statistic(source.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return quantile(resampled, 0.025), quantile(resampled, 0.975)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, object]:
    """Median of the ratios of pairs, its interval, and the spread of both sides."""
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    low, high = confidence_95(ratios)
    return {
        "value": round(statistics.median(ratios), 4),
        "confidence_95": [round(low, 4), round(high, 4)],
        "ratios": Summary.of(ratios).json(),
    }
