"""The deadline of the call being served, so that calls made for it never outlive it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

__all__ = ["deadline_within", "remaining_s", "tightest_timeout_s"]

_DEADLINE: Final[ContextVar[float | None]] = ContextVar("sealmesh_deadline", default=None)


@contextlib.contextmanager
def deadline_within(timeout_s: float | None) -> Iterator[None]:
    """Limits everything that the block calls to `timeout_s` from now; None changes nothing."""
    if timeout_s is None:
        yield
        return
    outer, own = _DEADLINE.get(), time.monotonic() + timeout_s
    token = _DEADLINE.set(own if outer is None else min(outer, own))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def remaining_s() -> float | None:
    """Seconds left for the current call, at least 0; None when it has no deadline."""
    deadline = _DEADLINE.get()
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def tightest_timeout_s(timeout_s: float | None) -> float | None:
    """The smaller of a timeout and what is left for the current call; None when there is neither."""
    left = remaining_s()
    if left is None or timeout_s is None:
        return timeout_s if left is None else left
    return min(left, timeout_s)
