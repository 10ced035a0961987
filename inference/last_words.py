"""How an engine process tells the worker, in one line, why it could not start.

vLLM reports no more than that its engine process ended. The line goes through a file in the worker's
private folder in memory; it holds names and reasons, never content.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["LAST_WORDS_VARIABLE", "hear", "say"]

LAST_WORDS_VARIABLE = "SEALMESH_ENGINE_LAST_WORDS"
_SEPARATOR = "\t"


def say(reason: str, message: str) -> None:
    """Leaves the reason (name of a common.v1.ErrorReason) and one line, unless something is there already."""
    name = os.environ.get(LAST_WORDS_VARIABLE)
    if not name:
        return
    path = Path(name)
    if not path.exists():
        # Several ranks may fail at once; the first one's reason is as good as any.
        path.write_text(f"{reason}{_SEPARATOR}{' '.join(message.split())}", encoding="utf-8")


def hear(path: Path) -> tuple[str, str] | None:
    """(reason, message) that an engine process left, or None."""
    try:
        reason, separator, message = path.read_text(encoding="utf-8").partition(_SEPARATOR)
    except FileNotFoundError:
        return None
    return (reason, message) if separator else None
