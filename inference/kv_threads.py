"""Threads of the connector inside the engine's process."""

import contextlib
import os


def use_every_core() -> None:
    """Lets the calling thread run on every core of the process's cpuset.

    The CPU build of the engine binds its main thread to one core, and threads inherit that: a loader
    would then share a core with the thread that computes while others idle.
    """
    if hasattr(os, "sched_setaffinity"):
        # Refused inside some sandboxes; the thread then stays where it is.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
