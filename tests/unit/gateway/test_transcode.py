"""The transcoder as a library, on protos of its own that have every shape of rule."""

from __future__ import annotations

import base64
import importlib.resources
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.gateway.rest.transcode import (
    Encoding,
    Match,
    NoMatch,
    RuleError,
    StreamHandler,
    Transcoder,
    UnaryHandler,
    full_method,
)
from sealmesh.telemetry.runtime.errors import SealmeshError


async def unary(request: Message, context: str) -> Message:
    return request


async def stream(request: Message, context: str) -> AsyncGenerator[Message, None]:
    yield request


def compile_protos(folder: Path) -> descriptor_pool.DescriptorPool:
    here = Path(__file__).parent
    target = folder / "shapes.binpb"
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    annotations = Path(json_format.__file__).parents[2]
    code = protoc.main(
        [
            "protoc",
            f"-I{here}",
            f"-I{well_known}",
            f"-I{annotations}",
            "--include_imports",
            f"--descriptor_set_out={target}",
            "shapes.proto",
        ]
    )
    assert code == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


class Shapes:
    """The compiled test protos and a transcoder over their good service."""

    def __init__(self, folder: Path) -> None:
        pool = compile_protos(folder)
        self.file = pool.FindFileByName("shapes.proto")
        self.message: type[Message] = message_factory.GetMessageClass(
            self.file.message_types_by_name["Shape"]
        )
        self.transcoder = self.build("Shapes")

    def service(self, name: str) -> ServiceDescriptor:
        found: ServiceDescriptor = self.file.services_by_name[name]
        return found

    def build(self, name: str, *, handlers: bool = True) -> Transcoder[str]:
        service = self.service(name)
        unaries: dict[str, UnaryHandler[str]] = {}
        streams: dict[str, StreamHandler[str]] = {}
        for method in service.methods if handlers else ():
            unaries[full_method(method)] = unary
            streams[full_method(method)] = stream
        return Transcoder.of([service], unaries, streams)

    def find(self, method: str, path: str) -> Match[str]:
        found = self.transcoder.find(method, path.encode())
        assert isinstance(found, Match), found
        return found

    def decode(self, method: str, target: str, body: object = None) -> dict[str, Any]:
        path, _, query = target.partition("?")
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request, _ = self.find(method, path).decode(query.encode(), raw)
        return json_format.MessageToDict(request)

    def refusal(self, method: str, path: str, query: bytes, body: bytes) -> str:
        """Why a request is refused, or nothing."""
        try:
            self.find(method, path).decode(query, body)
        except SealmeshError as error:
            return error.reason
        return ""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Shapes:
    return Shapes(tmp_path_factory.mktemp("protos"))


DECODED: list[tuple[str, str, object, dict[str, Any]]] = [
    ("GET", "/t/shapes/a%20b", None, {"name": "shapes/a b"}),
    ("GET", "/t/texts/a/b%2Fc", None, {"outer": {"inner": {"text": "texts/a/b%2Fc"}}}),
    ("GET", "/t/by-number/-9007199254740993", None, {"number": "-9007199254740993"}),
    ("GET", "/t/by-colour/COLOUR_RED", None, {"colour": "COLOUR_RED"}),
    ("GET", "/t/by-colour/1", None, {"colour": "COLOUR_RED"}),
    ("GET", "/t/shapes?number=42&yes=true&ratio=0.5", None, {"number": "42", "yes": True, "ratio": 0.5}),
    ("GET", "/t/shapes?words=a&words=b+c&words=", None, {"words": ["a", "b c", ""]}),
    (
        "GET",
        "/t/shapes?colours=COLOUR_RED&colours=1&colours=0",
        None,
        {"colours": ["COLOUR_RED", "COLOUR_RED", "COLOUR_UNSPECIFIED"]},
    ),
    (
        "GET",
        "/t/shapes?outer.inner.text=x&outer.flag=true",
        None,
        {"outer": {"inner": {"text": "x"}, "flag": True}},
    ),
    (
        "GET",
        "/t/shapes?outer.inner.numbers=1&outer.inner.numbers=2",
        None,
        {"outer": {"inner": {"numbers": ["1", "2"]}}},
    ),
    ("GET", "/t/shapes?outer%2Einner%2Etext=%E6%B5%B7", None, {"outer": {"inner": {"text": "海"}}}),
    ("GET", "/t/shapes?snakeCaseName=3", None, {"snakeCaseName": 3}),
    ("GET", "/t/shapes?snake_case_name=3", None, {"snakeCaseName": 3}),
    ("GET", "/t/shapes?wrapped=0&wrapped_flag=false", None, {"wrapped": "0", "wrappedFlag": False}),
    (
        "GET",
        "/t/shapes?at=2026-11-05T10:00:00Z&span=1.5s",
        None,
        {"at": "2026-11-05T10:00:00Z", "span": "1.500s"},
    ),
    ("GET", "/t/shapes?mask=name,outer.flag", None, {"mask": "name,outer.flag"}),
    ("GET", "/t/shapes?data=" + base64.urlsafe_b64encode(b"\xff\xfe").decode(), None, {"data": "//4="}),
    ("GET", "/t/shapes?maybe=0", None, {"maybe": 0}),
    ("GET", "/t/shapes?left=x", None, {"left": "x"}),
    ("GET", "/t/shapes?ratio=NaN", None, {"ratio": "NaN"}),
    ("GET", "/t/shapes?$alt=json&$unknown=1", None, {}),
    (
        "POST",
        "/t/shapes",
        {"name": "n", "number": "5", "labels": {"a": "b"}},
        {"name": "n", "number": "5", "labels": {"a": "b"}},
    ),
    (
        "POST",
        "/t/shapes",
        {"snake_case_name": 1, "outers": [{"flag": True}]},
        {"snakeCaseName": 1, "outers": [{"flag": True}]},
    ),
    ("POST", "/t/shapes", b"", {}),
    (
        "PATCH",
        "/t/shapes/a",
        {"flag": True, "inner": {"text": "theirs"}},
        {"outer": {"flag": True, "inner": {"text": "shapes/a"}}},
    ),
    ("PATCH", "/t/shapes/a?number=7", b"", {"number": "7", "outer": {"inner": {"text": "shapes/a"}}}),
    ("PUT", "/t/shapes?yes=true", ["a", "b"], {"words": ["a", "b"], "yes": True}),
    ("GET", "/t/shapes/a:watch", None, {"name": "shapes/a"}),
    ("HEAD", "/t/shapes?name=x", None, {"name": "x"}),
]


