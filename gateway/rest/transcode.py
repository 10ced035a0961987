"""REST for gRPC services: routes and codecs compiled from ``google.api.http`` rules.

The library knows nothing of servers and sockets. Give it service descriptors and one handler per method;
it finds the route of an HTTP request, builds the request message from path, query and body, and encodes
responses. Rules as in ``google/api/http.proto``: path templates, additional bindings, ``body`` ("*", a
field, or none), ``response_body``, query parameters of nested, repeated, enum, wrapper and well-known
fields. JSON is ProtoJSON by ``google.protobuf.json_format``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast
from urllib.parse import parse_qsl

import grpc
import orjson
from google.api import annotations_pb2, http_pb2
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from sealmesh.gateway.rest.templates import PathTemplate
from sealmesh.telemetry.runtime.errors import SealmeshError

ContextT = TypeVar("ContextT")
UnaryHandler = Callable[[Message, ContextT], Awaitable[Message]]
# Generators, so that a stream that is left early can be closed at once.
StreamHandler = Callable[[Message, ContextT], AsyncGenerator[Message, None]]

JsonTree = dict[str, "JsonTree | list[str | int | bool] | str | int | bool"]

_INTEGER = re.compile(r"-?[0-9]+", re.ASCII)
_WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Bytes", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
)
# Messages whose ProtoJSON form is one string.
_TEXT_MESSAGES = frozenset(f"google.protobuf.{name}" for name in ("Timestamp", "Duration", "FieldMask"))
_INTEGER_TYPES = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)


class RuleError(ValueError):
    """A ``google.api.http`` rule that cannot be served; the message names the method and the fault."""


def full_method(method: MethodDescriptor) -> str:
    """``package.Service/Method``, the key of handler maps."""
    return f"{method.containing_service.full_name}/{method.name}"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a response is written: enum values as names (the default) or as numbers."""

    enums_as_numbers: bool = False


@dataclass(frozen=True, slots=True)
class Route(Generic[ContextT]):
    """One binding of one method. Exactly one of ``unary`` and ``stream`` is set."""

    http_method: str
    template: PathTemplate
    method: MethodDescriptor
    request_type: type[Message]
    body: str
    response_body: str
    unary: UnaryHandler[ContextT] | None
    stream: StreamHandler[ContextT] | None

    @property
    def takes_body(self) -> bool:
        """Whether the HTTP body is part of the request message."""
        return bool(self.body)


@dataclass(frozen=True, slots=True)
class Match(Generic[ContextT]):
    """A route and what its path template captured."""

    route: Route[ContextT]
    captured: Mapping[tuple[str, ...], str]

    def decode(self, query: bytes, body: bytes) -> tuple[Message, Encoding]:
        """Build the request message.

        Args:
            query: raw query string, without "?".
            body: HTTP body; must be JSON when the rule has a body, and may be empty.

        Raises:
            SealmeshError: INVALID_REQUEST; names the field or the position.
        """
        route = self.route
        request = route.request_type()
        if route.body == "*":
            _merge(_json(body), request)
        elif route.body:
            if body.strip():
                _merge({route.body: _json(body)}, request)
        elif body.strip():
            raise _invalid(f"{route.http_method} {route.template.source} takes no body")
        tree, encoding = self._query_tree(query)
        if tree:
            _merge(tree, request)
        # Last, because the path outranks what the body says about the same field.
        self._bind_path(request)
        return request, encoding

    def _query_tree(self, query: bytes) -> tuple[JsonTree, Encoding]:
        tree: JsonTree = {}
        encoding = Encoding()
        if not query:
            return tree, encoding
        try:
            pairs = parse_qsl(
                query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=1000
            )
        except ValueError:  # bad bytes, or too many fields
            raise _invalid("the query string is not valid percent-encoded UTF-8") from None
        for name, value in pairs:
            if name.startswith("$"):  # system parameters of Google APIs; only $alt means something here
                if name == "$alt":
                    encoding = _alt(value)
                continue
            if self.route.body == "*":
                raise _invalid(f"query parameter {name!r}: this method takes its fields in the body", name)
            self._add_query(tree, name, value)
        return tree, encoding

    def _add_query(self, tree: JsonTree, name: str, value: str) -> None:
        fields = _resolve(self.route.method.input_type, name)
        path = tuple(field.name for field in fields)
        if path in self.captured or path[0] == self.route.body:
            raise _invalid(f"query parameter {name!r} is already given by the path or the body", name)
        node = tree
        for field in fields[:-1]:
            child = node.setdefault(field.name, {})
            if not isinstance(child, dict):
                raise _invalid(f"query parameter {name!r} contradicts another one", name)
            node = child
        leaf = fields[-1]
        converted = _leaf(leaf, name, value)
        if leaf.is_repeated:
            values = node.setdefault(leaf.name, [])
            if isinstance(values, list):
                values.append(converted)
        elif leaf.name in node:
            raise _invalid(f"query parameter {name!r} is given twice", name)
        else:
            node[leaf.name] = converted

    def _bind_path(self, request: Message) -> None:
        for path, value in self.captured.items():
            fields = _resolve(self.route.method.input_type, ".".join(path))
            target = request
            for field in fields[:-1]:
                target = cast(Message, getattr(target, field.name))
            leaf = fields[-1]
            if leaf.type == FieldDescriptor.TYPE_STRING:
                setattr(target, leaf.name, value)
            else:
                target.ClearField(leaf.name)
                _merge({leaf.name: _leaf(leaf, ".".join(path), value)}, target)

    def encode(self, response: Message, encoding: Encoding) -> bytes:
        """ProtoJSON of a response (or of its ``response_body`` field)."""
        document = json_format.MessageToDict(response, use_integers_for_enums=encoding.enums_as_numbers)
        field = self.route.response_body
        if field:
            descriptor = response.DESCRIPTOR.fields_by_name[field]
            empty: object = [] if descriptor.is_repeated else None
            return orjson.dumps(document.get(descriptor.json_name, empty))
        return orjson.dumps(document)


