"""The façade: masks requests for one tenant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sealmesh.gateway.pii.canonical import canonical_form
from sealmesh.gateway.pii.detector import Detector
from sealmesh.gateway.pii.json_text import JsonToken, Path, json_pointer, json_string, json_tokens
from sealmesh.gateway.pii.openai_fields import Leaf, LeafKind, replace_leaves, request_leaves
from sealmesh.gateway.pii.placeholders import NO_PLACEHOLDERS, PlaceholderBook, PlaceholderKey, TypedCodes
from sealmesh.gateway.pii.session import PiiSession
from sealmesh.gateway.pii.spans import Finding, PiiRefusedError, Span


@dataclass(frozen=True, slots=True)
class MaskedRequest:
    """A request body as the model may see it. `body` is the caller's own object when nothing was masked."""

    body: dict[str, object] = dataclasses.field(repr=False)
    session: PiiSession


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A text as the model may see it."""

    text: str = dataclasses.field(repr=False)
    session: PiiSession


@dataclass(frozen=True, slots=True)
class _Found:
    """Spans in one leaf, or in one token of a leaf that is serialised JSON."""

    leaf: Leaf
    text: str = dataclasses.field(repr=False)
    spans: list[Span]
    token: JsonToken | None = None


class PiiFilter:
    """Masks what goes to the model and restores what comes back, for one tenant in one epoch.

    `tenant_key` (16 bytes or more) and `epoch` make placeholders stable across requests and unlinkable across
    tenants. `allow_uninspectable` lets token ids, embeddings and media pass; `allow_unmaskable` lets personal
    data pass in keys, names and literal parts of schemas. Both refuse by default. Any error means that the
    request must not go on; nothing is ever masked in part. Safe to share between threads.
    """

    def __init__(
        self,
        tenant_key: bytes,
        epoch: int,
        *,
        detector: Detector | None = None,
        allow_uninspectable: bool = False,
        allow_unmaskable: bool = False,
    ) -> None:
        self._key = PlaceholderKey(tenant_key, epoch)
        self._detector = detector or Detector()
        self._allow_uninspectable = allow_uninspectable
        self._allow_unmaskable = allow_unmaskable

    def mask_openai_request(self, body: dict[str, object]) -> MaskedRequest:
        """Masks the body of /v1/chat/completions or /v1/completions; the argument is not changed.

        Raises PiiRefusedError (with the field as a JSON pointer) for what cannot be inspected or masked.
        """
        leaves = request_leaves(body, allow_uninspectable=self._allow_uninspectable)
        replacements, session = self._mask(leaves)
        return MaskedRequest(replace_leaves(body, replacements) if replacements else body, session)

    def mask_text(self, text: str, field: str = "") -> MaskedText:
        """Masks one text; findings name `field`, a JSON pointer."""
        masked, session = self.mask_texts({field: text})
        return MaskedText(masked[field], session)

    def mask_texts(self, texts: Mapping[str, str]) -> tuple[dict[str, str], PiiSession]:
        """Masks several texts of one request, keyed by JSON pointer, with placeholders in common."""
        paths: dict[Path, str] = {
            tuple(part.replace("~1", "/").replace("~0", "~") for part in field.split("/")[1:]): field
            for field in texts
        }
        leaves = [Leaf(path, texts[field], LeafKind.TEXT) for path, field in paths.items()]
        replacements, session = self._mask(leaves)
        return {field: replacements.get(path, texts[field]) for path, field in paths.items()}, session

    def _mask(self, leaves: list[Leaf]) -> tuple[dict[Path, str], PiiSession]:
        found = [item for leaf in leaves for item in self._detect(leaf)]
        if not found:
            return {}, PiiSession(NO_PLACEHOLDERS, ())
        book = PlaceholderBook(self._key, TypedCodes(_readings(leaves, found)))
        pieces: dict[Path, list[tuple[int, int, str]]] = {}
        findings: list[Finding] = []
        for item in found:
            literal = item.leaf.kind is LeafKind.LITERAL
            field = json_pointer(item.leaf.path)
            if literal and not self._allow_unmaskable:
                raise PiiRefusedError(
                    "PII_BLOCKED",
                    field,
                    f"holds personal data ({item.spans[0].type}) where it cannot be masked",
                )
            action = "allow" if literal else "mask"
            findings += [Finding(field, s.start, s.end, s.type, s.score, action) for s in item.spans]
            if literal:
                continue
            edits = pieces.setdefault(item.leaf.path, [])
            if item.token is None:
                edits += [(s.start, s.end, self._placeholder(book, item.text, s)) for s in item.spans]
            else:
                masked = _splice(
                    item.text, [(s.start, s.end, self._placeholder(book, item.text, s)) for s in item.spans]
                )
                edits.append((item.token.start, item.token.end, json_string(masked)))
        texts = {
            leaf.path: leaf.text
            for leaf in leaves
            if leaf.path in pieces and leaf.kind is not LeafKind.LITERAL
        }
        replacements = {path: _splice(texts[path], edits) for path, edits in pieces.items()}
        return replacements, PiiSession(book.table(), findings)

    def _detect(self, leaf: Leaf) -> list[_Found]:
        detect = self._detector.detect
        tokens = json_tokens(leaf.text, leaf.path) if leaf.kind is LeafKind.JSON else None
        if tokens is None:
            spans = detect(leaf.text, leaf.context)
            return [_Found(leaf, leaf.text, spans)] if spans else []
        return [
            _Found(leaf, token.text, spans, token)
            for token in tokens
            if (spans := detect(token.text, token.context))
        ]

    @staticmethod
    def _placeholder(book: PlaceholderBook, text: str, span: Span) -> str:
        surface = text[span.start : span.end]
        return book.placeholder(span.type, canonical_form(span.type, surface), surface)


def _readings(leaves: list[Leaf], found: list[_Found]) -> Iterator[str]:
    """Every text in which a look-alike of a placeholder can stand, serialised JSON decoded as well.

    A look-alike may also end where a value begins ("phone_a1b2c13800138000"), so that only masking lays it
    bare: texts with values in them are read without these too.
    """
    for item in found:
        yield _splice(item.text, [(span.start, span.end, "\n") for span in item.spans])
    for leaf in leaves:
        yield leaf.text
        if leaf.kind is LeafKind.JSON:
            for token in json_tokens(leaf.text, leaf.path) or ():
                yield token.text


def _splice(text: str, edits: list[tuple[int, int, str]]) -> str:
    """The text with ranges replaced; the edits are in order and do not overlap."""
    out: list[str] = []
    done = 0
    for start, end, new in edits:
        out += (text[done:start], new)
        done = end
    out.append(text[done:])
    return "".join(out)
