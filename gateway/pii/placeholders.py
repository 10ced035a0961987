"""Placeholders: how they are written, derived and parsed.

A placeholder is `[PHONE_k7q2m]`: a label that tells the model what kind of thing it is, and a code that is
HMAC-SHA256 under the tenant's key over epoch, type and value. ASCII brackets and letters cost a small model
half the tokens of `⟦手机_k7q2m⟧`, never split into bytes, and stay themselves inside JSON whoever encodes it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from sealmesh.gateway.pii.spans import PiiError

# No 0/o, 1/l/i: codes are also read by people.
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
CODE_LENGTH = 5
_MAX_CODE_LENGTH = 24
_CHEAP_LOOKUPS = 32

# The label of each type, then other names that models put in its place.
LABELS: dict[str, tuple[str, ...]] = {
    "CN_ID": ("IDCARD", "ID", "身份证", "身份证号", "身份证号码"),
    "CN_MOBILE": ("PHONE", "MOBILE", "TEL", "手机", "手机号", "手机号码", "电话", "电话号码"),
    "EMAIL": ("EMAIL", "MAIL", "邮箱", "电子邮件"),
    "BANK_CARD": ("CARD", "BANKCARD", "银行卡", "卡号", "银行卡号"),
}
_OTHER_LABELS = ("DATA", "数据")

OPENING = "[⟦【［（(〔「『〖{<《"
CLOSING = "]⟧】］）)〕」』〗}>》"
SEPARATORS = "_-:： \\＿－"
MAX_SEPARATORS = 3
MAX_PADDING = 2

_FOLD = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def fold(text: str) -> str:
    """Lower case of ASCII letters only: no other character may turn into one."""
    return text.translate(_FOLD)


def labels_of(kind: str) -> tuple[str, ...]:
    """The label of a type, first, and its tolerated alternatives."""
    return LABELS.get(kind, _OTHER_LABELS)


class PlaceholderKey:
    """Derives codes under a tenant's PII key (16 bytes or more) and epoch."""

    def __init__(self, tenant_key: bytes, epoch: int) -> None:
        if len(tenant_key) < 16:
            raise ValueError("the tenant's PII key must have 16 bytes or more")
        if not 0 <= epoch < 1 << 64:
            raise ValueError("the epoch must be an unsigned 64-bit number")
        self._mac = hmac.new(
            tenant_key, b"sealmesh pii placeholder v1\0" + epoch.to_bytes(8, "big"), hashlib.sha256
        )

    def code(self, kind: str, value: str) -> str:
        """The full code of a value; a placeholder carries a prefix of it."""
        mac = self._mac.copy()
        mac.update(kind.encode() + b"\0" + value.encode("utf-8", "surrogatepass"))
        number = int.from_bytes(mac.digest(), "big")
        chars = []
        for _ in range(_MAX_CODE_LENGTH):
            number, digit = divmod(number, len(_ALPHABET))
            chars.append(_ALPHABET[digit])
        return "".join(chars)


@lru_cache(maxsize=256)
def _label_tables(mains: frozenset[str]) -> tuple[Mapping[str, str], frozenset[str], re.Pattern[str]]:
    """What a restore table knows about labels, for the main labels that occur in a request."""
    label_of = {
        fold(label): fold(labels[0])
        for labels in (*LABELS.values(), _OTHER_LABELS)
        if fold(labels[0]) in mains
        for label in labels
    }
    prefixes = frozenset(label[:n] for label in label_of for n in range(1, len(label) + 1))
    first = {label[0] for label in label_of}
    first |= {char.upper() for char in first}
    return (
        MappingProxyType(label_of),
        prefixes,
        re.compile(f"[{re.escape(OPENING + ''.join(sorted(first)))}]"),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """What a code stands for in one request; `label` is the folded main label of its type."""

    label: str
    value: str = field(repr=False)


class RestoreTable:
    """The placeholders of one request, ready for parsing. Never outlives the request.

    `label_of` maps every tolerated label to the main one, `label_prefixes` holds their beginnings, `viable`
    the pairs of a main label and the beginning of a code; `start` finds where a placeholder can begin.
    """

    __slots__ = ("entries", "label_of", "label_prefixes", "start", "viable")

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries
        self.viable = frozenset(
            (entry.label, code[:n]) for code, entry in entries.items() for n in range(1, len(code) + 1)
        )
        self.label_of, self.label_prefixes, self.start = _label_tables(
            frozenset(entry.label for entry in entries.values())
        )

    def __bool__(self) -> bool:
        return bool(self.entries)


NO_PLACEHOLDERS = RestoreTable({})

_ANY_LABEL = tuple(fold(label) for labels in (*LABELS.values(), _OTHER_LABELS) for label in labels)
# The code is only looked at, so that a label which is another look-alike's code is still seen.
_LOOK_ALIKE_RE = re.compile(
    rf"(?:{'|'.join(sorted(_ANY_LABEL, key=len, reverse=True))})"
    rf"(?=[{re.escape(SEPARATORS)}]{{1,{MAX_SEPARATORS}}}([a-z0-9]+))"
)


class TypedCodes:
    """Codes of everything in the texts of a request that a restorer could take for a placeholder.

    A request never assigns these, so what a person typed comes back as typed and never as someone's value.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # A line break belongs to no placeholder. Lower-casing must touch ASCII letters only, as `fold` does;
        # it is many times faster, and just two other characters would turn into ASCII letters.
        self._text = "\n".join(texts).replace("\u212a", "\ufffd").replace("\u0130", "\ufffd").lower()
        self._codes: frozenset[str] | None = None
        self._lookups = 0

    def __contains__(self, code: object) -> bool:
        if not isinstance(code, str):
            return False
        if self._codes is None:
            # Looking for a few codes is faster than parsing the text; for many it would take the square.
            self._lookups += 1
            if self._lookups <= _CHEAP_LOOKUPS and code not in self._text:
                return False
            self._codes = frozenset(_LOOK_ALIKE_RE.findall(self._text))
        return code in self._codes


class PlaceholderBook:
    """Assigns the placeholders of one request."""

    def __init__(self, key: PlaceholderKey, reserved: Container[str]) -> None:
        self._key = key
        self._reserved = reserved
        self._entries: dict[str, Entry] = {}
        self._by_surface: dict[tuple[str, str], str] = {}
        self._by_value: dict[tuple[str, str], str] = {}

    def placeholder(self, kind: str, canonical: str, surface: str) -> str:
        """The placeholder of a value as it was written; other spellings of it share its first letters."""
        known = self._by_surface.get((kind, surface))
        if known is not None:
            return known
        labels = labels_of(kind)
        base = self._by_value.get((kind, canonical))
        if base is None:
            code = self._free(self._key.code(kind, canonical), CODE_LENGTH)
            self._by_value[kind, canonical] = code
        else:
            code = self._free(base + self._key.code(kind, "\0" + surface), len(base) + 2)
        self._entries[code] = Entry(fold(labels[0]), surface)
        text = f"[{labels[0]}_{code}]"
        self._by_surface[kind, surface] = text
        return text

    def _free(self, full: str, length: int) -> str:
        for size in range(length, len(full) + 1):
            code = full[:size]
            if code not in self._entries and code not in self._reserved:
                return code
        raise PiiError("no free placeholder is left for a value of this request")

    def table(self) -> RestoreTable:
        """The finished table of the request."""
        return RestoreTable(dict(self._entries))