@dataclass(frozen=True, slots=True)
class NoMatch:
    """No route; ``allowed`` lists the methods that the path knows, empty for an unknown path."""

    allowed: tuple[str, ...]


class Transcoder(Generic[ContextT]):
    """The routes of a set of services."""

    def __init__(self, routes: Iterable[Route[ContextT]]) -> None:
        self._by_method: dict[str, list[Route[ContextT]]] = {}
        for route in routes:
            self._by_method.setdefault(route.http_method, []).append(route)
        for bucket in self._by_method.values():
            bucket.sort(key=lambda route: route.template.specificity)

    @classmethod
    def of(
        cls,
        services: Iterable[ServiceDescriptor],
        unary: Mapping[str, UnaryHandler[ContextT]],
        stream: Mapping[str, StreamHandler[ContextT]],
    ) -> Transcoder[ContextT]:
        """Compile every annotated method of ``services``.

        Args:
            services: descriptors, for example ``gateway_pb2.DESCRIPTOR.services_by_name[...]``.
            unary: handlers of unary methods by ``package.Service/Method``.
            stream: handlers of server-streaming methods, likewise.

        Raises:
            RuleError: a rule does not fit its messages, or an annotated method has no handler.
        """
        routes: list[Route[ContextT]] = []
        for service in services:
            for method in service.methods:
                rule = method.GetOptions().Extensions[annotations_pb2.http]
                for binding in (rule, *rule.additional_bindings):
                    if binding.WhichOneof("pattern") is not None:
                        routes.append(_compile(method, binding, unary, stream))
        return cls(routes)

    @property
    def routes(self) -> tuple[Route[ContextT], ...]:
        """All routes."""
        return tuple(route for bucket in self._by_method.values() for route in bucket)

    def find(self, http_method: str, raw_path: bytes) -> Match[ContextT] | NoMatch:
        """The route for a raw (percent-encoded) path."""
        try:
            path = raw_path.decode("ascii")
        except UnicodeDecodeError:
            return NoMatch(())
        for route in self._by_method.get(http_method, ()):
            captured = route.template.match(path)
            if captured is not None:
                return Match(route, captured)
        # An unknown ":verb" would match a template without one by taking it as part of a name.
        has_verb = ":" in path.rpartition("/")[2]
        allowed = sorted(
            known
            for known, bucket in self._by_method.items()
            if known != http_method
            and any(
                route.template.match(path) is not None and (route.template.verb or not has_verb)
                for route in bucket
            )
        )
        return NoMatch(tuple(allowed))


