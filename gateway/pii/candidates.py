"""What scanners propose, and how overlapping proposals are resolved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from sealmesh.gateway.pii.normalize import View


@dataclass(frozen=True, slots=True)
class Candidate:
    """A range of a view that may be personal data; `valid` when a checksum or a strict grammar holds."""

    start: int
    end: int
    type: str
    score: float
    valid: bool
    priority: int

    def rank(self) -> tuple[bool, int, int, int]:
        """Sorts the better candidate first: validated, then longer, then by priority, then from the left."""
        return (not self.valid, self.start - self.end, -self.priority, self.start)


class Scanner(Protocol):
    """Finds candidates of some types in a view. Holds no state of a call."""

    def scan(self, view: View, context: str) -> Iterable[Candidate]:
        """Candidates in any order, in linear time; `context` is what stands before the text."""


def resolve(candidates: list[Candidate]) -> list[Candidate]:
    """Joins overlapping candidates: the best gives type and score, the union of the ranges is masked."""
    ordered = sorted(candidates, key=lambda candidate: candidate.start)
    resolved: list[Candidate] = []
    cluster = [ordered[0]]
    end = ordered[0].end
    for candidate in ordered[1:]:
        if candidate.start < end:
            cluster.append(candidate)
            end = max(end, candidate.end)
        else:
            resolved.append(_merge(cluster, end))
            cluster, end = [candidate], candidate.end
    resolved.append(_merge(cluster, end))
    return resolved


def _merge(cluster: list[Candidate], end: int) -> Candidate:
    best = min(cluster, key=Candidate.rank)
    if len(cluster) == 1:
        return best
    return Candidate(cluster[0].start, end, best.type, best.score, best.valid, best.priority)
