"""What the worker asks of an engine. The real one is `vllm_engine`; tests bring a fake."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sealmesh.inference.engine_call import EngineCall
from sealmesh.telemetry.runtime.http import AsgiApp

__all__ = ["Delta", "Engine", "EngineLoad", "FinishReason", "ModelFacts", "Sampling"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is served, as GetModelInfo tells it."""

    model: str
    aliases: tuple[str, ...]
    version: str
    """SM3 of the sealed manifest as hex; empty for a plain folder."""
    max_context_tokens: int
    sealed: bool
    engine: str
    """Name and version, for example "vllm 0.32.0+cpu"."""
    device: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is, as of its last step."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; None takes the model's own default."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: Sequence[str] = field(default_factory=tuple)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a generation; `finish` is set on the last one."""

    token_ids: Sequence[int]
    text: str
    finish: FinishReason | None = None


class Engine(Protocol):
    """An engine with one model. `start` loads it, which takes from seconds to many minutes."""

    async def start(self) -> None:
        """Loads the model. Raises SealmeshError with one clear line when that is impossible."""

    async def close(self) -> None:
        """Ends the engine and its processes."""

    @property
    def facts(self) -> ModelFacts:
        """The model; known after `start`."""

    @property
    def app(self) -> AsgiApp:
        """The engine's OpenAI HTTP layer. Calls must run under `engine_call.calling`."""

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""

    @property
    def unfinished(self) -> int:
        """Requests that the engine has yet to complete; one whose answer waits for a slow reader is none."""

    @property
    def steps(self) -> int:
        """Engine steps completed since the start; stands still while nothing runs."""

    @property
    def failure(self) -> str:
        """Why the engine is dead, one line; empty while it lives."""

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens of the tokenizer included."""

    def generate(
        self, call: EngineCall, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Delta, None]:
        """Continues a prompt. Closing the generator aborts the request.

        Raises:
            SealmeshError: INVALID_REQUEST for parameters that the engine refuses, ENGINE_FAILED when it dies.
        """

    async def abort(self, call: EngineCall) -> None:
        """Ends every request of a call in the engine, at once."""

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached blocks; False when running requests hold some and nothing was reset."""
