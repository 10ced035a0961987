"""The statistics of the benchmarks."""

from __future__ import annotations

import pytest
from sealmesh.deploy.bench.figures import Summary, confidence_95, paired_ratio, quantile
from sealmesh.deploy.bench.load import fresh_prompt, question


def test_a_summary_is_of_the_sorted_sample() -> None:
    summary = Summary.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (summary.count, summary.median, summary.minimum, summary.maximum) == (5, 3.0, 1.0, 5.0)
    assert (summary.p10, summary.p90) == pytest.approx((1.4, 4.6))
    assert quantile([7.0], 0.9) == 7.0


def test_nothing_measured_is_an_error_not_a_figure() -> None:
    with pytest.raises(ValueError, match="every measurement failed"):
        Summary.of([])


def test_a_ratio_is_taken_within_pairs() -> None:
    # The machine became ten times slower in the second pair: the ratio does not notice.
    ratio = paired_ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
    assert ratio["value"] == 2.0
    assert ratio["confidence_95"] == [2.0, 2.0]
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratio([1.0], [1.0, 2.0])


def test_the_interval_holds_the_median_and_repeats() -> None:
    values = [float(value % 17) for value in range(100)]
    low, high = confidence_95(values)
    assert low <= 8.0 <= high
    assert (low, high) == confidence_95(values)


def test_prompts_repeat_by_seed_and_share_no_prefix() -> None:
    assert fresh_prompt(50, "a") == fresh_prompt(50, "a")
    assert fresh_prompt(50, "a")[:12] != fresh_prompt(50, "b")[:12]
    assert question("a") == question("a")
    assert question("a")[:8] != question("b")[:8]
