"""ServeOpenAI: one request of vLLM's OpenAI layer, carried as a head, JSON events and a typed finish."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
import orjson
from sealmesh.inference.asgi_call import AsgiCall, ResponseStart
from sealmesh.inference.engine import Engine
from sealmesh.inference.engine_call import EngineCall, Usage, calling
from sealmesh.inference.sse import SseParser
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["Finish", "Head", "JsonEvent", "OpenAIRequest", "serve_openai"]

_CHAT: Final = "/v1/chat/completions"
_ROUTES: Final = {
    _CHAT: "POST",
    "/v1/completions": "POST",
    "/v1/embeddings": "POST",
    "/v1/models": "GET",
}
_SALTED: Final = (_CHAT, "/v1/completions")
_STREAM: Final = "text/event-stream"
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """An HTTP request in the shape of the OpenAI API."""

    path: str
    body: bytes = b""
    method: str = ""
    """Empty means POST."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and media type as the OpenAI layer gave them."""

    status: int
    content_type: str


@dataclass(frozen=True, slots=True)
class JsonEvent:
    """One JSON document, byte for byte as the OpenAI layer wrote it, and the tokens behind it."""

    sequence: int
    data: bytes
    tokens: Sequence[tuple[int, Sequence[int]]]
    """(choice, token ids)."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete."""

    usage: Usage


async def serve_openai(
    engine: Engine, call: EngineCall, request: OpenAIRequest
) -> AsyncGenerator[Head | JsonEvent | Finish, None]:
    """Yields one Head, then events, then one Finish. Closing the iterator aborts the request.

    A response with an error status (unknown model, prompt too long, invalid field) is passed on as the
    OpenAI layer wrote it, with its status in the head. A failure after the first event, or of the engine,
    is raised.

    Raises:
        SealmeshError: UNKNOWN_METHOD for a path or method that is not on the allow-list; INVALID_REQUEST
            for a body that is not a JSON object; ENGINE_FAILED when the answer breaks off.
    """
    method = _route(request)
    body = _prepared(request, call) if method == "POST" else b""
    reader = _Reader(call, request.path)
    with calling(call):
        http = AsgiCall(
            engine.app,
            reader,
            method=method,
            path=request.path,
            headers={"x-request-id": call.request_id},
            body=body,
        )
        # The task of the application is started here and inherits the current call.
        entered = await http.__aenter__()
    try:
        head = await entered.start()
        answer = _streamed if head.content_type == _STREAM else _whole
        async with aclosing(answer(entered.items(), head, reader)) as events:
            async for event in events:
                yield event
    except ConnectionError as exc:
        raise _broken(engine, str(exc)) from exc
    finally:
        if call.unfinished:
            await engine.abort(call)
        await entered.__aexit__(None, None, None)


def _route(request: OpenAIRequest) -> str:
    method = request.method.upper() or "POST"
    allowed = _ROUTES.get(request.path)
    if allowed is None:
        raise SealmeshError(
            grpc.StatusCode.UNIMPLEMENTED,
            "UNKNOWN_METHOD",
            f"there is no path {request.path[:80]} here; the worker serves {', '.join(_ROUTES)}",
            field="path",
        )
    if method != allowed:
        raise SealmeshError(
            grpc.StatusCode.UNIMPLEMENTED,
            "UNKNOWN_METHOD",
            f"{request.path} takes {allowed}, not {method[:16]}",
            field="method",
        )
    return method


def _prepared(request: OpenAIRequest, call: EngineCall) -> bytes:
    """The body with what only the mesh may set: the tenant's cache salt, and no transfer parameters.

    The body is always written anew, so that nothing that one JSON parser sees and another does not (a
    doubled key) reaches the engine.
    """
    try:
        body: Any = orjson.loads(request.body)
    except orjson.JSONDecodeError as exc:
        raise _invalid(
            f"the body is not valid JSON: {exc.msg} (line {exc.lineno}, column {exc.colno})"
        ) from None
    if not isinstance(body, dict):
        raise _invalid("the body must be a JSON object")
    for name in ("cache_salt", "kv_transfer_params", "ec_transfer_params", "request_id"):
        body.pop(name, None)
    if call.tenant is not None and request.path in _SALTED:
        body["cache_salt"] = call.tenant.cache_salt
    return orjson.dumps(body)


