"""Finds numbers: chains of digit groups, then the recognizers on every group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sealmesh.gateway.pii.candidates import Candidate
from sealmesh.gateway.pii.glue import glue_of
from sealmesh.gateway.pii.normalize import View
from sealmesh.gateway.pii.recognizers import NUMBER_RECOGNIZERS, NumberRecognizer

# Eleven digits or more, up to three separators between two of them. Possessive, so it never backtracks.
_CHAIN_RE = re.compile(r"[0-9](?:[ \t.\-_\r\n]{0,3}+[0-9]){10,}+(?:[Xx]|[ .\-][Xx](?![A-Za-z0-9]))?")
_GROUP_RE = re.compile(r"[0-9]+|[Xx]")
# A label and its filler lie within this many characters before the value.
_LABEL_REACH = 32
# Groups in the longest layout of any recognizer; more than that only stand alone.
_LONGEST_LAYOUT = 5


class NumberScanner:
    """Scans for the numbers of its recognizers."""

    def __init__(self, recognizers: Sequence[NumberRecognizer] = NUMBER_RECOGNIZERS) -> None:
        self._recognizers = tuple(recognizers)

    def scan(self, view: View, context: str) -> Iterator[Candidate]:
        """Candidates of all recognizers; a context such as "phone" labels a number at the start."""
        for match in _CHAIN_RE.finditer(view.text):
            chain = _Chain(view.text, match.start(), match.end(), context)
            for recognizer in self._recognizers:
                yield from _recognize(chain, recognizer)


class _Chain:
    """Digit groups with separators between them, for example "6222 0228 8382 7007"."""

    __slots__ = (
        "_labelled",
        "compact",
        "context",
        "ends",
        "group_at",
        "group_ends",
        "starts",
        "taken",
        "text",
    )

    def __init__(self, text: str, start: int, end: int, context: str = "") -> None:
        self.text = text
        self.context = context
        groups = [match.span() for match in _GROUP_RE.finditer(text, start, end)]
        self.starts = [group[0] for group in groups]
        self.ends = [group[1] for group in groups]
        self.compact = "".join([text[a:b] for a, b in groups]).upper()
        # group_ends[i]: digits in the groups up to and including i.
        total = 0
        self.group_ends: list[int] = []
        for a, b in groups:
            total += b - a
            self.group_ends.append(total)
        self.group_at = {end: group for group, end in enumerate(self.group_ends)}
        # Groups before this one belong to values that the recognizer at work has found.
        self.taken = 0
        self._labelled: dict[str, bool] = {}

    def labelled(self, recognizer: NumberRecognizer) -> bool:
        """Whether a label of the type stands right before the chain."""
        known = self._labelled.get(recognizer.type)
        if known is None:
            start = self.starts[0]
            if start and self.text[start - 1] == "+":
                start -= 1
            before = self.text[max(0, start - _LABEL_REACH) : start]
            if self.context and start < _LABEL_REACH:
                before = f"{self.context[-_LABEL_REACH:]}:{before}"
            known = recognizer.labels.announce(before)
            self._labelled[recognizer.type] = known
        return known

    def size(self, group: int) -> int:
        """Digits of a group."""
        return self.ends[group] - self.starts[group]

    def separator(self, group: int) -> str:
        """What stands between a group and the next."""
        return self.text[self.ends[group] : self.starts[group + 1]]


def _ascii_alnum(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _recognize(chain: _Chain, recognizer: NumberRecognizer) -> list[Candidate]:
    compact = chain.compact
    match = recognizer.shape.match
    group_at = chain.group_at.get
    found: list[Candidate] = []
    chain.taken = 0
    position = 0
    for group, group_end in enumerate(chain.group_ends):
        if match(compact, position):
            for length in recognizer.lengths:
                last = group_at(position + length)
                if last is None:
                    continue
                candidate = _validated(chain, recognizer, group, last, compact[position : position + length])
                if candidate is not None:
                    found.append(candidate)
                    chain.taken = last + 1
                    break
        position = group_end
    labelled = _labelled(chain, recognizer)
    if labelled is not None and (not found or labelled.end <= found[0].start):
        found.append(labelled)
    return found


def _validated(
    chain: _Chain, recognizer: NumberRecognizer, first: int, last: int, number: str
) -> Candidate | None:
    body = first
    start = chain.starts[first]
    if recognizer.country_code:
        if recognizer.shape.fullmatch(number) is None:
            return None
        prefix = len(number) - 11
        plus = start > 0 and chain.text[start - 1] == "+"
        if plus and prefix:
            start -= 1
        if prefix and chain.size(first) == prefix:
            # A bare "86" apart from the number is a quantity more often than a country code.
            if prefix == 2 and not plus and (first > 0 or chain.separator(first) != "-"):
                return None
            body += 1
    labelled = first == 0 and chain.labelled(recognizer)
    if _fraction(chain, first, last, start, labelled):
        return None
    glue = glue_of(chain.text, start, chain.ends[last])
    if glue is not None and not recognizer.glued(glue, labelled):
        return None
    if (
        body != last
        and not recognizer.any_layout
        and not labelled
        and not _written_so(chain, recognizer, body, last)
    ):
        return None
    if not recognizer.valid(number):
        return None
    score = max(recognizer.score(number), 0.99) if labelled else recognizer.score(number)
    return Candidate(start, chain.ends[last], recognizer.type, score, True, recognizer.priority)


def _labelled(chain: _Chain, recognizer: NumberRecognizer) -> Candidate | None:
    """The groups at the head of a labelled chain, as many as fit the type's loose shape."""
    fits: int | None = None
    for last, end in enumerate(chain.group_ends):
        if end > 20:
            break
        # A letter behind a value that no check digit vouches for makes it a word of its own.
        behind = chain.text[chain.ends[last] : chain.ends[last] + 1]
        if recognizer.labelled.fullmatch(chain.compact, 0, end) and not _ascii_alnum(behind):
            fits = last
            if last == 0:
                break
    if fits is None or not chain.labelled(recognizer):
        return None
    return Candidate(chain.starts[0], chain.ends[fits], recognizer.type, 0.7, False, recognizer.priority)


