"""What a check of `sealmesh doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    """What was looked at; "" takes the name under which the check runs."""
    status: Status
    """ "ok"; "warn": a mesh runs, but worse or less safely than it could; "fail": it does not run."""
    detail: str
    """What was found, one line."""
    hint: str = ""
    """What to do, one line; "" when there is nothing to do."""


def ok(detail: str) -> Check:
    """Nothing to do."""
    return Check("", "ok", detail)


def warn(detail: str, hint: str) -> Check:
    """It runs, but worse than it could."""
    return Check("", "warn", detail, hint)


def fail(detail: str, hint: str) -> Check:
    """It does not run."""
    return Check("", "fail", detail, hint)
