"""Ends an engine process when the process that started it dies, however it dies."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

__all__ = ["ENGINE_OF_WORKER_VARIABLE", "die_with_parent"]

# Set by the worker to the level and format of its log (info:text), so that the plugin knows its engine
# processes and leaves alone those that have nothing to do with a worker.
ENGINE_OF_WORKER_VARIABLE = "SEALMESH_ENGINE_OF_WORKER"


def die_with_parent() -> bool:
    """Starts a thread that kills this process with SIGKILL once its multiprocessing parent is gone.

    The parent's sentinel rather than PR_SET_PDEATHSIG: that one fires when the parent's *thread* which
    started this process ends, and misses a parent that died before the call.

    Returns:
        Whether there is a parent to watch: False in a process that multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return False
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()
    return True


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
