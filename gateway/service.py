"""GatewayService: the typed surface, for gRPC stubs and for REST through the transcoder.

`GatewayMethods` holds the RPCs as functions of a request and a caller; the gRPC servicer and the transcoder
are two ways to call them. Inference goes through the same pipeline and the same engine layer as the OpenAI
skin, so masking, restoring and counting are one code path.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, cast
from urllib.parse import unquote

import grpc
import orjson
from google.protobuf import json_format
from sealmesh.gateway.access.identity import Authenticator
from sealmesh.gateway.fields import CHAT_COMPLETIONS, COMPLETIONS, Json, JsonObject, invalid
from sealmesh.gateway.pii.spans import Finding as PiiFinding
from sealmesh.gateway.pipeline import Answer, Caller, Pipeline
from sealmesh.gateway.routing.pool import ServedModel, WorkerPool
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["OPERATIONS", "SERVICE", "GatewayMethods", "GatewayServicer", "RpcAuthorizer"]

SERVICE: Final = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
# What each RPC does, for the role check; an RPC that is not here is refused.
OPERATIONS: Final[Mapping[str, str]] = {
    f"{SERVICE.full_name}/GenerateText": "infer",
    f"{SERVICE.full_name}/CreateChatCompletion": "infer",
    f"{SERVICE.full_name}/ListModels": "models.read",
    f"{SERVICE.full_name}/GetModel": "models.read",
    f"{SERVICE.full_name}/MaskText": "text.mask",
}

_PREFIX: Final = "models/"
_PAGE_SIZE: Final = 100
_MAX_PAGE_SIZE: Final = 1000
_MAX_STOPS: Final = 4
_Role = gateway_pb2.ChatMessage.Role
_ROLES: Final[Mapping[int, str]] = {
    _Role.ROLE_SYSTEM: "system",
    _Role.ROLE_USER: "user",
    _Role.ROLE_ASSISTANT: "assistant",
    _Role.ROLE_TOOL: "tool",
}
_REASONS: Final[Mapping[str, types_pb2.FinishReason.ValueType]] = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_ABORTED,
    "tool_calls": types_pb2.FINISH_REASON_TOOL_CALLS,
    "function_call": types_pb2.FINISH_REASON_TOOL_CALLS,
    "content_filter": types_pb2.FINISH_REASON_CONTENT_FILTER,
}

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class GatewayMethods:
    """The RPCs of GatewayService, free of gRPC and HTTP.

    Args:
        pipeline: filters and workers.
        pool: answers which models there are.
    """

    def __init__(self, pipeline: Pipeline, pool: WorkerPool) -> None:
        self._pipeline = pipeline
        self._pool = pool

    async def generate_text(
        self, request: gateway_pb2.GenerateTextRequest, caller: Caller
    ) -> AsyncGenerator[gateway_pb2.GenerateTextResponse, None]:
        """Continue a prompt; raises SealmeshError."""
        if not request.prompt:
            raise invalid("prompt must have at least one character", "prompt")
        body: JsonObject = {
            "model": model_id(request.model, "model"),
            "prompt": request.prompt,
            "stream": True,
        }
        body |= _sampling(request.sampling)
        async with await self._pipeline.infer(COMPLETIONS, body, caller) as answer:
            reason: str | None = None
            async for choice in _choices(answer):
                text = choice.get("text")
                if isinstance(text, str) and text:
                    yield gateway_pb2.GenerateTextResponse(text_delta=text)
                reason = _reason(choice, reason)
            yield gateway_pb2.GenerateTextResponse(finish=_finish(answer, reason))

    async def create_chat_completion(
        self, request: gateway_pb2.CreateChatCompletionRequest, caller: Caller
    ) -> AsyncGenerator[gateway_pb2.CreateChatCompletionResponse, None]:
        """Answer a conversation; raises SealmeshError."""
        body: JsonObject = {
            "model": model_id(request.model, "model"),
            "messages": [
                _message(message, f"messages[{position}]")
                for position, message in enumerate(request.messages)
            ],
            "stream": True,
        }
        if request.tools:
            body["tools"] = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(request.tools)]
        body |= _sampling(request.sampling)
        async with await self._pipeline.infer(CHAT_COMPLETIONS, body, caller) as answer:
            reason: str | None = None
            async for choice in _choices(answer):
                delta = _delta(choice.get("delta"))
                if delta is not None:
                    yield gateway_pb2.CreateChatCompletionResponse(delta=delta)
                reason = _reason(choice, reason)
            yield gateway_pb2.CreateChatCompletionResponse(finish=_finish(answer, reason))

    async def list_models(
        self, request: gateway_pb2.ListModelsRequest, caller: Caller
    ) -> gateway_pb2.ListModelsResponse:
        """One page of models in order of name."""
        if request.page_size < 0:
            raise invalid("page_size must not be negative", "page_size")
        size = min(request.page_size or _PAGE_SIZE, _MAX_PAGE_SIZE)
        after = _page_start(request.page_token)
        models = [served for served in self._pool.models() if served.name > after]
        page = models[:size]
        return gateway_pb2.ListModelsResponse(
            models=[_model(served) for served in page],
            next_page_token=_page_token(page[-1].name) if len(models) > size else "",
        )

    async def get_model(self, request: gateway_pb2.GetModelRequest, caller: Caller) -> gateway_pb2.Model:
        """One model; raises MODEL_NOT_FOUND."""
        return _model(self._pool.find(model_id(request.name, "name")))

    async def mask_text(
        self, request: gateway_pb2.MaskTextRequest, caller: Caller
    ) -> gateway_pb2.MaskTextResponse:
        """Run the privacy filter alone."""
        if not request.text:
            raise invalid("text must have at least one character", "text")
        masked = await self._pipeline.privacy.mask_text(request.text, caller.principal)
        return gateway_pb2.MaskTextResponse(text=masked.text, findings=_findings(masked.session.findings))


def model_id(name: str, field: str) -> str:
    """The id in a resource name "models/{model}"; a slash in the id may be written %2F."""
    identifier = unquote(name.removeprefix(_PREFIX))
    if not name.startswith(_PREFIX) or not identifier:
        raise invalid(f"{field} must be a resource name like 'models/smollm2'", field)
    return identifier


async def _choices(answer: Answer) -> AsyncIterator[Mapping[str, Json]]:
    """The first choice of every document; raises when the engine reports an error."""
    async for raw in answer:
        choices = orjson.loads(raw).get("choices")
        if choices:
            yield choices[0]


def _reason(choice: Mapping[str, Json], before: str | None) -> str | None:
    reason = choice.get("finish_reason")
    return reason if isinstance(reason, str) else before


def _finish(answer: Answer, reason: str | None) -> gateway_pb2.Finish:
    if reason is None:
        raise SealmeshError(
            grpc.StatusCode.UNAVAILABLE,
            "ENGINE_FAILED",
            "the answer ended without a reason; it may be cut short",
            retry_after_s=2.0,
        )
    return gateway_pb2.Finish(
        reason=_REASONS.get(reason, types_pb2.FINISH_REASON_UNSPECIFIED),
        usage=answer.usage,
        findings=_findings(answer.findings),
    )


def _findings(findings: Iterable[PiiFinding]) -> list[gateway_pb2.PiiFinding]:
    return [
        gateway_pb2.PiiFinding(
            type=finding.type,
            start=finding.start,
            end=finding.end,
            score=finding.score,
            action=finding.action,
            field=finding.field,
        )
        for finding in findings
    ]


def _sampling(options: gateway_pb2.SamplingOptions) -> JsonObject:
    body: JsonObject = {}
    if options.HasField("max_tokens"):
        if options.max_tokens < 1:
            raise invalid("sampling.max_tokens must be 1 or more", "sampling.max_tokens")
        body["max_tokens"] = options.max_tokens
    if options.HasField("temperature"):
        if not 0 <= options.temperature <= 2:
            raise invalid("sampling.temperature must be from 0 to 2", "sampling.temperature")
        body["temperature"] = options.temperature
    if options.HasField("top_p"):
        if not 0 < options.top_p <= 1:
            raise invalid("sampling.top_p must be above 0 and at most 1", "sampling.top_p")
        body["top_p"] = options.top_p
    if len(options.stop) > _MAX_STOPS:
        raise invalid(f"sampling.stop holds more than {_MAX_STOPS} strings", "sampling.stop")
    if options.stop:
        body["stop"] = list(options.stop)
    if options.HasField("seed"):
        body["seed"] = options.seed
    return body


def _message(message: gateway_pb2.ChatMessage, where: str) -> JsonObject:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{where}.role must be set to a known role", f"{where}.role")
    body: JsonObject = {"role": role, "content": message.content}
    if message.name:
        body["name"] = message.name
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
        if not message.content:
            body["content"] = None
    if message.role == _Role.ROLE_TOOL:
        body["tool_call_id"] = message.tool_call_id
    return body


def _tool(tool: gateway_pb2.Tool, where: str) -> JsonObject:
    if not tool.name:
        raise invalid(f"{where}.name must be given", f"{where}.name")
    function: JsonObject = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = cast("JsonObject", json_format.MessageToDict(tool.parameters))
    return {"type": "function", "function": function}


def _delta(delta: Json) -> gateway_pb2.ChatDelta | None:
    """The typed delta, or None when it says nothing (the first chunk names the role only)."""
    if not isinstance(delta, dict):
        return None
    content, reasoning = delta.get("content"), delta.get("reasoning") or delta.get("reasoning_content")
    calls = delta.get("tool_calls")
    typed = gateway_pb2.ChatDelta(
        content=content if isinstance(content, str) else "",
        reasoning=reasoning if isinstance(reasoning, str) else "",
        tool_calls=[_call_delta(call) for call in calls if isinstance(call, dict)]
        if isinstance(calls, list)
        else (),
    )
    return typed if typed.ByteSize() else None


def _call_delta(call: JsonObject) -> gateway_pb2.ToolCallDelta:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    index = call.get("index")
    return gateway_pb2.ToolCallDelta(
        index=index if isinstance(index, int) else 0,
        id=_text(call.get("id")),
        name=_text(function.get("name")),
        arguments_json=_text(function.get("arguments")),
    )


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _model(served: ServedModel) -> gateway_pb2.Model:
    return gateway_pb2.Model(
        name=_PREFIX + served.name.replace("/", "%2F"),
        max_context_tokens=served.info.max_context_tokens,
        version=served.info.version,
        sealed=served.info.sealed,
        ready=served.ready,
    )


def _page_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _page_start(token: str) -> str:
    try:
        name = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except (binascii.Error, ValueError):
        name = ""
    # The decoder skips what is not base64: only a token that comes out the same again is one of ours.
    if _page_token(name) != token:
        raise invalid("page_token is not one that this service gave", "page_token")
    return name


class RpcAuthorizer:
    """Checks key and role of every gRPC call; `authorization: Bearer …` is the only metadata that counts."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def __call__(self, context: Context, full_method: str) -> None:
        """Return when the call may be made; raises SealmeshError."""
        principal = self._authenticator.authenticate(bearer_of(context))
        principal.require(OPERATIONS.get(full_method.lstrip("/"), ""))


