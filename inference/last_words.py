"""How an engine process tells the worker, in one line, why it could not start.

vLLM reports no more than that its engine process ended. The line goes through a file in the worker's
private folder in memory; it holds names and reasons, never content.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

__all__ = ["LAST_WORDS_VARIABLE", "StartFailures", "hear", "say"]

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


class StartFailures(logging.Handler):
    """Says the first exception that vLLM logs in an engine process: why it did not start.

    To be the first handler of its logger: when a reason was said already that a person can act on, it ends
    the process in place of vLLM's tracebacks, which would bury that reason.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        said = hear(Path(os.environ[LAST_WORDS_VARIABLE])) if os.environ.get(LAST_WORDS_VARIABLE) else None
        if said is not None and said[0] != "ENGINE_FAILED":
            # Not an error here: multiprocessing prints a traceback for every other exception.
            raise SystemExit(1)
        lines = [line for line in str(error).splitlines() if line.strip()]
        say("ENGINE_FAILED", lines[0] if lines else type(error).__name__)


def hear(path: Path) -> tuple[str, str] | None:
    """(reason, message) that an engine process left, or None."""
    try:
        reason, separator, message = path.read_text(encoding="utf-8").partition(_SEPARATOR)
    except FileNotFoundError:
        return None
    return (reason, message) if separator else None
