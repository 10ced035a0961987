"""Views of a text in which evasions by character choice are undone, with a map back to the text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Code points of the digit zero of every decimal script in Unicode 15 (category Nd), ASCII left out.
# Ten digits follow one another in each, which a unit test holds against `unicodedata`.
_DECIMAL_ZEROS = (
    0x0660, 0x06F0, 0x07C0, 0x0966, 0x09E6, 0x0A66, 0x0AE6, 0x0B66, 0x0BE6, 0x0C66, 0x0CE6, 0x0D66, 0x0DE6,
    0x0E50, 0x0ED0, 0x0F20, 0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90, 0x1B50, 0x1BB0,
    0x1C40, 0x1C50, 0xA620, 0xA8D0, 0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0xFF10, 0x104A0, 0x10D30,
    0x11066, 0x110F0, 0x11136, 0x111D0, 0x112F0, 0x11450, 0x114D0, 0x11650, 0x116C0, 0x11730, 0x118E0,
    0x11950, 0x11C50, 0x11D50, 0x11DA0, 0x11F50, 0x16A60, 0x16AC0, 0x16B50, 0x1D7CE, 0x1D7D8, 0x1D7E2,
    0x1D7EC, 0x1D7F6, 0x1E140, 0x1E2F0, 0x1E4F0, 0x1E950, 0x1FBF0,
)  # fmt: skip

# Digits that are written inside a circle, bracket or as an index: (first code point, first digit, count).
_STYLED_DIGITS = (
    (0x2460, 1, 9), (0x24EA, 0, 1), (0x2474, 1, 9), (0x2488, 1, 9), (0x24F5, 1, 9), (0x24FF, 0, 1),
    (0x2776, 1, 9), (0x2780, 1, 9), (0x278A, 1, 9), (0x2070, 0, 1), (0x00B9, 1, 1), (0x00B2, 2, 2),
    (0x2074, 4, 6), (0x2080, 0, 10),
)  # fmt: skip

_SPACES = (0x00A0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)
_DASHES = (*range(0x2010, 0x2016), 0x2212, 0xFE58, 0xFE63, 0xFF0D)
_DOTS = (0x00B7, 0x2022, 0x2024, 0x2027, 0x30FB, 0xFF0E, 0xFF61)
_FULL_WIDTH = (*range(0xFF21, 0xFF3B), *range(0xFF41, 0xFF5B), 0xFF05, 0xFF0B, 0xFF20, 0xFF3F)

# Drawn as nothing, or only changes how its neighbours are drawn: (first, last).
_INVISIBLE = (
    (0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5),
    (0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x20E3, 0x20E3),
    (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xE0000, 0xE0FFF),
)  # fmt: skip

_BIDI_OPENERS = frozenset("\u202a\u202b\u202d\u202e\u2066\u2067\u2068")
_BIDI_CLOSERS = frozenset("\u202c\u2069")


def _one_to_one() -> dict[str, str]:
    table = {chr(zero + n): str(n) for zero in _DECIMAL_ZEROS for n in range(10)}
    table.update(
        {chr(first + n): str(digit + n) for first, digit, count in _STYLED_DIGITS for n in range(count)}
    )
    table.update({chr(code): " " for code in _SPACES})
    table.update({chr(code): "-" for code in _DASHES})
    table.update({chr(code): "." for code in _DOTS})
    table.update({chr(code): chr(code - 0xFEE0) for code in _FULL_WIDTH})
    table["\ufe6b"] = "@"
    return table


def _char_class(codes: Iterable[int]) -> str:
    """The inside of a regular expression class of the code points, neighbours joined to ranges."""
    ordered = sorted(codes)
    parts: list[str] = []
    index = 0
    while index < len(ordered):
        last = index
        while last + 1 < len(ordered) and ordered[last + 1] == ordered[last] + 1:
            last += 1
        parts.append(f"\\U{ordered[index]:08x}-\\U{ordered[last]:08x}")
        index = last + 1
    return "".join(parts)


_REPLACED = _one_to_one()
# `re` tests ranges beyond the Basic Multilingual Plane one by one, so that they are one range here.
_BEYOND_BMP = "\\U00010000-\\U0010ffff"
_REPLACED_RE = re.compile(
    "[" + _char_class(code for code in map(ord, _REPLACED) if code < 0x10000) + _BEYOND_BMP + "]"
)
_INVISIBLE_RE = re.compile("[" + "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in _INVISIBLE) + "]+")


_SPECIAL_RE = re.compile(
    "["
    + _char_class(
        {code for code in map(ord, _REPLACED) if code < 0x10000}
        | {code for first, last in _INVISIBLE for code in range(first, last + 1) if code < 0x10000}
    )
    + _BEYOND_BMP
    + "]"
)


@dataclass(frozen=True, slots=True)
class View:
    """A text as recognizers read it; `offsets[i]` is where character i stands in the source (None: at i)."""

    text: str
    source: str
    offsets: list[int] | None

    def to_source(self, start: int, end: int) -> tuple[int, int]:
        """Maps a non-empty range of the view to the caller's text, with the bidi controls around it."""
        if self.offsets is None:
            return start, end
        first, last = self.offsets[start], self.offsets[end - 1] + 1
        source = self.source
        while first > 0 and source[first - 1] in _BIDI_OPENERS:
            first -= 1
        while last < len(source) and source[last] in _BIDI_CLOSERS:
            last += 1
        return first, last


def normalize(text: str) -> View:
    """Undoes exotic digits, full-width letters, unusual spaces and dashes, and invisible characters.

    Runs in linear time; text in plain ASCII or ordinary Chinese is returned as it is.
    """
    if text.isascii():
        return View(text, text, None)
    if _SPECIAL_RE.search(text) is None:
        return View(text, text, None)
    plain = _REPLACED_RE.sub(lambda match: _REPLACED.get(match[0], match[0]), text)
    match = _INVISIBLE_RE.search(plain)
    if match is None:
        return View(plain, text, None)
    pieces: list[str] = []
    offsets: list[int] = []
    position = 0
    for match in _INVISIBLE_RE.finditer(plain):
        pieces.append(plain[position : match.start()])
        offsets.extend(range(position, match.start()))
        position = match.end()
    pieces.append(plain[position:])
    offsets.extend(range(position, len(plain)))
    return View("".join(pieces), text, offsets)