@pytest.mark.parametrize(("method", "target", "body", "expected"), DECODED)
def test_decode(shapes: Shapes, method: str, target: str, body: object, expected: dict[str, Any]) -> None:
    assert shapes.decode(method, target, body) == expected


REFUSED: list[tuple[str, str, object, str]] = [
    ("GET", "/t/shapes?nothing=1", None, "nothing"),
    ("GET", "/t/shapes?outer.nothing=1", None, "outer.nothing"),
    ("GET", "/t/shapes?name.text=1", None, "name.text"),
    ("GET", "/t/shapes?outers.flag=true", None, "outers.flag"),
    ("GET", "/t/shapes?outer=x", None, "outer"),
    ("GET", "/t/shapes?labels=x", None, "labels"),
    ("GET", "/t/shapes?number=1&number=2", None, "number"),
    ("GET", "/t/shapes?number=1.5", None, "number"),
    ("GET", "/t/shapes?number=1_0", None, "number"),
    ("GET", "/t/shapes?number=%D9%A1", None, "number"),
    ("GET", "/t/shapes?number=", None, "number"),
    ("GET", "/t/shapes?number=99999999999999999999", None, "number"),
    ("GET", "/t/shapes?yes=1", None, "yes"),
    ("GET", "/t/shapes?ratio=much", None, "ratio"),
    ("GET", "/t/shapes?colour=COLOUR_NONE", None, "colour"),
    ("GET", "/t/shapes?at=yesterday", None, ""),
    ("GET", "/t/shapes?left=a&right=b", None, ""),
    ("GET", "/t/shapes?name=%C3%28", None, "UTF-8"),
    ("GET", "/t/shapes?$alt=proto", None, "$alt"),
    ("GET", "/t/shapes/a?name=b", None, "already given"),
    ("GET", "/t/by-number/x", None, "number"),
    ("GET", "/t/by-colour/COLOUR_NONE", None, "colour"),
    ("GET", "/t/shapes", {"name": "x"}, "takes no body"),
    ("POST", "/t/shapes?name=x", {}, "in the body"),
    ("POST", "/t/shapes", b'{"name": ', "line 1, column"),
    ("POST", "/t/shapes", b"[]", "object"),
    ("POST", "/t/shapes", {"nothing": 1}, "nothing"),
    ("POST", "/t/shapes", {"number": "x"}, "number"),
    ("POST", "/t/shapes", {"left": "a", "right": "b"}, "choice"),
    ("PATCH", "/t/shapes/a?outer.flag=true", {}, "already given"),
    ("PUT", "/t/shapes", {"a": 1}, "words"),
]


