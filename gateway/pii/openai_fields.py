"""Walks OpenAI request bodies (chat and text completions) and finds the strings in them.

Every string value is masked, in fields that this module has never heard of too, except names that steer the
engine and the parts of JSON schemas that must match literally. What cannot be read at all is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import cast

import orjson
from sealmesh.gateway.pii.spans import PiiError, PiiRefusedError

Path = tuple[str | int, ...]

# A body nested deeper is refused; real ones stay below 30.
MAX_DEPTH = 128


class LeafKind(Enum):
    """What may be done to a string."""

    TEXT = "text"
    # Serialised JSON: its string and number tokens are masked one by one.
    JSON = "json"
    # Must reach the engine literally: personal data in it refuses the request.
    LITERAL = "literal"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One string of a body and where it stands."""

    path: Path
    text: str
    kind: LeafKind


def json_pointer(path: Path) -> str:
    """The path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


# Top-level fields that name things of the engine, or hold settings; never prose.
_LITERAL_FIELDS = frozenset({"model", "service_tier", "reasoning_effort", "truncation_side"})
# Fields that hold JSON schemas, at the paths that end so.
_SCHEMA_PATHS = frozenset(
    {("function", "parameters"), ("json_schema", "schema"), ("structured_outputs", "json")}
)
_SCHEMA_FIELDS = frozenset({"guided_json"})
# Names and grammars that must reach the engine as they are, at the paths that end so.
_LITERAL_PATHS = frozenset(
    {
        ("function", "name"),
        ("function_call", "name"),
        ("json_schema", "name"),
        ("structured_outputs", "regex"),
        ("structured_outputs", "grammar"),
        ("structured_outputs", "structural_tag"),
    }
)
_JSON_PATHS = frozenset({("function", "arguments"), ("function_call", "arguments")})
_LITERAL_KEYS = frozenset({"role", "type", "guided_regex", "guided_grammar"})
# Content that the filter cannot read.
_OPAQUE_FIELDS = frozenset({"prompt_embeds", "prompt_token_ids"})
_OPAQUE_PART_PREFIXES = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file")

_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMA_LITERALS = frozenset(
    {
        "enum", "const", "pattern", "required", "type", "format", "$ref", "$id", "$schema", "$anchor",
        "$dynamicRef", "$dynamicAnchor", "$vocabulary", "dependentRequired", "contentEncoding",
        "contentMediaType",
    }
)  # fmt: skip
_SCHEMA_DATA = frozenset({"default", "examples", "example"})


def request_leaves(body: dict[str, object], *, allow_uninspectable: bool = False) -> list[Leaf]:
    """Every string of the body, keys included, with what may be done to it.

    Raises PiiRefusedError for token ids, embeddings and media unless `allow_uninspectable`, and for a body
    that is nested too deeply.
    """
    return list(_Walker(allow_uninspectable).value(body, ()))


class _Walker:
    def __init__(self, allow_uninspectable: bool) -> None:
        self._allow = allow_uninspectable

    def value(self, node: object, path: Path, kind: LeafKind = LeafKind.TEXT) -> Iterator[Leaf]:
        if isinstance(node, str):
            yield Leaf(path, node, kind)
        elif isinstance(node, dict):
            self._check_depth(path)
            self._check_readable(node, path)
            for key, child in node.items():
                yield from self._member(str(key), child, (*path, key), kind)
        elif isinstance(node, list):
            self._check_depth(path)
            if path == ("prompt",) and any(isinstance(item, int | list) for item in node):
                self._refuse(path, "holds token ids, which the PII filter cannot read; send text")
            for index, child in enumerate(node):
                yield from self.value(child, (*path, index), kind)

    def _member(self, key: str, child: object, path: Path, kind: LeafKind) -> Iterator[Leaf]:
        yield Leaf(path, key, LeafKind.LITERAL)
        tail = tuple(str(part) for part in path[-2:])
        if len(path) == 1 and key in _OPAQUE_FIELDS and child is not None:
            self._refuse(path, "cannot be read by the PII filter; send text")
        if tail in _SCHEMA_PATHS or key in _SCHEMA_FIELDS:
            yield from self._schema(child, path)
        elif tail in _JSON_PATHS and isinstance(child, str):
            yield Leaf(path, child, LeafKind.JSON)
        elif (len(path) == 1 and key in _LITERAL_FIELDS) or tail in _LITERAL_PATHS or key in _LITERAL_KEYS:
            yield from self.value(child, path, LeafKind.LITERAL)
        else:
            yield from self.value(child, path, kind)

    def _schema(self, node: object, path: Path) -> Iterator[Leaf]:
        if isinstance(node, str):
            yield Leaf(path, node, LeafKind.TEXT)
        elif isinstance(node, list):
            self._check_depth(path)
            for index, child in enumerate(node):
                yield from self._schema(child, (*path, index))
        elif isinstance(node, dict):
            self._check_depth(path)
            for key, child in node.items():
                at = (*path, key)
                yield Leaf(at, str(key), LeafKind.LITERAL)
                if key in _SCHEMA_LITERALS:
                    yield from self.value(child, at, LeafKind.LITERAL)
                elif key in _SCHEMA_MAPS and isinstance(child, dict):
                    for name, schema in child.items():
                        yield Leaf((*at, name), str(name), LeafKind.LITERAL)
                        yield from self._schema(schema, (*at, name))
                elif key in _SCHEMA_DATA:
                    yield from self.value(child, at)
                else:
                    yield from self._schema(child, at)

    def _check_depth(self, path: Path) -> None:
        if len(path) > MAX_DEPTH:
            raise PiiRefusedError(
                "FIELD_REFUSED", json_pointer(path[:4]), f"is nested more than {MAX_DEPTH} levels deep"
            )

    def _check_readable(self, node: dict[str, object], path: Path) -> None:
        kind = node.get("type")
        if path[:1] != ("messages",) or not isinstance(kind, str):
            return
        if kind.startswith(_OPAQUE_PART_PREFIXES):
            self._refuse(path, f"is a part of type {kind[:32]!r}, which the PII filter cannot read")

    def _refuse(self, path: Path, message: str) -> None:
        if not self._allow:
            raise PiiRefusedError("FIELD_REFUSED", json_pointer(path), message)


def replace_leaves(body: dict[str, object], replacements: dict[Path, str]) -> dict[str, object]:
    """A copy of the body with the strings at some paths replaced; what is not on such a path is shared."""
    root: dict[str, object] = dict(body)
    copied: dict[Path, dict[str | int, object] | list[object]] = {(): cast("dict[str | int, object]", root)}

    def container(path: Path) -> dict[str | int, object] | list[object]:
        known = copied.get(path)
        if known is not None:
            return known
        parent = container(path[:-1])
        child = parent[path[-1]]  # type: ignore[index]
        fresh: dict[str | int, object] | list[object]
        if isinstance(child, dict):
            fresh = dict(child)
        elif isinstance(child, list):
            fresh = list(child)
        else:
            raise PiiError("a path of the request does not lead where it led before")
        parent[path[-1]] = fresh  # type: ignore[index]
        copied[path] = fresh
        return fresh

    for path, text in replacements.items():
        container(path[:-1])[path[-1]] = text  # type: ignore[index]
    return root


@dataclass(frozen=True, slots=True)
class JsonToken:
    """A string or number token in serialised JSON: its range there and the text that it stands for."""

    start: int
    end: int
    text: str


_JSON_TOKEN_RE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?[0-9][0-9.eE+\-]*+', re.DOTALL)


def json_tokens(text: str) -> list[JsonToken] | None:
    """The string tokens (keys too) and number tokens of serialised JSON, or None where it is not JSON.

    Works on the text, so that formatting, key order and number spelling of everything else stay as they are.
    """
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    tokens = []
    for match in _JSON_TOKEN_RE.finditer(text):
        raw = match[0]
        tokens.append(JsonToken(match.start(), match.end(), json.loads(raw) if raw[0] == '"' else raw))
    return tokens
