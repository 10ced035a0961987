"""`throughput_over_bare_engine`: tokens a second of 16 chats through the mesh, over vLLM's own server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sealmesh.deploy.bench.figures import Summary, paired_ratio
from sealmesh.deploy.bench.load import Completion, chat, client_of, question
from sealmesh.deploy.bench.rigs import BenchError, Endpoint

CHATS = 16
MAX_TOKENS = 64


async def measure_throughput(
    mesh: Endpoint, bare: Endpoint, *, rounds: int, tell: Callable[[str], None]
) -> dict[str, object]:
    """Both sides get the same new prompts in each round, in turns; the other one idles meanwhile."""
    rates: dict[str, list[float]] = {"mesh": [], "bare": []}
    same_text = 0
    for number in range(-1, rounds):  # round -1 warms both up and does not count
        order = ("mesh", "bare") if number % 2 == 0 else ("bare", "mesh")
        answers: dict[str, list[Completion]] = {}
        for side in order:
            tell(
                f"throughput: round {max(number, 0) + 1} of {rounds}, {side}"
                if number >= 0
                else "throughput: warm-up"
            )
            endpoint = mesh if side == "mesh" else bare
            answers[side], seconds = await _round(endpoint, f"round {number}")
            if number >= 0:
                rates[side].append(sum(a.completion_tokens for a in answers[side]) / seconds)
        if number >= 0:
            same_text += sum(
                ours.text == theirs.text
                for ours, theirs in zip(answers["mesh"], answers["bare"], strict=True)
            )
    return {
        **paired_ratio(rates["mesh"], rates["bare"]),
        "unit": "ratio of tokens/s, mesh over bare engine",
        "chats": CHATS,
        "max_tokens": MAX_TOKENS,
        "mesh_tokens_per_s": Summary.of(rates["mesh"]).json(),
        "bare_tokens_per_s": Summary.of(rates["bare"]).json(),
        "identical_answers": f"{same_text} of {rounds * CHATS}",
    }


async def _round(endpoint: Endpoint, seed: str) -> tuple[list[Completion], float]:
    async with client_of(endpoint) as client:
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(chat(client, endpoint.model, question(f"{seed} {index}"), MAX_TOKENS) for index in range(CHATS))
        )
        seconds = time.perf_counter() - started
    if any(answer.completion_tokens < 2 for answer in answers):
        raise BenchError(f"{endpoint.base_url} gave empty answers; the round does not count")
    return list(answers), seconds
