"""vLLM as the worker's engine: AsyncLLM and its OpenAI layer, both in this process."""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from sealmesh.inference.daemon_thread import in_daemon_thread
from sealmesh.inference.devices import Device, DeviceError, Footprint
from sealmesh.inference.engine import Delta, EngineLoad, FinishReason, ModelFacts, Sampling
from sealmesh.inference.engine_args import parse_engine_args
from sealmesh.inference.engine_call import EngineCall, calling
from sealmesh.inference.last_words import LAST_WORDS_VARIABLE, hear
from sealmesh.inference.model_folder import has_latent_attention
from sealmesh.inference.parent_watch import ENGINE_OF_WORKER_VARIABLE
from sealmesh.inference.settings import EngineArgument
from sealmesh.inference.shared_memory import note_buffers
from sealmesh.inference.worker_metrics import WorkerMetrics
from sealmesh.telemetry.runtime.errors import Reason, SealmeshError
from sealmesh.telemetry.runtime.http import AsgiApp
from sealmesh.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from sealmesh.inference.step_log import StepCounter
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["EnginePlan", "VllmEngine"]

_T = TypeVar("_T")
_GIB: Final = 1 << 30
_LAST_WORDS: Final[Mapping[str, tuple[grpc.StatusCode, Reason]]] = {
    "INTEGRITY_FAILURE": (grpc.StatusCode.DATA_LOSS, "INTEGRITY_FAILURE"),
    "KEY_DENIED": (grpc.StatusCode.PERMISSION_DENIED, "KEY_DENIED"),
    "KEY_SLOT_MISMATCH": (grpc.StatusCode.UNAUTHENTICATED, "KEY_SLOT_MISMATCH"),
    "ENGINE_FAILED": (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED"),
    "DEPENDENCY_UNAVAILABLE": (grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE"),
}
_FINISH: Final[Mapping[str, FinishReason]] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class EnginePlan:
    """What engine to build.

    Attributes:
        model: served name.
        folder: model folder for vLLM: configuration and tokenizer, and the weights unless they are sealed.
        version: of the sealed model; empty for a plain one.
        device: family to run on.
        dtype: vLLM dtype name; "auto" leaves it to vLLM.
        max_model_len: tokens, or None for the model's own.
        kv_cache_gib: space for the KV cache.
        weight_bytes: size of the weights in `dtype`, for the memory check.
        arguments: vLLM options; they win over the device's.
        log: level and format of the engine processes' own lines, for example "info:text".
        private: folder in memory of this worker; an engine process says there why it could not start.
        release: called once the engine is gone; removes what was made for it.
    """

    model: str
    folder: Path
    version: str
    device: Device
    dtype: str
    max_model_len: int | None
    kv_cache_gib: int
    weight_bytes: int
    arguments: Mapping[str, EngineArgument]
    log: str
    private: Path
    release: Callable[[], None]

    @property
    def last_words(self) -> Path:
        """File for `last_words.say`."""
        return self.private / "last-words"


class VllmEngine:
    """An `Engine` on vLLM 0.32 or 0.23. `start` and `close` once each.

    Args:
        prepare: makes the model ready and says what to build; called by `start` in a thread.
        telemetry: of this process.
        metrics: of the worker.
    """

    def __init__(
        self, prepare: Callable[[], EnginePlan], telemetry: Telemetry, metrics: WorkerMetrics
    ) -> None:
        self._prepare = prepare
        self._plan: EnginePlan | None = None
        self._telemetry = telemetry
        self._metrics = metrics
        self._client: AsyncLLM | None = None
        self._app: AsgiApp | None = None
        self._facts: ModelFacts | None = None
        self._counter: StepCounter | None = None

    async def start(self) -> None:
        plan = self._plan = await in_daemon_thread(self._prepare)
        try:
            try:
                plan.device.check(Footprint(plan.weight_bytes, plan.kv_cache_gib * _GIB))
            except DeviceError as exc:
                raise _invalid(str(exc)) from None
            self._set_environment(plan)
            arguments = _arguments(plan)
            await self._build(plan, await in_daemon_thread(lambda: parse_engine_args(arguments)))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            if client.output_handler is not None:
                # It would report the end of the engine as a failure.
                client.output_handler.cancel()
            # Joins the engine's processes; seconds at most.
            await asyncio.to_thread(client.shutdown)
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.release()

    @property
    def facts(self) -> ModelFacts:
        return _started(self._facts)

    @property
    def app(self) -> AsgiApp:
        return _started(self._app)

    @property
    def load(self) -> EngineLoad:
        # An engine that has nothing left to do reports no more: its last word may be a request since aborted.
        if self._counter is None or self.unfinished == 0:
            return EngineLoad()
        return self._counter.load

    @property
    def unfinished(self) -> int:
        if self._client is None:
            return 0
        return int(self._client.output_processor.get_num_unfinished_requests())

    @property
    def steps(self) -> int:
        return self._counter.steps if self._counter is not None else 0

    @property
    def failure(self) -> str:
        if self._client is None or not self._client.errored:
            return ""
        return "the engine process ended unexpectedly; its last lines are above in this log"

    async def tokenize(self, text: str) -> list[int]:
        tokenizer = _started(self._client).get_tokenizer()
        if asyncio.iscoroutine(tokenizer):
            tokenizer = await tokenizer
        # Off the loop: a text of a megabyte takes a tenth of a second.
        return cast("list[int]", await asyncio.to_thread(tokenizer.encode, text))

    async def generate(
        self, call: EngineCall, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Delta, None]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        client = _started(self._client)
        defaults: dict[str, Any] = dict(client.model_config.get_diff_sampling_param())
        given = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
        }
        defaults.update({name: value for name, value in given.items() if value is not None})
        defaults.update(max_tokens=sampling.max_tokens, output_kind=RequestOutputKind.DELTA)
        tokens = TokensPrompt(prompt_token_ids=list(prompt))
        if call.tenant is not None:
            tokens["cache_salt"] = call.tenant.cache_salt
        try:
            with calling(call):
                outputs = client.generate(tokens, SamplingParams(**defaults), call.request_id)
            async with aclosing(cast("AsyncGenerator[Any, None]", outputs)) as source:
                async for output in source:
                    (choice,) = output.outputs
                    finish = _FINISH.get(choice.finish_reason, "abort") if choice.finish_reason else None
                    yield Delta(list(choice.token_ids), choice.text, finish)
        except SealmeshError:
            raise
        except (ValueError, TypeError) as exc:
            raise _refused(exc) from exc
        except Exception as exc:
            if _is_client_error(exc):
                raise _refused(exc) from exc
            raise SealmeshError(
                grpc.StatusCode.UNAVAILABLE,
                "ENGINE_FAILED",
                self.failure or f"the engine failed: {type(exc).__name__}",
                retry_after_s=1,
            ) from exc

    async def abort(self, call: EngineCall) -> None:
        unfinished = tuple(call.unfinished)
        if unfinished and self._client is not None and not self._client.errored:
            await self._client.abort(unfinished)

    async def reset_prefix_cache(self) -> bool:
        return bool(await _started(self._client).reset_prefix_cache())

    def _set_environment(self, plan: EnginePlan) -> None:
        """Sets what vLLM and its child processes read; what the user set already is kept."""
        chosen = dict(plan.device.environment(plan.kv_cache_gib))
        debug = self._telemetry.log.logger.isEnabledFor(logging.DEBUG)
        chosen["VLLM_LOGGING_LEVEL"] = "INFO" if debug else "WARNING"
        for name, value in chosen.items():
            os.environ.setdefault(name, value)
        os.environ[ENGINE_OF_WORKER_VARIABLE] = plan.log
        os.environ[LAST_WORDS_VARIABLE] = str(plan.last_words)

    async def _build(self, plan: EnginePlan, args: Namespace) -> None:
        # Half a minute in all, off the loop, so that health checks and signals are heard meanwhile.
        import vllm
        from sealmesh.inference.engine_tap import EngineTap
        from sealmesh.inference.step_log import StepCounter, stat_logger_factory
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        log = self._telemetry.log
        context = UsageContext.OPENAI_API_SERVER
        try:
            config = await in_daemon_thread(
                lambda: AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
            )
        except (ValueError, TypeError, NotImplementedError, OSError, RuntimeError) as exc:
            raise _invalid(f"vLLM cannot serve {plan.model}: {_first_line(exc)}") from exc
        log.info(
            "engine starts", model=plan.model, device=plan.device.name, dtype=str(config.model_config.dtype)
        )
        counter = self._counter = StepCounter()
        try:
            client = await in_daemon_thread(
                lambda: AsyncLLM.from_vllm_config(
                    vllm_config=config,
                    usage_context=context,
                    stat_loggers=[stat_logger_factory(counter)],
                    disable_log_stats=args.disable_log_stats,
                )
            )
        except Exception as exc:
            raise _start_failure(plan, exc) from exc
        self._client = client
        try:
            await in_daemon_thread(lambda: note_buffers(plan.private))
        except OSError as exc:
            log.warning("buffers will stay in /dev/shm if this worker is killed", cause=exc.strerror)
        await client.reset_mm_cache()
        tap = EngineTap(
            client.generate,
            plan.model,
            config.kv_transfer_config is not None,
            self._telemetry.tracing,
            self._metrics,
        )
        client.generate = tap.generate
        self._app = await _openai_app(client, args)
        self._facts = ModelFacts(
            model=plan.model,
            aliases=tuple(module.name for module in args.lora_modules or ()),
            version=plan.version,
            max_context_tokens=int(config.model_config.max_model_len),
            sealed=bool(plan.version),
            engine=f"vllm {vllm.__version__}",
            device=plan.device.name,
        )


def _arguments(plan: EnginePlan) -> dict[str, EngineArgument]:
    return {
        **plan.device.engine_args(plan.dtype, latent=has_latent_attention(plan.folder)),
        "enable_prompt_tokens_details": True,
        "disable_fastapi_docs": True,
        **plan.arguments,
        "model": str(plan.folder),
        "served_model_name": [plan.model],
        "dtype": plan.dtype,
        "max_model_len": plan.max_model_len,
        # Stored blocks are found again only under a hash that every process computes alike.
        "prefix_caching_hash_algo": "sha256_cbor",
    }


def _start_failure(plan: EnginePlan, exc: Exception) -> SealmeshError:
    heard = hear(plan.last_words)
    if heard is not None:
        reason, message = heard
        if reason == "ENGINE_FAILED":
            message = f"the engine for {plan.model} did not start: {message}"
        code, known = _LAST_WORDS.get(reason, (grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID"))
        return SealmeshError(code, known, message)
    return SealmeshError(
        grpc.StatusCode.UNAVAILABLE,
        "ENGINE_FAILED",
        f"the engine for {plan.model} did not start: {_first_line(exc)}",
    )


async def _openai_app(client: AsyncLLM, args: Namespace) -> AsgiApp:
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:
        # vLLM 0.23
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

    tasks = await client.get_supported_tasks()
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    return cast("AsgiApp", app)


def _started(value: _T | None) -> _T:
    if value is None:
        raise SealmeshError(
            grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY", "the engine is not up", retry_after_s=5
        )
    return value


def _is_client_error(exc: Exception) -> bool:
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        # vLLM 0.23 raises ValueError
        return False
    return isinstance(exc, VLLMClientError)


def _refused(exc: Exception) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", _first_line(exc))


def _first_line(exc: BaseException) -> str:
    """The first line of an error that says something; pydantic's begin with a count."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return lines[1].removeprefix("Value error, ").partition(" [type=")[0]
    return lines[0] if lines else type(exc).__name__


def _invalid(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)
