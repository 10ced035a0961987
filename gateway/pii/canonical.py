"""The form in which two spellings of one value are equal; placeholders are derived from it."""

from __future__ import annotations

import re
from collections.abc import Callable

from sealmesh.gateway.pii.normalize import normalize


def canonical_form(kind: str, value: str) -> str:
    """The form in which two spellings of one value are equal: bare digits, or a lower-case mailbox."""
    plain = normalize(value).text
    by_type: Callable[[str], str] | None = _CANONICAL.get(kind)
    return by_type(plain) if by_type is not None else plain.strip()


def _bare(plain: str) -> str:
    return re.sub(r"[^0-9A-Z]", "", plain.upper())


def _bare_mobile(plain: str) -> str:
    return _bare(plain)[-11:]


_CANONICAL: dict[str, Callable[[str], str]] = {
    "CN_ID": _bare,
    "BANK_CARD": _bare,
    "CN_MOBILE": _bare_mobile,
    "EMAIL": str.lower,
}
