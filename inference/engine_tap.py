"""Sits between vLLM's OpenAI layer and the engine client: counts, traces, and adds the tenant.

Replaces the client's `generate`, so every request of every path goes through it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from sealmesh.inference.engine_call import EngineCall, current_call
from sealmesh.inference.request_context import transfer_params
from sealmesh.inference.worker_metrics import WorkerMetrics
from sealmesh.telemetry.attributes import Attribute, set_attributes
from sealmesh.telemetry.tracing import Tracing, inject_context

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

__all__ = ["EngineTap"]

SPAN_NAME: Final = "engine.generate"
_TRANSFER: Final = "kv_transfer_params"


class EngineTap:
    """`generate` of an engine client, observed.

    Args:
        generate: the client's own.
        model: served name, for spans.
        connected: whether the engine has a KV connector to tell about tenants.
        tracing: where `engine.generate` spans go.
        metrics: token counts and latencies.
    """

    def __init__(
        self,
        generate: Callable[..., AsyncGenerator[RequestOutput, None]],
        model: str,
        connected: bool,
        tracing: Tracing,
        metrics: WorkerMetrics,
    ) -> None:
        self._generate = generate
        self._model = model
        self._connected = connected
        self._tracing = tracing
        self._metrics = metrics

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate; under `engine_call.calling` the request is recorded and traced."""
        call = current_call()
        if call is None:
            return self._generate(prompt, sampling_params, request_id, *args, **kwargs)
        # Now and not when the generator first runs: prompts are numbered in the order of the calls.
        number = call.begin(sampling_params.n or 1)
        source = self._generate(prompt, sampling_params, request_id, *args, **kwargs)
        return self._observe(source, call, number, request_id, sampling_params)

    async def _observe(
        self,
        source: AsyncGenerator[RequestOutput, None],
        call: EngineCall,
        number: int,
        request_id: str,
        sampling_params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        # The source has not run yet, so the engine has not seen the parameters either.
        span = self._tracing.tracer.start_span(SPAN_NAME, context=call.parent, kind=SpanKind.INTERNAL)
        set_attributes(span, {Attribute.GEN_AI_MODEL: self._model})
        _set_transfer_params(call if self._connected else None, span, sampling_params)
        record = _Record(span, self._metrics)
        call.submit(request_id)
        cumulative = getattr(sampling_params.output_kind, "name", "") == "CUMULATIVE"
        seen: dict[int, int] = {}
        try:
            async with aclosing(source) as outputs:
                async for output in outputs:
                    prompt_tokens = len(output.prompt_token_ids or ())
                    if prompt_tokens:
                        record.prompt_tokens = prompt_tokens
                        record.cached_tokens = max(record.cached_tokens, output.num_cached_tokens or 0)
                        call.note_prompt(number, prompt_tokens, output.num_cached_tokens or 0)
                    for choice in output.outputs:
                        tokens = list(choice.token_ids)
                        if cumulative:
                            tokens = tokens[seen.get(choice.index, 0) :]
                            seen[choice.index] = seen.get(choice.index, 0) + len(tokens)
                        call.note_tokens(number, choice.index, tokens)
                        record.tokens(len(tokens), choice.finish_reason)
                    if output.finished:
                        call.end(request_id)
                    yield output
        except BaseException as exc:
            record.failed(exc)
            raise
        finally:
            call.end(request_id)
            record.close()


class _Record:
    """Span and metrics of one engine request."""

    def __init__(self, span: Span, metrics: WorkerMetrics) -> None:
        self._span = span
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first = 0.0
        self._last = 0.0
        self._finish_reason = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0

    def tokens(self, count: int, finish_reason: str | None) -> None:
        if finish_reason:
            self._finish_reason = finish_reason
        if not count:
            return
        self.output_tokens += count
        self._last = time.perf_counter()
        if not self._first:
            self._first = self._last
            self._span.add_event("first token")
            self._metrics.time_to_first_token.observe(self._first - self._started)

    def failed(self, exc: BaseException) -> None:
        set_attributes(self._span, {Attribute.ERROR_TYPE: type(exc).__name__})
        self._span.set_status(Status(StatusCode.ERROR))

    def close(self) -> None:
        set_attributes(
            self._span,
            {
                Attribute.GEN_AI_INPUT_TOKENS: self.prompt_tokens,
                Attribute.GEN_AI_OUTPUT_TOKENS: self.output_tokens,
                Attribute.GEN_AI_CACHED_TOKENS: self.cached_tokens,
            },
        )
        if self._finish_reason:
            set_attributes(self._span, {Attribute.GEN_AI_FINISH_REASON: self._finish_reason})
        if self._first:
            elapsed = self._first - self._started
            set_attributes(self._span, {Attribute.GEN_AI_TIME_TO_FIRST_TOKEN_S: round(elapsed, 6)})
        if self.output_tokens > 1:
            self._metrics.time_per_output_token.observe((self._last - self._first) / (self.output_tokens - 1))
        self._metrics.tokens.labels("prompt").inc(self.prompt_tokens)
        self._metrics.tokens.labels("cached").inc(self.cached_tokens)
        self._metrics.tokens.labels("output").inc(self.output_tokens)
        self._span.end()


def _set_transfer_params(call: EngineCall | None, span: Span, sampling_params: SamplingParams) -> None:
    """Replaces whatever the parameters hold; without a connector vLLM would warn at every request."""
    extra = {key: value for key, value in (sampling_params.extra_args or {}).items() if key != _TRANSFER}
    if call is not None:
        carrier: dict[str, str] = {}
        inject_context(carrier, trace.set_span_in_context(span))
        params = transfer_params(call.tenant, carrier.get("traceparent", ""))
        if params is not None:
            extra[_TRANSFER] = params
    sampling_params.extra_args = extra or None