@pytest.mark.parametrize(("method", "target", "body", "text"), REFUSED)
def test_refused(shapes: Shapes, method: str, target: str, body: object, text: str) -> None:
    with pytest.raises(SealmeshError) as caught:
        shapes.decode(method, target, body)
    assert caught.value.reason == "INVALID_REQUEST"
    assert caught.value.http_status == 400
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/t/none", ()),
        ("GET", "/", ()),
        ("DELETE", "/t/shapes", ("GET", "HEAD", "POST", "PUT")),
        ("PUT", "/t/shapes/a", ("GET", "PATCH")),
        ("POST", "/t/shapes/a:watch", ("GET",)),
        ("POST", "/t/shapes/a:explode", ()),
        ("get", "/t/shapes", ("GET", "HEAD", "POST", "PUT")),
    ],
)
def test_no_route(shapes: Shapes, method: str, path: str, allowed: tuple[str, ...]) -> None:
    assert shapes.transcoder.find(method, path.encode()) == NoMatch(allowed)


def test_a_path_that_is_not_ascii_is_unknown(shapes: Shapes) -> None:
    assert shapes.transcoder.find("GET", "/t/海".encode()) == NoMatch(())


@pytest.mark.parametrize("name", ["BadVariable", "BadField", "BadBody", "BadResponse", "BadStream"])
def test_rules_that_cannot_be_served_name_their_method(shapes: Shapes, name: str) -> None:
    with pytest.raises(RuleError, match=rf"^sealmesh\.test\.v1\.{name}/Get: "):
        shapes.build(name)


def test_an_annotated_method_needs_a_handler(shapes: Shapes) -> None:
    with pytest.raises(RuleError, match="no handler"):
        shapes.build("Shapes", handlers=False)


def test_a_method_without_a_rule_has_no_route(shapes: Shapes) -> None:
    assert not any(route.method.name == "Unmapped" for route in shapes.transcoder.routes)
    assert len(shapes.transcoder.routes) == 10


def test_encode(shapes: Shapes) -> None:
    message = json_format.ParseDict(
        {"number": "9007199254740993", "colour": "COLOUR_RED", "words": ["海"]}, shapes.message()
    )
    whole = shapes.find("GET", "/t/shapes/a")
    assert json.loads(whole.encode(message, Encoding())) == {
        "number": "9007199254740993",
        "colour": "COLOUR_RED",
        "words": ["海"],
    }
    assert json.loads(whole.encode(message, Encoding(enums_as_numbers=True)))["colour"] == 1
    part = shapes.find("GET", "/t/shapes")
    assert part.encode(message, Encoding()) == '["海"]'.encode()
    assert part.encode(shapes.message(), Encoding()) == b"[]"


def test_enum_encoding_is_asked_for_in_the_query(shapes: Shapes) -> None:
    _, encoding = shapes.find("GET", "/t/shapes/a").decode(b"$alt=json;enum-encoding%3Dint", b"")
    assert encoding.enums_as_numbers


INT64 = st.integers(-(2**63), 2**63 - 1)
LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.text(st.characters(codec="utf-8"), max_size=8),
    "number": INT64,
    "yes": st.booleans(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "snake_case_name": st.integers(0, 2**32 - 1),
    "maybe": st.integers(-(2**31), 2**31 - 1),
    "outer.flag": st.booleans(),
    "outer.inner.text": st.text(st.characters(codec="utf-8"), max_size=8),
    "wrapped": INT64,
}
REPEATED: dict[str, st.SearchStrategy[Any]] = {
    "words": st.lists(st.text(st.characters(codec="utf-8"), max_size=4), max_size=3),
    "outer.inner.numbers": st.lists(INT64, max_size=3),
}


def plain(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


@given(st.fixed_dictionaries({}, optional=LEAVES | REPEATED))
def test_a_query_means_what_the_same_json_means(shapes: Shapes, fields: dict[str, Any]) -> None:
    """Oracle: json_format on the equivalent document."""
    pairs: list[tuple[str, str]] = []
    document: dict[str, Any] = {}
    for dotted, value in fields.items():
        pairs += [(dotted, plain(item)) for item in (value if isinstance(value, list) else [value])]
        *outer, last = dotted.split(".")
        node = document
        for name in outer:
            node = node.setdefault(name, {})
        node[last] = value
    expected = json_format.ParseDict(document, shapes.message())
    request, _ = shapes.find("GET", "/t/shapes").decode(urlencode(pairs).encode(), b"")
    # An empty repeated field has no place in a query; its parents are not made by it.
    if all(value != [] for value in fields.values()):
        assert request == expected


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_input_fails_otherwise(shapes: Shapes, query: bytes, body: bytes) -> None:
    for method, path in (("GET", "/t/shapes"), ("POST", "/t/shapes"), ("PATCH", "/t/shapes/a")):
        assert shapes.refusal(method, path, query, body) in ("", "INVALID_REQUEST")


FIELDS = st.sampled_from(["name", "number", "outer", "labels", "at", "words"])
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner),
    max_leaves=8,
)


@given(DOCUMENTS)
def test_any_json_is_parsed_or_refused(shapes: Shapes, document: object) -> None:
    assert shapes.refusal("POST", "/t/shapes", b"", json.dumps(document).encode()) in ("", "INVALID_REQUEST")
