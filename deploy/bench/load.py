"""Requests of the benchmarks: chats that are streamed and timed, and prompts that no cache has seen."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from sealmesh.deploy.bench.rigs import BenchError, Endpoint

_TIMEOUT_S = 600.0
# Common words of one or two tokens each.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city name
""".split()  # noqa: SIM905 - words read better than a list of strings


@dataclass(frozen=True)
class Completion:
    """One answer and its times, seconds from the moment the request was sent."""

    text: str
    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@asynccontextmanager
async def client_of(endpoint: Endpoint) -> AsyncIterator[httpx.AsyncClient]:
    """A client with connections enough for every chat at once."""
    async with httpx.AsyncClient(
        base_url=endpoint.base_url,
        headers={"Authorization": f"Bearer {endpoint.api_key}"},
        timeout=_TIMEOUT_S,
        limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
        trust_env=False,
    ) as client:
        yield client


async def chat(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> Completion:
    """A greedy, streamed chat. Raises BenchError for any answer that is not whole."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    usage: dict[str, object] = {}
    done = False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                detail = (await response.aread())[:300].decode("utf-8", "replace")
                raise BenchError(f"HTTP {response.status_code}: {detail}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    done = True
                    break
                if not data:
                    continue
                chunk = json.loads(data)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        first = first if first is not None else time.perf_counter() - started
                        pieces.append(piece)
    except httpx.HTTPError as error:
        raise BenchError(f"{client.base_url}: {str(error) or type(error).__name__}") from error
    if not done or first is None or not usage:
        raise BenchError(f"{client.base_url} sent an answer that is not whole; a run with it does not count")
    details = usage.get("prompt_tokens_details")
    return Completion(
        text="".join(pieces),
        first_token_s=first,
        total_s=time.perf_counter() - started,
        prompt_tokens=int(str(usage["prompt_tokens"])),
        cached_tokens=int(str(details.get("cached_tokens") or 0)) if isinstance(details, dict) else 0,
        completion_tokens=int(str(usage["completion_tokens"])),
    )


def fresh_prompt(words: int, seed: str) -> str:
    """Random words that differ from the first on, so that no two prompts share a prefix."""
    source = random.Random(seed)
    return f"Note {source.getrandbits(64):x}: " + " ".join(source.choices(_WORDS, k=words))


def question(seed: str) -> str:
    """A short question whose answer fills many tokens; unlike every other from its first words on."""
    source = random.Random(seed)
    first, second, third = source.sample(_WORDS, 3)
    return f"({source.getrandbits(48):x}) Write a long story about a {first}, a {second} and a {third}."
