"""Exit codes of `sealmesh`, and errors as one line.

0 done · 1 it failed (mesh not running, service unreachable, out of space, …) · 2 wrong usage or
configuration · 3 refused: integrity, key, credential or policy · 130 interrupted.
"""

from __future__ import annotations

from enum import IntEnum

from sealmesh.deploy.cli.console import Terminal


class Exit(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    INTERRUPTED = 130


_USAGE_REASONS = frozenset({"INVALID_REQUEST", "CONFIGURATION_INVALID", "UNKNOWN_METHOD"})
_REFUSED_REASONS = frozenset(
    {
        "CREDENTIAL_INVALID",
        "FIELD_REFUSED",
        "INTEGRITY_FAILURE",
        "KEY_DENIED",
        "KEY_SLOT_MISMATCH",
        "PII_BLOCKED",
        "ROLE_DENIED",
    }
)


class CommandError(Exception):
    """A command cannot do what it was asked; the message is one line for the user."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code


def report(error: Exception, terminal: Terminal) -> int:
    """Prints the error as one line and returns the exit code that it stands for."""
    from sealmesh.telemetry.runtime.errors import SealmeshError

    match error:
        case CommandError():
            terminal.error(str(error))
            return error.code
        case SealmeshError():
            terminal.error(error.message)
            return exit_of(error.reason)
        case OSError():
            where = f": {error.filename}" if error.filename else ""
            terminal.error(f"{error.strerror or error}{where}")
            return Exit.FAILED
        case _:
            terminal.error(
                f"defect in sealmesh: {type(error).__name__}: {error} (run again with --debug for the place)"
            )
            return Exit.FAILED


def exit_of(reason: str) -> Exit:
    """The exit code for a reason of common.v1.ErrorReason."""
    if reason in _USAGE_REASONS:
        return Exit.USAGE
    return Exit.REFUSED if reason in _REFUSED_REASONS else Exit.FAILED
