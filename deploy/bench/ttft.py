"""`ttft_cold_over_restart_hit`: time to first token of a long prompt, new against known before a restart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx
from sealmesh.deploy.bench.figures import Summary, paired_ratio
from sealmesh.deploy.bench.load import Completion, chat, client_of, fresh_prompt
from sealmesh.deploy.bench.rigs import BenchError, MeshRig

PROMPT_TOKENS = 1900
MAX_TOKENS = 8
_LEAST_HIT = 0.9
_SETTLE_POLLS = 4
_POLL_S = 0.5
_SETTLE_TIMEOUT_S = 60.0


async def measure_ttft(mesh: MeshRig, *, prompts: int, tell: Callable[[str], None]) -> dict[str, object]:
    """Sends prompts, restarts the whole mesh, and sends them again, each beside a prompt that is new.

    Old and new alternate after the restart, so that both see the same machine. Raises BenchError when
    the cache did not answer: a figure without hits would be none.
    """
    words = await _words_for(mesh)
    known = [fresh_prompt(words, f"known {index}") for index in range(prompts)]
    before: list[Completion] = []
    for index, prompt in enumerate(known):
        tell(f"first token: prompt {index + 1} of {prompts}, before the restart")
        before.append(await _ask(mesh, prompt))
    await _saved(mesh.kvstore_metrics_url)
    tell("first token: restarting the mesh")
    await mesh.stop()
    restart_s = await mesh.start()
    await _ask(mesh, "Say hello.")
    hit: list[Completion] = []
    cold: list[Completion] = []
    for index, prompt in enumerate(known):
        tell(f"first token: prompt {index + 1} of {prompts}, known against new")
        pair = [(hit, prompt), (cold, fresh_prompt(words, f"new {index}"))]
        for results, text in pair if index % 2 == 0 else reversed(pair):
            results.append(await _ask(mesh, text))
    if max(answer.cached_tokens for answer in cold) > PROMPT_TOKENS * 0.1:
        raise BenchError("a new prompt was found in the cache; the comparison does not count")
    same = sum(old.text == new.text for old, new in zip(before, hit, strict=True))
    # A look-up that misses its deadline of some 50 ms is computed: right, but no hit. Such a prompt is
    # counted and shown, and left out of the ratio.
    found = [
        index for index, answer in enumerate(hit) if answer.cached_tokens >= _LEAST_HIT * answer.prompt_tokens
    ]
    if len(found) < max(3, prompts / 2):
        listed = ", ".join(f"{answer.cached_tokens} of {answer.prompt_tokens}" for answer in hit)
        raise BenchError(
            f"only {len(found)} of {prompts} known prompts came from the cache (tokens: {listed}): on a busy "
            "machine look-ups miss their deadline; try --set worker.kv_lookup_deadline_ms=1000"
        )
    hit, cold = [hit[index] for index in found], [cold[index] for index in found]
    shares = [answer.cached_tokens / answer.prompt_tokens for answer in hit]
    return {
        **paired_ratio([a.first_token_s for a in cold], [a.first_token_s for a in hit]),
        "unit": "ratio of times to first token, new over known before the restart",
        "prompt_tokens": Summary.of([a.prompt_tokens for a in hit]).json(),
        "cached_share": Summary.of(shares).json(),
        "cold_s": Summary.of([a.first_token_s for a in cold]).json(),
        "restart_hit_s": Summary.of([a.first_token_s for a in hit]).json(),
        "first_run_s": Summary.of([a.first_token_s for a in before]).json(),
        "hits": f"{len(found)} of {prompts}",
        "identical_answers": f"{same} of {prompts}",
        "restart_s": round(restart_s, 1),
    }


async def _ask(mesh: MeshRig, prompt: str) -> Completion:
    async with client_of(mesh.endpoint) as client:
        return await chat(client, mesh.endpoint.model, prompt, MAX_TOKENS)


async def _words_for(mesh: MeshRig) -> int:
    """How many words make a prompt of PROMPT_TOKENS tokens with this model's tokenizer."""
    short, long = 200, 600
    less = (await _ask(mesh, fresh_prompt(short, "calibration"))).prompt_tokens
    more = (await _ask(mesh, fresh_prompt(long, "calibration"))).prompt_tokens
    # The template's own tokens are in both.
    return round(short + (PROMPT_TOKENS - less) * (long - short) / (more - less))


async def _saved(metrics_url: str) -> None:
    """Waits until the store has taken what the worker saves in the background."""
    last, unchanged = -1.0, 0
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(_SETTLE_TIMEOUT_S):
        while unchanged < _SETTLE_POLLS:
            text = (await client.get(metrics_url)).text
            stored = sum(
                float(value)
                for value in re.findall(
                    r'^sealmesh_kvstore_blocks_total\{[^}]*outcome="stored"[^}]*\} (\S+)', text, re.M
                )
            )
            unchanged = unchanged + 1 if stored == last and stored > 0 else 0
            last = stored
            await asyncio.sleep(_POLL_S)
