"""The `vllm.general_plugins` entry point: loaded by vLLM in every process of an engine.

Cheap when the process has nothing to do with sealmesh: any vLLM in this environment loads it.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Registers the load format `sealed`; ties an engine process to the life of its worker."""
    from sealmesh.inference.parent_watch import ENGINE_OF_WORKER_VARIABLE, die_with_parent

    if ENGINE_OF_WORKER_VARIABLE in os.environ:
        die_with_parent()

    from sealmesh.inference.loader import register_loader

    register_loader()
