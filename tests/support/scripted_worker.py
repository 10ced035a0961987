"""A worker without an engine: a real gRPC server that answers as a script says, for fast tests.

By default it behaves like the worker's OpenAI layer for a model named "echo": it answers with the last user
message, streamed in pieces of `piece` characters. Tests replace `script` for anything else, and read what
arrived from `requests`, `metadata` and `cancelled`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, Self

import grpc
import orjson
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.inference.v1 import inference_pb2, inference_pb2_grpc
from sealmesh.telemetry.runtime.server import server_options

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
Script = Callable[
    [inference_pb2.ServeOpenAIRequest, Context], AsyncIterator[inference_pb2.ServeOpenAIResponse]
]


def head(status: int = 200, *, stream: bool = False) -> inference_pb2.ServeOpenAIResponse:
    """The response head."""
    content_type = "text/event-stream; charset=utf-8" if stream else "application/json"
    return inference_pb2.ServeOpenAIResponse(
        head=inference_pb2.ResponseHead(status=status, content_type=content_type)
    )


def event(sequence: int, document: object) -> inference_pb2.ServeOpenAIResponse:
    """One JSON document; bytes are sent as they are."""
    data = document if isinstance(document, bytes) else orjson.dumps(document)
    return inference_pb2.ServeOpenAIResponse(json=inference_pb2.JsonEvent(sequence=sequence, data=data))


def finish(prompt: int = 7, completion: int = 5, cached: int = 0) -> inference_pb2.ServeOpenAIResponse:
    """The end with its usage."""
    usage = types_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    return inference_pb2.ServeOpenAIResponse(finish=inference_pb2.ServeFinish(usage=usage))


def chat_chunk(delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
    """A chunk of a streamed chat completion."""
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "echo",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }


def chat_answer(content: str) -> dict[str, object]:
    """A whole chat completion."""
    message = {"role": "assistant", "content": content}
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "echo",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
    }


def error_document(status: int, message: str) -> dict[str, object]:
    """An error as vLLM words it."""
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _unscripted(context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the scripted worker does not do that")


class ScriptedWorker(inference_pb2_grpc.InferenceServiceServicer):
    """The worker; `async with` starts and stops it.

    Attributes:
        address: host:port, once started.
        requests: every ServeOpenAI request that arrived.
        metadata: the metadata of each of them.
        cancelled: set when a call was cancelled by its caller.
        started: set when a call began.
        script: what a call answers.
        piece: characters in each streamed delta of the echo.
    """

    def __init__(
        self,
        *,
        model: str = "echo",
        aliases: tuple[str, ...] = (),
        piece: int = 4,
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.info = inference_pb2.GetModelInfoResponse(
            model=model,
            aliases=aliases,
            version="5a" * 32,
            max_context_tokens=2048,
            sealed=True,
            engine="scripted",
            device="cpu",
        )
        self.requests: list[inference_pb2.ServeOpenAIRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.script: Script = self.echo
        self.piece = piece
        self.address = ""
        self._port = port
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        server = grpc.aio.server(options=server_options(64 * 1024 * 1024))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        target = f"127.0.0.1:{self._port}"
        port = (
            server.add_insecure_port(target)
            if self._credentials is None
            else server.add_secure_port(target, self._credentials)
        )
        self.address = f"127.0.0.1:{port}"
        await self.set_serving(True)
        await server.start()
        self._server = server
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop at once, as a process that dies."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def set_serving(self, serving: bool) -> None:
        """Publish health."""
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def body(self, index: int = -1) -> dict[str, Any]:
        """The decoded body of a request that arrived."""
        document: dict[str, Any] = orjson.loads(self.requests[index].body)
        return document

    async def ServeOpenAI(
        self, request: inference_pb2.ServeOpenAIRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ServeOpenAIResponse]:
        """Run the script."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        ended = False

        def done(_: Context) -> None:
            # A handler that waits sees a cancellation as CancelledError, one that writes not at all.
            if not ended:
                self.cancelled.set()

        context.add_done_callback(done)  # type: ignore[arg-type]  # its stub names a class no function is
        self.started.set()
        try:
            async for message in self.script(request, context):
                yield message
            ended = True
        except Exception:
            ended = True
            raise

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        """The configured facts."""
        return self.info

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Not scripted."""
        await _unscripted(context)
        yield inference_pb2.GenerateResponse()

    async def WatchLoad(
        self, request: inference_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[inference_pb2.WatchLoadResponse]:
        """Not scripted."""
        await _unscripted(context)
        yield inference_pb2.WatchLoadResponse()

    async def ReloadModel(
        self, request: inference_pb2.ReloadModelRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ReloadModelResponse]:
        """Not scripted."""
        await _unscripted(context)
        yield inference_pb2.ReloadModelResponse()

    async def Drain(
        self, request: inference_pb2.DrainRequest, context: Context
    ) -> inference_pb2.DrainResponse:
        """Not scripted."""
        return await _unscripted(context)

    async def ResetPrefixCache(
        self, request: inference_pb2.ResetPrefixCacheRequest, context: Context
    ) -> inference_pb2.ResetPrefixCacheResponse:
        """Not scripted."""
        return await _unscripted(context)

    async def echo(
        self, request: inference_pb2.ServeOpenAIRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ServeOpenAIResponse]:
        """Answer with what was said last."""
        body = orjson.loads(request.body)
        if request.path == "/v1/embeddings":
            yield head()
            yield event(0, {"object": "list", "data": [], "model": body["model"]})
        elif request.path == "/v1/completions":
            async for message in self._echo_completion(body):
                yield message
        else:
            async for message in self._echo_chat(body):
                yield message
        yield finish()

    async def _echo_chat(self, body: dict[str, Any]) -> AsyncIterator[inference_pb2.ServeOpenAIResponse]:
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if not body.get("stream"):
            yield head()
            yield event(0, chat_answer(text))
            return
        yield head(stream=True)
        chunks = [chat_chunk({"role": "assistant", "content": ""})]
        chunks += [chat_chunk({"content": piece}) for piece in self._pieces(text)]
        chunks.append(chat_chunk({}, "stop"))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
            chunks.append({**chat_chunk({}), "choices": [], "usage": usage})
        for sequence, chunk in enumerate(chunks):
            yield event(sequence, chunk)

    async def _echo_completion(
        self, body: dict[str, Any]
    ) -> AsyncIterator[inference_pb2.ServeOpenAIResponse]:
        prompt = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][0]
        frame: dict[str, object] = {"id": "cmpl-scripted", "object": "text_completion", "model": "echo"}
        if not body.get("stream"):
            yield head()
            choice = {"index": 0, "text": prompt, "logprobs": None, "finish_reason": "length"}
            usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
            yield event(0, {**frame, "created": 1_790_000_000, "choices": [choice], "usage": usage})
            return
        yield head(stream=True)
        pieces = self._pieces(prompt)
        for sequence, piece in enumerate(pieces):
            reason = "length" if sequence == len(pieces) - 1 else None
            choice = {"index": 0, "text": piece, "logprobs": None, "finish_reason": reason}
            yield event(sequence, {**frame, "created": 1_790_000_000, "choices": [choice]})

    def _pieces(self, text: str) -> list[str]:
        return [text[start : start + self.piece] for start in range(0, len(text), self.piece)]
