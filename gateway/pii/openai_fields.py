"""Walks OpenAI request bodies (chat and text completions) and finds the strings in them.

Every string value is masked, in fields that this module has never heard of too, except names that steer the
engine and the parts of JSON schemas that must match literally. What cannot be read at all is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from sealmesh.gateway.pii.json_text import Path, json_pointer
from sealmesh.gateway.pii.spans import PiiError, PiiRefusedError

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
    """One string (or long number) of a body and where it stands.

    The path of a key is that of its object: a key that is personal data must not end up in error messages.
    `context` is the key beside a value, which may label it.
    """

    path: Path
    text: str = field(repr=False)
    kind: LeafKind
    context: str = field(default="", repr=False)


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
_OPAQUE_PART_PREFIXES = (
    *("image", "input_image", "audio", "input_audio", "video", "input_video", "file", "input_file"),
    "prompt_embeds",
)
# Fewer digits are no value of any type.
_SMALLEST_NUMBER = 10**10

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
            yield Leaf(path, node, kind, _context(path))
        elif isinstance(node, int):
            # Top-level numbers are settings such as `seed`; deeper ones can reach the model.
            if len(path) > 1 and node >= _SMALLEST_NUMBER:
                yield Leaf(path, str(node), kind, _context(path))
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
        yield Leaf(path[:-1], key, LeafKind.LITERAL)
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
                yield Leaf(path, str(key), LeafKind.LITERAL)
                if key in _SCHEMA_LITERALS:
                    yield from self.value(child, at, LeafKind.LITERAL)
                elif key in _SCHEMA_MAPS and isinstance(child, dict):
                    for name, schema in child.items():
                        yield Leaf(at, str(name), LeafKind.LITERAL)
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
        if len(path) != 4 or path[0] != "messages" or path[2] != "content":
            return
        kind = node.get("type")
        opaque = isinstance(kind, str) and kind.startswith(_OPAQUE_PART_PREFIXES)
        # The engine also takes parts without a type, told apart by their keys.
        if opaque or any(str(key).startswith(_OPAQUE_PART_PREFIXES) for key in node):
            self._refuse(path, "is media or a file, which the PII filter cannot read; send text")

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


def _context(path: Path) -> str:
    return path[-1] if path and isinstance(path[-1], str) else ""
