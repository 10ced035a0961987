"""Finds personal data: normalise, scan for candidates, validate, resolve overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sealmesh.gateway.pii.candidates import Candidate, Scanner, resolve
from sealmesh.gateway.pii.digits import NumberScanner
from sealmesh.gateway.pii.mailboxes import MailboxScanner
from sealmesh.gateway.pii.normalize import View, normalize
from sealmesh.gateway.pii.spans import Span

# Characters of the shortest value of any type, "a@b.cn".
_SHORTEST = 6
# How often a text is scanned at most; each round after the first without what was found before.
_ROUNDS = 3
# Of a private-use plane: part of no value, no label and no separator.
_BLANK = "\ue000"


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
        found = self._scan(view, context)
        if not found:
            return []
        for _ in range(_ROUNDS - 1):
            # A value may hide another one beside it, as digit groups do that seem to go on.
            more = self._scan(replace(view, text=_blank(view.text, found)), context)
            if not more:
                break
            found = sorted(found + more, key=lambda candidate: candidate.start)
        return [
            Span(*view.to_source(candidate.start, candidate.end), candidate.type, candidate.score)
            for candidate in found
        ]

    def _scan(self, view: View, context: str) -> list[Candidate]:
        candidates: list[Candidate] = []
        for scanner in self._scanners:
            candidates += scanner.scan(view, context)
        return resolve(candidates) if candidates else []


def _blank(text: str, found: list[Candidate]) -> str:
    out: list[str] = []
    done = 0
    for candidate in found:
        out += (text[done : candidate.start], _BLANK * (candidate.end - candidate.start))
        done = candidate.end
    out.append(text[done:])
    return "".join(out)
