"""Hostile texts of a megabyte: the work grows with the length, not with its square."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sealmesh.gateway.pii import PiiFilter, detect

_SHAPES: dict[str, str] = {
    "digits": "1",
    "mobiles without an end": "13800138000",
    "single digits": "6 2 1 9 8 ",
    "groups of four": "6222 ",
    "brackets": "[",
    "mathematical brackets": "⟦",
    "combining marks": "\u0301",
    "zero-width spaces": "\u200b",
    "digits with zero-width spaces": "1\u200b",
    "ats": "@",
    "endless domain": "a@b.",
    "labels": "身份证",
    "openings": "[PHONE_",
    "labels of placeholders": "phone_id_",
    "mobiles with letters": "a13800138000",
    "numbers ended by x": "13800138000x",
    "letters between digits": "a1",
}
_FILTER = PiiFilter(bytes(range(32)), 1)


def _seconds(work: Callable[[str], object], text: str) -> float:
    started = time.process_time()
    work(text)
    return time.process_time() - started


def _round_trip(text: str) -> None:
    masked = _FILTER.mask_text(text)
    assert masked.session.restore_text(masked.text) == text


@pytest.mark.parametrize("shape", list(_SHAPES))
def test_time_is_linear(shape: str) -> None:
    unit = _SHAPES[shape]
    small, large = unit * (25_000 // len(unit)), unit * (200_000 // len(unit))
    # One value makes the restorer work on the rest.
    _round_trip(small + " 13800138000")
    few = min(_seconds(_round_trip, small + " 13800138000") for _ in range(3))
    many = _seconds(_round_trip, large + " 13800138000")
    # Eight times the text; a square would take 64 times. The constant absorbs the clock and a busy machine.
    assert many < 24 * few + 0.05


def test_a_megabyte_of_digits() -> None:
    assert detect("7" * 1_000_000) == []
