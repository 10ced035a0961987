"""Path templates of ``google.api.http`` rules, compiled into matchers.

The syntax is that of ``google/api/http.proto``::

    Template = "/" Segments [ Verb ] ;
    Segments = Segment { "/" Segment } ;
    Segment  = "*" | "**" | LITERAL | Variable ;
    Variable = "{" FieldPath [ "=" Segments ] "}" ;
    FieldPath = IDENT { "." IDENT } ;
    Verb     = ":" LITERAL ;

A path is matched in its raw, percent-encoded form, segment by segment, so an encoded slash never moves a
segment boundary. Captured values are decoded as the same document asks: a variable of one segment is
decoded completely, a variable of several keeps ``%2F`` and ``%2f``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote_to_bytes

_IDENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LITERAL = re.compile(r"[^/{}*:=]+")
_ENCODED_SLASH = re.compile(r"(%2[Ff])")


class TemplateError(ValueError):
    """A path template that does not follow the grammar; the message says where."""


class Wildcard(Enum):
    """A segment that matches any text."""

    ONE = "*"
    MANY = "**"


Segment = str | Wildcard


@dataclass(frozen=True, slots=True)
class Variable:
    """A captured part of a path: segments ``start`` to ``end`` (exclusive) of the template."""

    field_path: tuple[str, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A compiled template. ``segments`` holds literals (decoded) and wildcards, ``verb`` has no colon."""

    source: str
    segments: tuple[Segment, ...]
    variables: tuple[Variable, ...]
    verb: str

    @classmethod
    def parse(cls, source: str) -> PathTemplate:
        """Compile ``source``; raises TemplateError."""
        return _Parser(source).template()

    @property
    def specificity(self) -> tuple[tuple[int, ...], int]:
        """Sort key: literals before ``*`` before ``**``, a verb before none, segment by segment."""
        ranks = tuple(
            2 if segment is Wildcard.MANY else 1 if segment is Wildcard.ONE else 0
            for segment in self.segments
        )
        return ranks, 0 if self.verb else 1

    def match(self, raw_path: str) -> dict[tuple[str, ...], str] | None:
        """Values of the variables by field path when ``raw_path`` (percent-encoded, no query) matches."""
        if not raw_path.startswith("/"):
            return None
        parts = raw_path[1:].split("/")
        if self.verb:
            head, colon, verb = parts[-1].rpartition(":")
            if not colon or _decode(verb) != self.verb:
                return None
            parts[-1] = head
        spans = self._spans(parts)
        if spans is None:
            return None
        values: dict[tuple[str, ...], str] = {}
        for variable in self.variables:
            captured = parts[spans[variable.start] : spans[variable.end]]
            single = variable.end - variable.start == 1 and self.segments[variable.start] is not Wildcard.MANY
            value = _decode(captured[0]) if single else _decode_keeping_slashes("/".join(captured))
            if value is None:
                return None
            values[variable.field_path] = value
        return values

    def _spans(self, parts: list[str]) -> list[int] | None:
        """Where each template segment begins in ``parts`` (with one more entry for the end), or None."""
        fixed = len(self.segments) - 1 if Wildcard.MANY in self.segments else len(self.segments)
        many = len(parts) - fixed
        if many < 0 or (fixed == len(self.segments) and many != 0):
            return None
        spans: list[int] = []
        at = 0
        for segment in self.segments:
            spans.append(at)
            if segment is Wildcard.MANY:
                at += many
                continue
            if segment is Wildcard.ONE:
                if not parts[at]:
                    return None
            elif _decode(parts[at]) != segment:
                return None
            at += 1
        spans.append(at)
        return spans


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._segments: list[Segment] = []
        self._variables: list[Variable] = []

    def template(self) -> PathTemplate:
        self._expect("/")
        self._parse_segments(inside_variable=False)
        verb = ""
        if self._peek() == ":":
            self._at += 1
            verb = self._literal()
        if self._at != len(self._source):
            raise self._error("unexpected text")
        if self._segments.count(Wildcard.MANY) > 1 or (
            Wildcard.MANY in self._segments and self._segments[-1] is not Wildcard.MANY
        ):
            raise TemplateError(f"path template {self._source!r}: '**' may stand once, as the last segment")
        paths = [variable.field_path for variable in self._variables]
        if len(set(paths)) != len(paths):
            raise TemplateError(f"path template {self._source!r}: a field is captured twice")
        return PathTemplate(self._source, tuple(self._segments), tuple(self._variables), verb)

    def _parse_segments(self, *, inside_variable: bool) -> None:
        while True:
            self._parse_segment(inside_variable=inside_variable)
            if self._peek() != "/":
                return
            self._at += 1

    def _parse_segment(self, *, inside_variable: bool) -> None:
        if self._source.startswith("**", self._at):
            self._at += 2
            self._segments.append(Wildcard.MANY)
        elif self._peek() == "*":
            self._at += 1
            self._segments.append(Wildcard.ONE)
        elif self._peek() == "{":
            if inside_variable:
                raise self._error("a variable inside a variable")
            self._parse_variable()
        else:
            self._segments.append(self._literal())

    def _parse_variable(self) -> None:
        self._expect("{")
        path = [self._identifier()]
        while self._peek() == ".":
            self._at += 1
            path.append(self._identifier())
        start = len(self._segments)
        if self._peek() == "=":
            self._at += 1
            self._parse_segments(inside_variable=True)
        else:
            self._segments.append(Wildcard.ONE)
        self._expect("}")
        self._variables.append(Variable(tuple(path), start, len(self._segments)))

    def _identifier(self) -> str:
        found = _IDENT.match(self._source, self._at)
        if found is None:
            raise self._error("expected a field name")
        self._at = found.end()
        return found.group()

    def _literal(self) -> str:
        found = _LITERAL.match(self._source, self._at)
        if found is None:
            raise self._error("expected a path segment")
        self._at = found.end()
        literal = _decode(found.group())
        if literal is None:
            raise self._error("bad percent-encoding")
        return literal

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"expected {character!r}")
        self._at += 1

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _error(self, what: str) -> TemplateError:
        return TemplateError(f"path template {self._source!r}: {what} at position {self._at}")


def _decode(text: str) -> str | None:
    if "%" not in text:
        return text
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        return None


def _decode_keeping_slashes(text: str) -> str | None:
    if "%" not in text:
        return text
    pieces = _ENCODED_SLASH.split(text)
    # Odd pieces are the encoded slashes themselves; a character cannot straddle one.
    decoded = [piece if index % 2 else _decode(piece) for index, piece in enumerate(pieces)]
    return None if None in decoded else "".join(piece for piece in decoded if piece is not None)
