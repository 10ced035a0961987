"""An engine without vLLM: an OpenAI-shaped ASGI app and scripted tokens, for fast tests of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import orjson
from sealmesh.inference.engine import Delta, EngineLoad, ModelFacts, Sampling
from sealmesh.inference.engine_call import EngineCall, current_call
from sealmesh.telemetry.runtime.http import AsgiApp, Receive, Scope, Send

FACTS = ModelFacts("fake", ("alias",), "ab" * 32, 64, True, "fake 1", "cpu")


class FakeEngine:
    """Answers every prompt with `tokens`; each token's text is its number and a space.

    Tests set what should go wrong, and read `bodies`, `aborted` and `disconnected`.
    """

    def __init__(self, tokens: Sequence[int] = (11, 12, 13)) -> None:
        self.tokens = list(tokens)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: list[str] = []
        self.was_aborted = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()
        self.holding = asyncio.Event()
        self.failure = ""
        self.steps = 0
        self.unfinished = 0
        self.load = EngineLoad()
        self.closed = False
        self.respond: Callable[[dict[str, Any], Send], Any] | None = None
        """Replaces the OpenAI layer's answer."""

    @property
    def facts(self) -> ModelFacts:
        return FACTS

    @property
    def app(self) -> AsgiApp:
        return self._app

    async def start(self) -> None:
        return

    async def close(self) -> None:
        self.closed = True

    async def tokenize(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    async def generate(
        self, call: EngineCall, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Delta, None]:
        call.begin(1)
        call.submit(call.request_id)
        call.note_prompt(0, len(prompt), 1)
        try:
            tokens = self.tokens[: sampling.max_tokens]
            for position, token in enumerate(tokens):
                await self._held()
                call.note_tokens(0, 0, [token])
                last = position == len(tokens) - 1
                yield Delta([token], f"{token} ", "length" if last else None)
        finally:
            if self.holding.is_set() and not self.hold.is_set():
                self.aborted.append(call.request_id)
                self.was_aborted.set()
            call.end(call.request_id)

    async def abort(self, call: EngineCall) -> None:
        self.aborted += sorted(call.unfinished)
        self.was_aborted.set()

    async def reset_prefix_cache(self) -> bool:
        return True

    async def _held(self) -> None:
        if not self.hold.is_set():
            self.holding.set()
            await self.hold.wait()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = orjson.loads(message["body"]) if message["body"] else {}
        self.bodies.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        leaving = asyncio.create_task(self._until_left(receive))
        answering = asyncio.create_task(self._answer(body, send))
        try:
            await asyncio.wait((leaving, answering), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            leaving.cancel()
            answering.cancel()

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def _answer(self, body: dict[str, Any], send: Send) -> None:
        if self.respond is not None:
            await self.respond(body, send)
            return
        call = current_call()
        assert call is not None
        choices = body.get("n") or 1
        call.begin(choices)
        call.submit("engine-" + call.request_id)
        call.note_prompt(0, 7, 3)
        stream = bool(body.get("stream"))
        if stream:
            await begin(send, 200, "text/event-stream; charset=utf-8")
            for index in range(choices):
                await event(send, {"choices": [{"index": index, "delta": {"role": "assistant"}}]})
        for token in self.tokens:
            await self._held()
            for index in range(choices):
                call.note_tokens(0, index, [token + index])
                if stream:
                    delta = {"content": f"{token + index} "}
                    await event(send, {"choices": [{"index": index, "delta": delta}]})
        call.end("engine-" + call.request_id)
        if stream:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        else:
            usage = {"prompt_tokens": 7, "completion_tokens": choices * len(self.tokens)}
            await reply(send, 200, {"choices": [], "usage": usage})


async def begin(send: Send, status: int, content_type: str) -> None:
    """Sends a response head."""
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def event(send: Send, document: object) -> None:
    """Sends a server-sent event."""
    await chunk(send, b"data: " + orjson.dumps(document) + b"\n\n")


async def chunk(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a piece of a body."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def reply(send: Send, status: int, document: object) -> None:
    """Sends a whole JSON response."""
    await begin(send, status, "application/json")
    await chunk(send, orjson.dumps(document), more=False)
