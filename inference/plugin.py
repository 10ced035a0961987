"""The `vllm.general_plugins` entry point: loaded by vLLM in every process of an engine.

Cheap when the process has nothing to do with sealmesh: any vLLM in this environment loads it.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Registers the load format `sealed`; ties an engine process to its worker's life and log."""
    from sealmesh.inference.parent_watch import ENGINE_OF_WORKER_VARIABLE, die_with_parent

    log = os.environ.get(ENGINE_OF_WORKER_VARIABLE)
    if log is not None and die_with_parent():
        _log_like_worker(log)

    from sealmesh.inference.loader import register_loader

    register_loader()


def _log_like_worker(choice: str) -> None:
    import logging
    from typing import get_args

    from sealmesh.inference.last_words import StartFailures
    from sealmesh.telemetry.logging import LogFormat, LogLevel, configure_logging

    level, _, log_format = choice.partition(":")
    for known_level in get_args(LogLevel):
        for known_format in get_args(LogFormat):
            if (level, log_format) == (known_level, known_format):
                configure_logging("worker", known_level, known_format)
    logging.getLogger("vllm").handlers.insert(0, StartFailures())
