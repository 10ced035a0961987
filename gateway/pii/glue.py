"""The ASCII letters and digits that touch a number, and whether all of it looks like a hash or an id."""

from __future__ import annotations

import re
from dataclasses import dataclass

# How far to look on either side: a hash shows what it is within this many characters.
_REACH = 64
_AFTER_RE = re.compile(r"[0-9A-Za-z]*")
_DIGIT_RE = re.compile(r"[0-9]")
_LETTER_RE = re.compile(r"[A-Za-z]")
_HEX_RE = re.compile(r"(?:[0-9a-f]*|[0-9A-F]*)\Z")
_UUID_RE = re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z])")
_UUID_LENGTH = 36
# Ids in base64 or base62 are at least so long; shorter mixtures are words with a number in them.
_SHORTEST_BASE64 = 20


@dataclass(frozen=True, slots=True)
class Glue:
    """What touches a number: ASCII letters and digits, up to 64 characters `before` and `after` it."""

    before: str
    after: str
    size: int
    in_uuid: bool

    def like_a_hash(self) -> bool:
        """Whether the number is a part of a hexadecimal literal or hash, of a UUID or of base64."""
        if self.in_uuid or self.before in ("0x", "0X"):
            return True
        around = self.before + self.after
        # Letters alone are a word that touches the number.
        if _DIGIT_RE.search(around) is None:
            return False
        if _HEX_RE.match(around):
            return True
        mixed = around != around.lower() and around != around.upper()
        return mixed and len(around) + self.size >= _SHORTEST_BASE64


def glue_of(text: str, start: int, end: int) -> Glue | None:
    """What touches the number in ``text[start:end]``, or None when no ASCII letter does."""
    if not _letter_at(text, start - 1) and not _letter_at(text, end):
        return None
    before = text[max(0, start - _REACH) : start]
    match = _AFTER_RE.match(text, end, end + _REACH)
    return Glue(
        before=_trailing(before),
        after=match[0] if match is not None else "",
        size=end - start,
        in_uuid=_in_uuid(text, start, end),
    )


def _in_uuid(text: str, start: int, end: int) -> bool:
    first, last = max(0, start - _UUID_LENGTH), end + _UUID_LENGTH
    # Most windows hold no dash, and then there is no need to search.
    if text.find("-", first, last) < 0:
        return False
    return any(found.start() < end and start < found.end() for found in _UUID_RE.finditer(text, first, last))


def _letter_at(text: str, index: int) -> bool:
    return 0 <= index < len(text) and _LETTER_RE.match(text, index) is not None


def _trailing(before: str) -> str:
    size = len(before)
    while size and before[size - 1].isascii() and before[size - 1].isalnum():
        size -= 1
    return before[size:]
