"""kill -9 of every process in turn while requests flow: the mesh is whole again without a hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.engine

AFTERWARDS_S = 3.0


@dataclass
class Load:
    """Light load: one short streamed chat after the other, each outcome recorded."""

    outcomes: list[tuple[float, str]] = field(default_factory=list)
    """When a request ended (monotonic seconds) and how: "ok", or what failed."""

    def failures(self, since: float = 0.0) -> list[str]:
        return [outcome for at, outcome in self.outcomes if outcome != "ok" and at >= since]

    def summary(self) -> str:
        counts = Counter(outcome for _, outcome in self.outcomes)
        return ", ".join(f"{count} × {outcome}" for outcome, count in counts.most_common())


@contextlib.asynccontextmanager
async def load_on(mesh: RunningMesh) -> AsyncIterator[Load]:
    load = Load()
    async with httpx.AsyncClient(
        base_url=mesh.url, headers=mesh.headers, timeout=60, trust_env=False
    ) as client:
        task = asyncio.create_task(_flow(client, mesh.model, load))
        try:
            yield load
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _flow(client: httpx.AsyncClient, model: str, load: Load) -> None:
    number = 0
    while True:
        number += 1
        outcome = await _chat(client, model, f"Count to {number}.")
        load.outcomes.append((time.monotonic(), outcome))
        if outcome != "ok":
            await asyncio.sleep(0.1)


async def _chat(client: httpx.AsyncClient, model: str, text: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "stream": True,
    }
    started, finish = False, False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                return f"HTTP {response.status_code}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "ok" if finish else "an end mark without a finish"
                if not line.startswith("data:"):
                    continue
                started = True
                chunk = json.loads(line.removeprefix("data:"))
                if "error" in chunk:
                    return "an error in a begun stream"
                finish = finish or any(choice.get("finish_reason") for choice in chunk.get("choices", ()))
    except httpx.HTTPError as error:
        return f"{type(error).__name__}{' in a begun stream' if started else ''}"
    return "a stream that ended early"


def victim_of(mesh: RunningMesh, name: str) -> psutil.Process:
    """The process to kill: a service, the Redis of the kvstore, or the engine of the worker."""
    if name == "redis":
        children = mesh.process("kvstore").children(recursive=True)
        found = [process for process in children if "redis-server" in process.name()]
        assert len(found) == 1, found
        return found[0]
    if name == "engine":
        children = mesh.process("worker-0").children(recursive=True)
        return max(children, key=lambda process: process.memory_info().rss)
    return mesh.process(name)


@pytest.mark.parametrize(
    ("victim", "restarted", "harmless"),
    [
        ("vault", "vault", True),
        ("kvstore", "kvstore", True),
        ("redis", None, True),
        ("gateway", "gateway", False),
        ("worker-0", "worker-0", False),
        ("engine", "worker-0", False),
    ],
)
async def test_killed_process_comes_back(
    mesh: RunningMesh, note: list[str], victim: str, restarted: str | None, harmless: bool
) -> None:
    async with load_on(mesh) as load:
        await _until(lambda: len(load.outcomes) >= 3)
        assert load.failures() == []
        process = victim_of(mesh, victim)
        restarts = mesh.service(restarted).restarts if restarted else 0
        mesh.look()
        killed_at = time.monotonic()
        process.kill()
        if restarted:
            await mesh.whole(restarted, restarts=restarts + 1)
        else:
            await _until(lambda: victim_of_or_none(mesh, victim) not in (None, process))
            await mesh.whole("kvstore", restarts=0)
        whole_after_s = time.monotonic() - killed_at
        # The gateway may still find out that its worker is back.
        settled = time.monotonic() + (0 if harmless else AFTERWARDS_S)
        await _until(lambda: load.outcomes[-1][0] > settled)
        before = len(load.outcomes)
        await _until(lambda: len(load.outcomes) >= before + 5)
    failed = load.failures()
    note.append(f"kill -9 {victim}: whole after {whole_after_s:.1f} s; requests: {load.summary()}")
    assert load.failures(since=settled) == [], "requests still failed once everything was ready"
    assert "an end mark without a finish" not in failed
    assert "a stream that ended early" not in failed, "a cut stream looked like a whole one"
    if harmless:
        assert failed == []


def victim_of_or_none(mesh: RunningMesh, name: str) -> psutil.Process | None:
    try:
        return victim_of(mesh, name)
    except (AssertionError, psutil.Error):
        return None


async def _until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.05)


def test_the_mesh_is_still_one_supervisor_with_its_state(mesh: RunningMesh) -> None:
    """After all of the above: the same supervisor, everything ready, and an answer."""
    assert mesh.record().supervisor.is_alive()
    assert (
        "Paris"
        in mesh.cli(
            "chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "24", check=True
        ).stdout
    )
