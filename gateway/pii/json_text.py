"""Serialised JSON as text: its tokens, its strings, its pointers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import orjson
from sealmesh.gateway.pii.spans import PiiRefusedError

Path = tuple[str | int, ...]


def json_pointer(path: Path) -> str:
    """The path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


@dataclass(frozen=True, slots=True)
class JsonToken:
    """A string or number token in serialised JSON: its range there, the text that it stands for, its key."""

    start: int
    end: int
    text: str = field(repr=False)
    context: str = field(default="", repr=False)


def json_string(text: str) -> str:
    """The text as a JSON string with its quotes; escaped only where half a surrogate pair demands it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


# Group 1 is there when the token is a key.
_JSON_TOKEN_RE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*+:)?|-?[0-9][0-9.eE+\-]*+', re.DOTALL)


def json_tokens(text: str, path: Path = ()) -> list[JsonToken] | None:
    """The string tokens (keys too) and number tokens of serialised JSON, or None where it is not JSON.

    Works on the text, so that formatting, key order and number spelling of everything else stay as they are.
    Raises PiiRefusedError for JSON that is nested too deeply to read; `path` is where it stands.
    """
    if not _is_json(text, path):
        return None
    tokens = []
    key = ""
    for match in _JSON_TOKEN_RE.finditer(text):
        start, end = match.span()
        if text[start] != '"':
            tokens.append(JsonToken(start, end, match[0], key))
        elif match[1] is None:
            tokens.append(JsonToken(start, end, json.loads(match[0]), key))
        else:
            # White space may stand between a key and its colon.
            end = start + len(match[0]) - len(match[1])
            key = json.loads(text[start:end])
            tokens.append(JsonToken(start, end, key))
    return tokens


def _is_json(text: str, path: Path) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        # The engine reads with `json`, which also takes NaN and halves of surrogate pairs.
        try:
            json.loads(text)
        except RecursionError:
            raise PiiRefusedError("FIELD_REFUSED", json_pointer(path), "is JSON nested too deeply") from None
        except ValueError:
            return False
    return True
