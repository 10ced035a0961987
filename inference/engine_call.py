"""The record of what the engine does for one RPC, taken between the OpenAI layer and the engine.

Usage and token ids are read there rather than asked of the OpenAI layer, whose JSON changes with what
it is asked for: this way it stays byte for byte what vLLM sends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import Context
from sealmesh.inference.request_context import Tenant

__all__ = ["EngineCall", "Usage", "calling", "current_call"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a call (common.v1.Usage)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class _Prompt:
    """One engine request: a prompt with its choices."""

    choices: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class EngineCall:
    """One RPC. It may make several engine requests: one for each prompt of a completion.

    Attributes:
        request_id: of the RPC.
        tenant: whose request it is.
        parent: trace context of the RPC.
        unfinished: ids of engine requests that run.
    """

    request_id: str
    tenant: Tenant | None = None
    parent: Context | None = None
    unfinished: set[str] = field(default_factory=set)
    _prompts: list[_Prompt] = field(default_factory=list)
    _pending: dict[int, deque[Sequence[int]]] = field(default_factory=dict)

    def begin(self, choices: int) -> int:
        """Notes that an engine request is being made; returns its number, from 0."""
        self._prompts.append(_Prompt(choices))
        return len(self._prompts) - 1

    def submit(self, engine_request_id: str) -> None:
        """Notes that an engine request goes to the engine."""
        self.unfinished.add(engine_request_id)

    def end(self, engine_request_id: str) -> None:
        """Notes that an engine request is over."""
        self.unfinished.discard(engine_request_id)

    def note_prompt(self, number: int, prompt_tokens: int, cached_tokens: int) -> None:
        """Notes the size of a prompt and how much of it came from a cache."""
        prompt = self._prompts[number]
        prompt.prompt_tokens = prompt_tokens
        prompt.cached_tokens = max(prompt.cached_tokens, cached_tokens)

    def note_tokens(self, number: int, output_index: int, token_ids: Sequence[int]) -> None:
        """Notes tokens of one choice of an engine request, in the order in which they are reported."""
        prompt = self._prompts[number]
        prompt.completion_tokens += len(token_ids)
        # The OpenAI layer numbers choices through: prompt by prompt, n choices each.
        choice = output_index + number * prompt.choices
        self._pending.setdefault(choice, deque()).append(token_ids)

    def take_one(self, choice: int) -> Sequence[int]:
        """Tokens of a choice behind the next event, where each report makes exactly one event."""
        reports = self._pending.get(choice)
        return reports.popleft() if reports else ()

    def take_all(self, choice: int) -> Sequence[int]:
        """Tokens of a choice reported since the last event, where some reports make no event."""
        reports = self._pending.pop(choice, None)
        return [token for report in reports for token in report] if reports else ()

    def pending_choices(self) -> list[int]:
        """Choices with tokens that no event has taken, in order."""
        return sorted(choice for choice, reports in self._pending.items() if reports)

    @property
    def usage(self) -> Usage:
        """Counts so far, over all prompts and choices."""
        return Usage(
            sum(prompt.prompt_tokens for prompt in self._prompts),
            sum(prompt.completion_tokens for prompt in self._prompts),
            sum(prompt.cached_tokens for prompt in self._prompts),
        )


_CURRENT: Final[ContextVar[EngineCall | None]] = ContextVar("sealmesh_engine_call", default=None)


def current_call() -> EngineCall | None:
    """The RPC on whose behalf this task runs."""
    return _CURRENT.get()


@contextlib.contextmanager
def calling(call: EngineCall) -> Iterator[None]:
    """Makes `call` the current one for the block and the tasks that it starts."""
    token = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(token)