def bearer_of(context: Context) -> str | None:
    """The `authorization` metadata of a call; raises INVALID_REQUEST when it is given twice."""
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    if len(values) > 1:
        raise invalid("metadata 'authorization' is given twice")
    return values[0] if values and isinstance(values[0], str) else None


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The gRPC skin of GatewayMethods.

    Args:
        methods: the RPCs.
        authenticator: checks keys.
        timeout_s: longest time for one answer, in seconds; a shorter deadline of the caller counts.
        new_request_id: makes ids of requests.
    """

    def __init__(
        self,
        methods: GatewayMethods,
        authenticator: Authenticator,
        *,
        timeout_s: float,
        new_request_id: Callable[[], str],
    ) -> None:
        self._methods = methods
        self._authenticator = authenticator
        self._timeout_s = timeout_s
        self._new_request_id = new_request_id

    def _caller(self, context: Context) -> Caller:
        left = cast("float | None", context.time_remaining())
        timeout_s = self._timeout_s if left is None else min(left, self._timeout_s)
        principal = self._authenticator.authenticate(bearer_of(context))
        return Caller(principal, self._new_request_id(), time.monotonic() + timeout_s)

    # The generators themselves are returned, so that the runtime closes them the moment a call ends early.
    def GenerateText(
        self, request: gateway_pb2.GenerateTextRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.GenerateTextResponse, None]:
        """See the contract."""
        return self._methods.generate_text(request, self._caller(context))

    def CreateChatCompletion(
        self, request: gateway_pb2.CreateChatCompletionRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.CreateChatCompletionResponse, None]:
        """See the contract."""
        return self._methods.create_chat_completion(request, self._caller(context))

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        """See the contract."""
        return await self._methods.list_models(request, self._caller(context))

    async def GetModel(self, request: gateway_pb2.GetModelRequest, context: Context) -> gateway_pb2.Model:
        """See the contract."""
        return await self._methods.get_model(request, self._caller(context))

    async def MaskText(
        self, request: gateway_pb2.MaskTextRequest, context: Context
    ) -> gateway_pb2.MaskTextResponse:
        """See the contract."""
        return await self._methods.mask_text(request, self._caller(context))
