"""InferenceService over an Engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

import grpc
import grpc.aio
from google.protobuf import timestamp_pb2
from opentelemetry import context as otel_context
from sealmesh.inference.engine import Engine, FinishReason, Sampling
from sealmesh.inference.engine_call import EngineCall, Usage
from sealmesh.inference.in_flight import InFlight
from sealmesh.inference.openai import Finish, Head, JsonEvent, OpenAIRequest, serve_openai
from sealmesh.inference.request_context import Tenant
from sealmesh.inference.worker_metrics import WorkerMetrics
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.inference.v1 import inference_pb2, inference_pb2_grpc
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["InferenceService"]

_FINISH: Final = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "abort": types_pb2.FINISH_REASON_ABORTED,
}
_MIN_INTERVAL_MS: Final = 100
_DEFAULT_INTERVAL_MS: Final = 1000
# Characters that cannot be fewer tokens than this fraction of them; text beyond is refused untokenised.
_MAX_CHARS_PER_TOKEN: Final = 64


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one engine. ReloadModel is not part of this release and answers UNIMPLEMENTED.

    Args:
        engine: started before calls come in.
        worker: name of this worker.
        in_flight: the register of open calls.
        metrics: of the worker.
    """

    def __init__(self, engine: Engine, worker: str, in_flight: InFlight, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._worker = worker
        self._in_flight = in_flight
        self._metrics = metrics

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        call = _call(request.request_id, request.tenant if request.HasField("tenant") else None)
        with self._in_flight.admitted(call):
            self._check_model(request.model)
            prompt = await self._prompt(request)
            sampling = self._sampling(request.sampling, len(prompt))
            finish: FinishReason = "abort"
            try:
                async with aclosing(self._engine.generate(call, prompt, sampling)) as deltas:
                    sequence = 0
                    async for delta in deltas:
                        if delta.token_ids or delta.text:
                            yield inference_pb2.GenerateResponse(
                                delta=inference_pb2.Delta(
                                    sequence=sequence, token_ids=delta.token_ids, text=delta.text
                                )
                            )
                            sequence += 1
                        if delta.finish is not None:
                            finish = delta.finish
            except (asyncio.CancelledError, GeneratorExit):
                self._metrics.aborted.inc()
                raise
            finally:
                if call.unfinished:
                    await self._engine.abort(call)
            yield inference_pb2.GenerateResponse(
                finish=inference_pb2.GenerateFinish(reason=_FINISH[finish], usage=_usage(call.usage))
            )

    async def ServeOpenAI(
        self,
        request: inference_pb2.ServeOpenAIRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.ServeOpenAIRequest, inference_pb2.ServeOpenAIResponse
        ],
    ) -> AsyncIterator[inference_pb2.ServeOpenAIResponse]:
        if request.replay:
            raise SealmeshError(
                grpc.StatusCode.UNIMPLEMENTED,
                "STREAM_NOT_RESUMABLE",
                "this worker does not continue answers that another one began",
                field="replay",
            )
        call = _call(request.request_id, request.tenant if request.HasField("tenant") else None)
        inner = OpenAIRequest(path=request.path, body=request.body, method=request.method)
        with self._in_flight.admitted(call):
            try:
                async with aclosing(serve_openai(self._engine, call, inner)) as events:
                    async for event in events:
                        yield _response(event)
            except (asyncio.CancelledError, GeneratorExit):
                self._metrics.aborted.inc()
                raise

    async def GetModelInfo(
        self,
        request: inference_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse
        ],
    ) -> inference_pb2.GetModelInfoResponse:
        facts = self._engine.facts
        return inference_pb2.GetModelInfoResponse(
            model=facts.model,
            aliases=facts.aliases,
            version=facts.version,
            max_context_tokens=facts.max_context_tokens,
            sealed=facts.sealed,
            engine=facts.engine,
            device=facts.device,
        )

    async def WatchLoad(
        self,
        request: inference_pb2.WatchLoadRequest,
        context: grpc.aio.ServicerContext[inference_pb2.WatchLoadRequest, inference_pb2.WatchLoadResponse],
    ) -> AsyncIterator[inference_pb2.WatchLoadResponse]:
        interval_ms = request.interval_ms or _DEFAULT_INTERVAL_MS
        if interval_ms < _MIN_INTERVAL_MS:
            raise _invalid("interval_ms", f"must be 0 or at least {_MIN_INTERVAL_MS}, not {interval_ms}")
        while True:
            yield self._load_report()
            await asyncio.sleep(interval_ms / 1000)

    async def Drain(
        self,
        request: inference_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[inference_pb2.DrainRequest, inference_pb2.DrainResponse],
    ) -> inference_pb2.DrainResponse:
        aborted = await self._in_flight.drain(request.grace_ms / 1000)
        return inference_pb2.DrainResponse(aborted_requests=aborted)

    async def ResetPrefixCache(
        self,
        request: inference_pb2.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.ResetPrefixCacheRequest, inference_pb2.ResetPrefixCacheResponse
        ],
    ) -> inference_pb2.ResetPrefixCacheResponse:
        return inference_pb2.ResetPrefixCacheResponse(reset=await self._engine.reset_prefix_cache())

    def _load_report(self) -> inference_pb2.WatchLoadResponse:
        load = self._engine.load
        observed = timestamp_pb2.Timestamp()
        observed.GetCurrentTime()
        return inference_pb2.WatchLoadResponse(
            worker=self._worker,
            observed_at=observed,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            kv_usage_ratio=load.kv_usage_ratio,
            model_version=self._engine.facts.version,
            draining=self._in_flight.draining,
        )

    def _check_model(self, model: str) -> None:
        # Adapters are reached by the OpenAI layer; token ids go to the base model only.
        if model != self._engine.facts.model:
            raise SealmeshError(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"no model {model[:128]!r} here; this worker serves {self._engine.facts.model!r}",
                field="model",
            )

    async def _prompt(self, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        limit = self._engine.facts.max_context_tokens
        if request.WhichOneof("input") == "tokens":
            prompt: Sequence[int] = request.tokens.ids
        elif len(request.text) > limit * _MAX_CHARS_PER_TOKEN:
            raise _too_long(f"the prompt has {len(request.text)} characters", limit)
        else:
            prompt = await self._engine.tokenize(request.text) if request.text else ()
        if not prompt:
            raise _invalid("input", "must not be empty: set tokens or text")
        if len(prompt) >= limit:
            raise _too_long(f"the prompt has {len(prompt)} tokens", limit)
        return prompt

    def _sampling(self, asked: inference_pb2.SamplingParams, prompt_tokens: int) -> Sampling:
        room = self._engine.facts.max_context_tokens - prompt_tokens
        if asked.HasField("max_tokens"):
            if asked.max_tokens < 1:
                raise _invalid("sampling.max_tokens", "must be at least 1")
            if asked.max_tokens > room:
                raise _too_long(
                    f"the prompt has {prompt_tokens} tokens and {asked.max_tokens} are asked for",
                    self._engine.facts.max_context_tokens,
                )
        # Written so that NaN, which compares false with everything, is refused too.
        if asked.HasField("temperature") and not 0 <= asked.temperature <= 2:
            raise _invalid("sampling.temperature", "must be 0 to 2")
        if asked.HasField("top_p") and not 0 < asked.top_p <= 1:
            raise _invalid("sampling.top_p", "must be above 0 and at most 1")
        return Sampling(
            max_tokens=asked.max_tokens if asked.HasField("max_tokens") else room,
            temperature=asked.temperature if asked.HasField("temperature") else None,
            top_p=asked.top_p if asked.HasField("top_p") else None,
            top_k=asked.top_k if asked.HasField("top_k") else None,
            stop=tuple(asked.stop),
            seed=asked.seed if asked.HasField("seed") else None,
        )


def _call(request_id: str, tenant: types_pb2.TenantContext | None) -> EngineCall:
    return EngineCall(
        request_id=request_id,
        tenant=Tenant(tenant.handle, tenant.epoch, tenant.cache_salt) if tenant is not None else None,
        parent=otel_context.get_current(),
    )


def _response(event: Head | JsonEvent | Finish) -> inference_pb2.ServeOpenAIResponse:
    match event:
        case Head():
            head = inference_pb2.ResponseHead(status=event.status, content_type=event.content_type)
            return inference_pb2.ServeOpenAIResponse(head=head)
        case JsonEvent():
            document = inference_pb2.JsonEvent(
                sequence=event.sequence,
                data=event.data,
                tokens=[
                    inference_pb2.ChoiceTokens(index=index, token_ids=token_ids)
                    for index, token_ids in event.tokens
                ],
            )
            return inference_pb2.ServeOpenAIResponse(json=document)
        case Finish():
            finish = inference_pb2.ServeFinish(usage=_usage(event.usage))
            return inference_pb2.ServeOpenAIResponse(finish=finish)


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _too_long(what: str, limit: int) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_TOO_LONG",
        f"{what}; prompt and answer together may have {limit} tokens",
        metadata={"max_context_tokens": str(limit)},
    )


def _invalid(field: str, what: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", f"{field} {what}", field=field)