def _fraction(chain: _Chain, first: int, last: int, start: int, labelled: bool) -> bool:
    """Whether the groups are the fraction of a number below one."""
    text = chain.text
    return (
        not labelled
        and first == last
        and first > 0
        and text[start] != "+"
        and text[start - 1] == "."
        and chain.ends[first - 1] == start - 1
        and chain.starts[first - 1] == start - 2
        and text[start - 2] == "0"
    )


def _written_so(chain: _Chain, recognizer: NumberRecognizer, first: int, last: int) -> bool:
    """Whether the groups look like one number: not like cells of a table or items of a list."""
    separator = chain.separator(first)
    before = first > chain.taken and chain.separator(first - 1) == separator
    if before and last - first >= _LONGEST_LAYOUT:
        return False
    if any(chain.separator(group) != separator for group in range(first + 1, last)):
        return False
    sizes = tuple(chain.size(group) for group in range(first, last + 1))
    if len(sizes) == 4 and separator == "." and _is_ipv4(chain, first):
        return False
    if sizes in recognizer.layouts:
        # Groups of one size are cells of a table when it goes on to the left. To the right, more may follow a
        # number: a date, the expiry of a card.
        return len(set(sizes)) > 1 or not before or chain.size(first - 1) != sizes[0]
    if before or (last + 1 < len(chain.ends) and chain.separator(last) == separator):
        return False
    return len(sizes) == 2 or (len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0])


def _is_ipv4(chain: _Chain, first: int) -> bool:
    octets = [chain.text[chain.starts[group] : chain.ends[group]] for group in range(first, first + 4)]
    return all(octet.isdecimal() and int(octet) <= 255 for octet in octets)