def _compile(
    method: MethodDescriptor,
    rule: http_pb2.HttpRule,
    unary: Mapping[str, UnaryHandler[ContextT]],
    stream: Mapping[str, StreamHandler[ContextT]],
) -> Route[ContextT]:
    name = full_method(method)
    pattern = rule.WhichOneof("pattern")
    if pattern == "custom":
        http_method, path = rule.custom.kind, rule.custom.path
    else:
        http_method, path = str(pattern).upper(), cast(str, getattr(rule, str(pattern)))
    if method.client_streaming:
        raise RuleError(f"{name}: client streaming has no REST form")
    template = PathTemplate.parse(path)
    for variable in template.variables:
        _check_variable(name, method.input_type, variable.field_path)
    if rule.body and rule.body != "*" and rule.body not in method.input_type.fields_by_name:
        raise RuleError(f"{name}: body field {rule.body!r} is not in {method.input_type.full_name}")
    if rule.response_body and rule.response_body not in method.output_type.fields_by_name:
        raise RuleError(
            f"{name}: response_body {rule.response_body!r} is not in {method.output_type.full_name}"
        )
    unary_handler = None if method.server_streaming else unary.get(name)
    stream_handler = stream.get(name) if method.server_streaming else None
    if unary_handler is None and stream_handler is None:
        raise RuleError(f"{name}: no handler")
    return Route(
        http_method=http_method,
        template=template,
        method=method,
        request_type=message_factory.GetMessageClass(method.input_type),
        body=rule.body,
        response_body=rule.response_body,
        unary=unary_handler,
        stream=stream_handler,
    )


def _check_variable(name: str, descriptor: Descriptor, path: tuple[str, ...]) -> None:
    for position, part in enumerate(path):
        field = descriptor.fields_by_name.get(part)
        last = position == len(path) - 1
        nested = field.message_type if field is not None else None
        if field is None or field.is_repeated or (nested is None) != last:
            raise RuleError(f"{name}: path variable {'.'.join(path)!r} is not a singular scalar field")
        if nested is not None:
            descriptor = nested


def _resolve(descriptor: Descriptor, dotted: str) -> list[FieldDescriptor]:
    """Fields along a dotted path of proto or JSON names; raises INVALID_REQUEST."""
    fields: list[FieldDescriptor] = []
    current: Descriptor | None = descriptor
    for part in dotted.split("."):
        field = None
        if current is not None:
            field = current.fields_by_name.get(part) or current.fields_by_camelcase_name.get(part)
        if field is None or (fields and fields[-1].is_repeated):
            raise _invalid(f"unknown query parameter {dotted!r}", dotted)
        fields.append(field)
        current = field.message_type
    return fields


def _leaf(field: FieldDescriptor, name: str, value: str) -> str | int | bool:
    """The JSON value of a query or path text for one field (or one element of a repeated field)."""
    message = field.message_type
    if message is not None:
        if message.full_name in _TEXT_MESSAGES:
            return value
        if message.full_name not in _WRAPPERS:
            raise _invalid(f"parameter {name!r} is a message; name one of its fields", name)
        field = message.fields_by_name["value"]
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if value not in ("true", "false"):
            raise _invalid(f"parameter {name!r} must be true or false", name)
        return value == "true"
    if kind in _INTEGER_TYPES and not _INTEGER.fullmatch(value):
        raise _invalid(f"parameter {name!r} must be an integer", name)
    if kind == FieldDescriptor.CPPTYPE_ENUM and _INTEGER.fullmatch(value):
        return int(value)
    return value


def _json(body: bytes) -> object:
    if not body.strip():
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _invalid(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None


def _merge(document: object, message: Message) -> None:
    if not isinstance(document, dict):
        # Well-known types may be JSON arrays or scalars, but no request of ours is one.
        raise _invalid("the body must be a JSON object")
    try:
        json_format.ParseDict(document, message)
    except json_format.ParseError as error:
        raise _invalid(str(error)) from None


def _alt(value: str) -> Encoding:
    kind, *options = value.split(";")
    if kind != "json" or any(option != "enum-encoding=int" for option in options):
        raise _invalid(f"$alt={value!r} is not supported; use json or json;enum-encoding=int", "$alt")
    return Encoding(enums_as_numbers=bool(options))


def _invalid(message: str, field: str | None = None) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, field=field)
