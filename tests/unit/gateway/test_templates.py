"""Path templates of google.api.http."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.rest.templates import PathTemplate, TemplateError

MATCHES: list[tuple[str, str, dict[str, str] | None]] = [
    ("/v1/models", "/v1/models", {}),
    ("/v1/models", "/v1/models/", None),
    ("/v1/models", "/v1/model", None),
    ("/v1/models", "v1/models", None),
    ("/v1/{name=models/*}", "/v1/models/a", {"name": "models/a"}),
    ("/v1/{name=models/*}", "/v1/models/", None),
    ("/v1/{name=models/*}", "/v1/models/a/b", None),
    ("/v1/{name=models/*}", "/v1/models/a%2Fb", {"name": "models/a%2Fb"}),
    ("/v1/{name=models/*}", "/v1/models/a%20b", {"name": "models/a b"}),
    ("/v1/{name=models/*}", "/v1/%6dodels/a", {"name": "models/a"}),
    ("/v1/{name}", "/v1/a%2Fb", {"name": "a/b"}),
    ("/v1/{name}", "/v1/%E6%B5%B7", {"name": "海"}),
    ("/v1/{name}", "/v1/%FF", None),
    ("/v1/{name}", "/v1/+", {"name": "+"}),
    ("/v1/{name=**}", "/v1/a/b/c", {"name": "a/b/c"}),
    ("/v1/{name=**}", "/v1/a%2Fb/c%20d", {"name": "a%2Fb/c d"}),
    ("/v1/{name=**}", "/v1", {"name": ""}),
    ("/v1/{name=a/**}", "/v1/a/b/c", {"name": "a/b/c"}),
    ("/v1/{name=a/**}", "/v1/b/c", None),
    ("/v1/{a}/x/{b.c=y/*}", "/v1/1/x/y/2", {"a": "1", "b.c": "y/2"}),
    ("/v1/*/x", "/v1/anything/x", {}),
    ("/v1/{name=models/*}:run", "/v1/models/a:run", {"name": "models/a"}),
    ("/v1/{name=models/*}:run", "/v1/models/a", None),
    ("/v1/{name=models/*}:run", "/v1/models/a:stop", None),
    ("/v1/{name=models/*}:run", "/v1/models/a:b:run", {"name": "models/a:b"}),
    ("/v1/{name=models/*}:run", "/v1/models/:run", None),
    ("/v1/text:mask", "/v1/text:mask", {}),
    ("/v1/text:mask", "/v1/text", None),
]


@pytest.mark.parametrize(("template", "path", "expected"), MATCHES)
def test_match(template: str, path: str, expected: dict[str, str] | None) -> None:
    values = PathTemplate.parse(template).match(path)
    assert (None if values is None else {".".join(key): value for key, value in values.items()}) == expected


@pytest.mark.parametrize(
    ("template", "position"),
    [
        ("", 0),
        ("v1", 0),
        ("/", 1),
        ("/v1/", 4),
        ("/v1//x", 4),
        ("/v1/{", 5),
        ("/v1/{1a}", 5),
        ("/v1/{a", 6),
        ("/v1/{a=}", 7),
        ("/v1/{a={b}}", 7),
        ("/v1/{a.}", 7),
        ("/v1/a:", 6),
        ("/v1/a:b:c", 7),
        ("/v1/a}", 5),
    ],
)
def test_syntax_errors_name_the_position(template: str, position: int) -> None:
    with pytest.raises(TemplateError, match=f"at position {position}$"):
        PathTemplate.parse(template)


@pytest.mark.parametrize(
    "template", ["/v1/**/x", "/**/**", "/v1/{a=**}/b", "/v1/{a}/{a}", "/{a.b}/{a.b=x/*}"]
)
def test_shapes_that_have_no_meaning(template: str) -> None:
    with pytest.raises(TemplateError):
        PathTemplate.parse(template)


def test_specific_templates_come_first() -> None:
    sources = ["/v1/**", "/v1/{a=*}", "/v1/models", "/v1/models:x", "/v1/{a=models/*}", "/{a=**}"]
    parsed = sorted((PathTemplate.parse(source) for source in sources), key=lambda t: t.specificity)
    order = [template.source for template in parsed]
    assert (
        order.index("/v1/models:x")
        < order.index("/v1/models")
        < order.index("/v1/{a=*}")
        < order.index("/v1/**")
    )
    assert order[-1] == "/{a=**}"


# --- an independent reading of the specification: templates as regular expressions over raw paths ----

LITERALS = st.sampled_from(["v1", "models", "a-b", "x.y", "~"])
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=6)


@st.composite
def templates(draw: st.DrawFn) -> list[tuple[str, list[str], str | None]]:
    """Segments as (kind, inner, name): a literal, a bare wildcard, or a variable over inner segments."""
    parts: list[tuple[str, list[str], str | None]] = []
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["literal", "star", "variable"]))
        if kind == "literal":
            parts.append((kind, [draw(LITERALS)], None))
        elif kind == "star":
            parts.append((kind, ["*"], None))
        else:
            inner = draw(st.lists(st.one_of(LITERALS, st.just("*")), min_size=1, max_size=3))
            parts.append((kind, inner, f"f{index}"))
    if draw(st.booleans()):
        parts.append(("variable", ["**"], "rest"))
    return parts


def source_of(parts: list[tuple[str, list[str], str | None]], verb: str) -> str:
    texts = [
        f"{{{name}={'/'.join(inner)}}}" if kind == "variable" else "/".join(inner)
        for kind, inner, name in parts
    ]
    return "/" + "/".join(texts) + (f":{verb}" if verb else "")


def oracle(parts: list[tuple[str, list[str], str | None]], verb: str) -> re.Pattern[str]:
    pattern = ""
    for _, inner, name in parts:
        pieces = ["[^/]+" if piece == "*" else "" if piece == "**" else re.escape(piece) for piece in inner]
        body = "/".join(pieces)
        if inner == ["**"]:
            pattern += f"(?:/(?P<{name}>.*))?"
        else:
            pattern += f"/(?P<{name}>{body})" if name else f"/{body}"
    return re.compile(pattern + (re.escape(f":{verb}") if verb else ""), re.DOTALL)


@given(templates(), st.sampled_from(["", "run"]), st.data())
def test_captures_what_was_put_in(
    parts: list[tuple[str, list[str], str | None]], verb: str, data: st.DataObject
) -> None:
    """Fill a template with values, encode as the specification says, and get the same values back."""
    path, expected = "", {}
    for _, inner, name in parts:
        filled = []
        for piece in inner:
            if piece == "*":
                filled.append(data.draw(VALUES))
            elif piece == "**":
                filled += data.draw(st.lists(VALUES, min_size=1, max_size=3))
            else:
                filled.append(piece)
        path += "".join("/" + quote(text, safe="") for text in filled)
        if name:
            expected[(name,)] = "/".join(filled)
    if verb:
        path += f":{verb}"
    template = PathTemplate.parse(source_of(parts, verb))
    assert template.match(path) == expected


PATHS = st.lists(st.sampled_from(["v1", "models", "a-b", "x.y", "~", "q", "v1:run", "x:y"]), max_size=7)


@given(templates(), st.sampled_from(["", "run"]), PATHS)
def test_agrees_with_a_regular_expression(
    parts: list[tuple[str, list[str], str | None]], verb: str, segments: list[str]
) -> None:
    path = "/" + "/".join(segments)
    found = oracle(parts, verb).fullmatch(path)
    values = PathTemplate.parse(source_of(parts, verb)).match(path)
    if found is None:
        assert values is None
    else:
        assert values == {(name,): text or "" for name, text in found.groupdict().items()}


@given(st.text(max_size=20))
def test_parsing_never_fails_otherwise(source: str) -> None:
    try:
        template = PathTemplate.parse(source)
    except TemplateError:
        return
    template.match("/v1/x")


@given(st.text(max_size=30))
def test_matching_never_fails(path: str) -> None:
    for source in ("/v1/{name=models/*}:run", "/{a}/{b=**}", "/*"):
        PathTemplate.parse(source).match(path)
