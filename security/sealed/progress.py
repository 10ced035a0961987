"""Progress of long work, for bars and metrics."""

from __future__ import annotations

from collections.abc import Callable

# Called with (bytes done, bytes in all), in order, from the thread that called the long function.
Progress = Callable[[int, int], None]


def no_progress(_done_bytes: int, _total_bytes: int) -> None:
    """Reports to nobody."""