_Items = AsyncIterator[list[JsonEvent]]
_Answer = AsyncGenerator[Head | JsonEvent | Finish, None]


async def _whole(items: _Items, head: ResponseStart, reader: _Reader) -> _Answer:
    async for _ in items:
        pass
    document = _parsed(bytes(reader.body))
    if head.status >= 500:
        raise _engine_failed(_message(document) or f"the engine answered with status {head.status}")
    yield Head(head.status, head.content_type or "application/json")
    call = reader.call
    tokens = [(choice, call.take_all(choice)) for choice in call.pending_choices()]
    yield JsonEvent(0, bytes(reader.body), tokens)
    yield Finish(_usage(document, call) if head.status < 400 else Usage())


async def _streamed(items: _Items, head: ResponseStart, reader: _Reader) -> _Answer:
    begun = False
    async for events in items:
        for event in events:
            if not begun:
                # Not before: a stream may begin with an error, which is better told by a status.
                begun = True
                yield Head(head.status, head.content_type)
            yield event
    if not reader.complete:
        raise ConnectionError("the stream of events ended without its end marker")
    if not begun:
        yield Head(head.status, head.content_type)
    yield Finish(reader.call.usage)


class _Reader:
    """Cuts a response into events, each with the tokens that became it; runs where the layer sends."""

    def __init__(self, call: EngineCall, path: str) -> None:
        self.call = call
        self.body = bytearray()
        self._path = path
        self._parser: SseParser | None = None
        self._begun: set[int] = set()
        self._sequence = 0
        self._done = False

    @property
    def complete(self) -> bool:
        """Whether a stream came to its end marker."""
        return self._done and self._parser is not None and self._parser.complete

    def begin(self, head: ResponseStart) -> None:
        if head.content_type == _STREAM:
            self._parser = SseParser()

    def feed(self, chunk: bytes) -> list[JsonEvent]:
        """Raises SealmeshError for an error event."""
        if self._parser is None:
            self.body += chunk
            return []
        return [event for data in self._parser.feed(chunk) if (event := self._event(data)) is not None]

    def _event(self, data: bytes) -> JsonEvent | None:
        if data == _DONE:
            self._done = True
            return None
        document = _parsed(data)
        if "error" in document:
            raise _stream_error(document)
        event = JsonEvent(self._sequence, data, self._tokens_behind(document))
        self._sequence += 1
        return event

    def _tokens_behind(self, document: dict[str, Any]) -> list[tuple[int, Sequence[int]]]:
        """Tokens that became this event.

        A chat opens every choice with an event for the role, sent when the first tokens are there but
        before they are; and its parsers may take tokens in and send nothing. A completion sends an event
        per report.
        """
        found: list[tuple[int, Sequence[int]]] = []
        for choice in document.get("choices") or ():
            index = choice["index"]
            if self._path == _CHAT:
                if index not in self._begun:
                    self._begun.add(index)
                    continue
                tokens = self.call.take_all(index)
            else:
                tokens = self.call.take_one(index)
            if tokens:
                found.append((index, tokens))
        return found


def _usage(document: dict[str, Any], call: EngineCall) -> Usage:
    """Counts of a whole answer: the OpenAI layer's own where it states them (beam search, embeddings)."""
    stated = document.get("usage")
    if not isinstance(stated, dict):
        return call.usage
    return Usage(
        int(stated.get("prompt_tokens") or 0),
        int(stated.get("completion_tokens") or 0),
        call.usage.cached_tokens,
    )


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise _engine_failed("the engine sent something other than a JSON object")
    return document


def _message(document: dict[str, Any]) -> str:
    error = document.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _stream_error(document: dict[str, Any]) -> SealmeshError:
    error = document.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    message = _message(document) or "the engine failed in the middle of an answer"
    if isinstance(code, int) and 400 <= code < 500:
        if code == 404:
            return SealmeshError(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", message)
        return _invalid(message)
    return _engine_failed(message)


def _broken(engine: Engine, what: str) -> SealmeshError:
    return _engine_failed(engine.failure or what)


def _engine_failed(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", message, retry_after_s=1)


def _invalid(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, field="body")
