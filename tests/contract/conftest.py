"""One gateway and one scripted worker for each test module; the worker forgets between tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.support.gateway import RunningGateway, run_gateway
from tests.support.scripted_worker import ScriptedWorker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[ScriptedWorker, RunningGateway]]:
    async with (
        ScriptedWorker(aliases=("org/echo",)) as worker,
        run_gateway(
            tmp_path_factory.mktemp("gateway"),
            [worker.address],
            max_body_bytes=64 * 1024,
            max_message_bytes=32 * 1024 * 1024,
            body_timeout_ms=500,
        ) as gateway,
    ):
        yield worker, gateway


@pytest.fixture
def worker(mesh: tuple[ScriptedWorker, RunningGateway]) -> ScriptedWorker:
    scripted = mesh[0]
    scripted.requests.clear()
    scripted.metadata.clear()
    scripted.cancelled.clear()
    scripted.started.clear()
    scripted.script = scripted.echo
    scripted.piece = 4
    return scripted


@pytest.fixture
def gateway(mesh: tuple[ScriptedWorker, RunningGateway], worker: ScriptedWorker) -> RunningGateway:
    return mesh[1]


@pytest_asyncio.fixture(loop_scope="module")
async def http(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.http, headers=gateway.headers, timeout=20) as client:
        yield client
