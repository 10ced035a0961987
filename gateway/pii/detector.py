"""Finds personal data: normalise, scan for candidates, validate, resolve overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from sealmesh.gateway.pii.candidates import Candidate, Scanner, resolve
from sealmesh.gateway.pii.digits import NumberScanner
from sealmesh.gateway.pii.mailboxes import MailboxScanner
from sealmesh.gateway.pii.normalize import normalize
from sealmesh.gateway.pii.spans import Span

# Characters of the shortest value of any type, "a@b.cn".
_SHORTEST = 6


class Detector:
    """Detects what its scanners know. Holds no state of a call; safe to share between threads."""

    def __init__(self, scanners: Sequence[Scanner] | None = None) -> None:
        self._scanners = tuple(scanners) if scanners is not None else (NumberScanner(), MailboxScanner())

    def detect(self, text: str, context: str = "") -> list[Span]:
        """Spans of personal data in order, none overlapping another. Linear in the length of the text.

        `context` is what stands before the text and may label it, for example the key of a JSON member.
        """
        if len(text) < _SHORTEST:
            return []
        view = normalize(text)
        candidates: list[Candidate] = []
        for scanner in self._scanners:
            candidates += scanner.scan(view, context)
        if not candidates:
            return []
        spans = []
        for found in resolve(candidates):
            start, end = view.to_source(found.start, found.end)
            spans.append(Span(start, end, found.type, found.score))
        return spans
