"""The OpenAI skin: JSON and server-sent events as OpenAI's clients expect them.

Answers are the engine's own documents, byte for byte where the privacy filter changed nothing. Errors, the
engine's own too, have OpenAI's body and status. A stream that breaks off ends with an error event and
without `[DONE]`, so it can never be taken for a complete one.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

import grpc
import orjson
from sealmesh.gateway.access.identity import Authenticator, Principal
from sealmesh.gateway.engine_errors import OPENAI_CODE
from sealmesh.gateway.fields import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS
from sealmesh.gateway.http import JSON, DisconnectGuard, Exchange, parse_object
from sealmesh.gateway.pipeline import GRACE_S, Answer, Caller, Pipeline, deadline_exceeded
from sealmesh.gateway.routing.pool import ServedModel, WorkerPool
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["OpenAIFront", "error_body", "respond_error", "retry_headers"]

_SSE: Final = b"text/event-stream; charset=utf-8"
_DONE: Final = b"data: [DONE]\n\n"
# type and code of OpenAI's error object, by reason; else by HTTP status.
_CODES: Final = {
    "CREDENTIAL_INVALID": "invalid_api_key",
    "MODEL_NOT_FOUND": "model_not_found",
    "CONTEXT_TOO_LONG": "context_length_exceeded",
    "QUOTA_EXCEEDED": "rate_limit_exceeded",
}
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class OpenAIFront:
    """Handlers of `/v1/…`.

    Args:
        pipeline: filters and workers.
        pool: answers which models there are.
        authenticator: checks keys.
        settings: limits.
    """

    def __init__(
        self, pipeline: Pipeline, pool: WorkerPool, authenticator: Authenticator, settings: GatewaySettings
    ) -> None:
        self._pipeline = pipeline
        self._pool = pool
        self._authenticator = authenticator
        self._max_body_bytes = settings.max_body_bytes
        self._body_timeout_s = settings.body_timeout_ms / 1000
        self._timeout_s = settings.request_timeout_ms / 1000

    async def chat_completions(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self._infer(exchange, CHAT_COMPLETIONS)

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self._infer(exchange, COMPLETIONS)

    async def embeddings(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        await self._infer(exchange, EMBEDDINGS)

    async def list_models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        self._principal(exchange).require("models.read")
        models = [_model(served) for served in self._pool.models()]
        await exchange.respond(200, JSON, orjson.dumps({"object": "list", "data": models}))

    async def get_model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}; the id may hold slashes."""
        self._principal(exchange).require("models.read")
        served = self._pool.find(exchange.path.removeprefix("/v1/models/"))
        await exchange.respond(200, JSON, orjson.dumps(_model(served)))

    async def unknown(self, exchange: Exchange) -> None:
        """Any other path under /v1."""
        self._principal(exchange)
        raise SealmeshError(
            grpc.StatusCode.NOT_FOUND,
            "UNKNOWN_METHOD",
            "no such path; served are /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models",
        )

    def _principal(self, exchange: Exchange) -> Principal:
        principal = self._authenticator.authenticate(exchange.header(b"authorization"))
        exchange.fields["tenant"] = principal.context.handle
        exchange.fields["key"] = principal.key_prefix
        return principal

    async def _infer(self, exchange: Exchange, path: str) -> None:
        principal = self._principal(exchange)
        body = parse_object(await exchange.body(self._max_body_bytes, self._body_timeout_s))
        caller = Caller(principal, exchange.request_id, time.monotonic() + self._timeout_s)
        async with DisconnectGuard(exchange):
            try:
                # The RPC's own deadline comes first; this one bounds a caller that does not read.
                async with (
                    asyncio.timeout(self._timeout_s + GRACE_S),
                    await self._pipeline.infer(path, body, caller) as answer,
                ):
                    try:
                        if answer.streamed:
                            await _stream(exchange, answer)
                        else:
                            await _unary(exchange, answer)
                    finally:
                        _note(exchange, answer)
            except TimeoutError:
                raise deadline_exceeded() from None


async def _unary(exchange: Exchange, answer: Answer) -> None:
    documents = [document async for document in answer]
    await exchange.respond(200, JSON, b"".join(documents))


async def _stream(exchange: Exchange, answer: Answer) -> None:
    await exchange.start_stream(_SSE)
    try:
        async for document in answer:
            await exchange.write(b"data: %b\n\n" % document)
    except SealmeshError as error:
        exchange.fields["reason"] = error.reason
        await exchange.finish(b"data: %b\n\n" % error_body(error))
        return
    await exchange.finish(_DONE)


def _note(exchange: Exchange, answer: Answer) -> None:
    exchange.fields["worker"] = answer.worker.address
    exchange.fields["findings"] = len(answer.findings)
    if answer.usage is not None:
        exchange.fields["input_tokens"] = answer.usage.prompt_tokens
        exchange.fields["output_tokens"] = answer.usage.completion_tokens
        exchange.fields["cached_tokens"] = answer.usage.cached_tokens


def _model(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.since,
        "owned_by": "sealmesh",
        "root": served.info.model,
        "parent": None,
        "max_model_len": served.info.max_context_tokens,
        "sealed": served.info.sealed,
        "version": served.info.version,
        "ready": served.ready,
    }


async def respond_error(exchange: Exchange, error: SealmeshError, status: int) -> None:
    """Answer with OpenAI's error object."""
    await exchange.respond(status, JSON, error_body(error, status), retry_headers(error))


def error_body(error: SealmeshError, status: int | None = None) -> bytes:
    """OpenAI's error object, `{"error": {"message", "type", "param", "code"}}`."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": _TYPES.get(status or error.http_status, "server_error"),
                "param": error.field,
                "code": error.metadata.get(OPENAI_CODE) or _CODES.get(error.reason, error.reason.lower()),
            }
        }
    )


def retry_headers(error: SealmeshError) -> list[tuple[bytes, bytes]]:
    """`Retry-After` in whole seconds when the error says when a retry makes sense."""
    if error.retry_after_s is None:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
