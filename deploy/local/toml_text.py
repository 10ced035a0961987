"""Writes TOML (v1.0.0) tables; the standard library only reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

TomlValue: TypeAlias = "str | int | float | bool | Sequence[TomlValue] | Mapping[str, TomlValue]"

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(document: Mapping[str, TomlValue]) -> str:
    """A document whose top-level tables become sections; tables below them are written inline."""
    lines: list[str] = []
    for key, value in document.items():
        if not isinstance(value, Mapping):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in document.items():
        if isinstance(value, Mapping):
            if lines:
                lines.append("")
            lines.append(f"[{_key(key)}]")
            lines += [f"{_key(name)} = {_value(item)}" for name, item in value.items()]
    return "".join(f"{line}\n" for line in lines)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: TomlValue) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case int():
            return str(value)
        case float():
            if math.isfinite(value):
                return repr(value)
            return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        case Mapping():
            inner = ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            return f"[{', '.join(_value(item) for item in value)}]"


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL and for surrogate pairs, which JSON escapes.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
