"""Puts values back in place of placeholders, in text that arrives in pieces."""

from __future__ import annotations

from sealmesh.gateway.pii.json_text import json_string
from sealmesh.gateway.pii.placeholders import (
    CLOSING,
    MAX_PADDING,
    MAX_SEPARATORS,
    OPENING,
    SEPARATORS,
    RestoreTable,
    fold,
)

_NO, _PARTIAL, _MATCH = range(3)
_OPENING = frozenset(OPENING)
_CLOSING = frozenset(CLOSING)
_SEPARATORS = frozenset(SEPARATORS)
# Inside serialised JSON a backslash begins an escape.
_JSON_SEPARATORS = _SEPARATORS - {"\\"}


def _word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char == "_")


class Restorer:
    """An incremental automaton: what it has put out after `flush` depends on the text, never on its pieces.

    A placeholder is recognised as a whole token, whatever its case, its brackets (or none), its separator and
    padding inside the brackets. Only a tail that can still become a placeholder of the request is held back.
    With `json_escaped`, the text is the inside of serialised JSON and values are escaped as JSON strings are.
    """

    def __init__(self, table: RestoreTable, *, json_escaped: bool = False) -> None:
        self._table = table
        self._json_escaped = json_escaped
        self._separators = _JSON_SEPARATORS if json_escaped else _SEPARATORS
        self._held = ""
        self._before = ""

    @property
    def held(self) -> str:
        """The text that waits for its continuation."""
        return self._held

    def feed(self, text: str) -> str:
        """Takes the next piece and returns what is certain by now."""
        return self._run(text, last=False)

    def flush(self) -> str:
        """Ends the text and returns what was held back. The restorer is ready for another text then."""
        rest = self._run("", last=True)
        self._before = ""
        return rest

    def _run(self, text: str, *, last: bool) -> str:
        buffer = self._held + text
        if not self._table or not buffer:
            return buffer
        out: list[str] = []
        done = 0
        position = 0
        self._held = ""
        for_start = self._table.start.search
        while (match := for_start(buffer, position)) is not None:
            at = match.start()
            before = buffer[at - 1] if at else self._before
            verdict, end, value = self._match(buffer, at, before, last)
            if verdict == _PARTIAL:
                out.append(buffer[done:at])
                self._held = buffer[at:]
                self._before = before
                return "".join(out)
            if verdict == _MATCH:
                out.append(buffer[done:at])
                out.append(json_string(value)[1:-1] if self._json_escaped else value)
                done = position = end
            else:
                position = at + 1
        out.append(buffer[done:])
        self._before = buffer[-1]
        return "".join(out)

    def _match(self, buffer: str, at: int, before: str, last: bool) -> tuple[int, int, str]:
        """Reads one placeholder at `at`: the verdict, where it ends, what it stands for."""
        table = self._table
        size = len(buffer)
        stop = _NO if last else _PARTIAL
        position = at
        bracketed = buffer[at] in _OPENING
        if bracketed:
            position += 1
            position = _skip(buffer, position, " ", MAX_PADDING)
        elif before and _word(before):
            return _NO, at, ""

        label = ""
        while position < size and (longer := label + fold(buffer[position])) in table.label_prefixes:
            label = longer
            position += 1
        if position == size:
            return stop, at, ""
        main = table.label_of.get(label)
        if main is None:
            return _NO, at, ""

        separated = _skip(buffer, position, self._separators, MAX_SEPARATORS)
        if separated == size:
            return stop, at, ""
        if separated == position:
            return _NO, at, ""
        position = separated

        code = ""
        while position < size and (main, longer := code + fold(buffer[position])) in table.viable:
            code = longer
            position += 1
        entry = table.entries.get(code)
        if position == size and not last:
            return _PARTIAL, at, ""
        if entry is None or entry.label != main:
            return _NO, at, ""
        if position < size and _word(buffer[position]):
            return _NO, at, ""
        if not bracketed:
            return _MATCH, position, entry.value

        position = _skip(buffer, position, " ", MAX_PADDING)
        if position == size:
            return stop, at, ""
        if buffer[position] not in _CLOSING:
            return _NO, at, ""
        return _MATCH, position + 1, entry.value


def _skip(buffer: str, position: int, chars: str | frozenset[str], most: int) -> int:
    end = min(len(buffer), position + most)
    while position < end and buffer[position] in chars:
        position += 1
    return position
