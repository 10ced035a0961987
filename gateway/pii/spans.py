"""What the detector reports and what the filter raises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of text that is personal data.

    `start` and `end` count Unicode code points of the caller's own text, `end` is exclusive; `score` is the
    confidence, above 0 up to 1. A span never holds the value.
    """

    start: int
    end: int
    type: str
    score: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A span with its place in a request; it never holds the value.

    `field` is a JSON pointer (RFC 6901) such as "/messages/0/content". For tool arguments, `start` and `end`
    count in the decoded string leaf. `action` is "mask", or "allow" for data that the caller let through.
    """

    field: str
    start: int
    end: int
    type: str
    score: float
    action: str = "mask"


class PiiError(Exception):
    """The filter could not do its work. The request must be refused; nothing was masked in part."""


class PiiRefusedError(PiiError):
    """The request holds something that cannot be inspected, or personal data where it cannot be masked.

    `field` is a JSON pointer. `reason` names the ErrorReason to answer with (without its prefix):
    FIELD_REFUSED for what cannot be inspected, PII_BLOCKED for what cannot be masked.
    """

    def __init__(self, reason: str, field: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
