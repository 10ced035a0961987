"""RedisStore against a real Redis."""

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sealmesh.kvstore.embedded import EmbeddedRedis
from sealmesh.kvstore.metrics import KVStoreMetrics
from sealmesh.kvstore.redis_store import RedisOptions, RedisStore, redacted
from sealmesh.kvstore.store import PutOutcome, StoreUnavailableError
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.tracing import Tracing

from tests.support.kvstore import key_of, keys_of

TENANT = "tenant-a/1"


def make_store(url: str, **options: int) -> RedisStore:
    redis = RedisOptions(url=lambda: url, **options)
    return RedisStore(redis, Tracing("kvstore"), KVStoreMetrics(Metrics("kvstore")))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    logger = StructuredLogger("kvstore", logging.getLogger("test"))
    server = EmbeddedRedis(tmp_path / "kv", max_memory_bytes=64 << 20, logger=logger)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[RedisStore]:
    store = make_store(server.url)
    await store.start()
    yield store
    await store.close()


@pytest.mark.parametrize(
    ("present", "asked", "leading"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 3], [1, 2, 3], 1),
        ([2, 3], [1, 2, 3], 0),
        (list(range(300)), list(range(300)), 300),
        ([n for n in range(300) if n != 170], list(range(300)), 170),
        ([n for n in range(300) if n != 64], list(range(300)), 64),
        (list(range(5000)), list(range(5001)), 5000),
    ],
)
async def test_counts_the_leading_run(
    store: RedisStore, present: list[int], asked: list[int], leading: int
) -> None:
    pipeline = Redis(connection_pool=store._redis.connection_pool).pipeline(transaction=False)
    for number in present:
        pipeline.set(b"kv1:" + TENANT.encode() + b":" + key_of(number), b"v")
    await pipeline.execute()

    assert await store.count_prefix(TENANT, keys_of(asked)) == leading
    assert await store.count_prefix("tenant-b/1", keys_of(asked)) == 0


async def values_of(store: RedisStore, numbers: list[int]) -> list[bytes | None]:
    read = [item async for item in store.read(TENANT, keys_of(numbers))]
    assert [index for index, _ in read] == list(range(len(numbers)))
    return [None if value is None else bytes(value) for _, value in read]


async def test_reads_in_order_and_tells_what_is_gone(store: RedisStore) -> None:
    values = {n: bytes([n]) * (n * 1000) for n in range(1, 60) if n % 7}
    for number, value in values.items():
        await store.put(TENANT, key_of(number), value)

    numbers = list(range(1, 60))
    assert await values_of(store, numbers) == [values.get(number) for number in numbers]


async def test_read_can_be_left_early(store: RedisStore) -> None:
    for number in range(20):
        await store.put(TENANT, key_of(number), b"x" * 1000)
    async with contextlib.aclosing(store.read(TENANT, keys_of(range(20)))) as reading:
        assert (await anext(reading))[0] == 0
    assert await store.count_prefix(TENANT, keys_of(range(20))) == 20


async def test_keeps_what_exists_unless_told_to_replace(store: RedisStore) -> None:
    assert await store.put(TENANT, key_of(1), b"first") is PutOutcome.STORED
    assert await store.put(TENANT, key_of(1), b"second") is PutOutcome.EXISTING
    assert await values_of(store, [1]) == [b"first"]
    assert await store.put(TENANT, key_of(1), b"third", replace=True) is PutOutcome.STORED
    assert await values_of(store, [1]) == [b"third"]


async def test_deletes_one_namespace_only(store: RedisStore) -> None:
    for number in range(2500):
        await store._redis.set(b"kv1:tenant-a/1:" + key_of(number), b"v")
    await store.put("tenant-a/11", key_of(1), b"other epoch")
    await store.put("xtenant-a/1", key_of(1), b"other tenant")

    assert await store.delete_namespace("tenant-a/1") == 2500

    assert (await store.stats()).block_count == 2
    assert await store.count_prefix("tenant-a/11", [key_of(1)]) == 1


async def test_full_memory_evicts_and_never_fails(store: RedisStore) -> None:
    for number in range(100):
        assert await store.put(TENANT, key_of(number), bytes(1 << 20)) is PutOutcome.STORED
    stats = await store.stats()
    assert stats.evicted_count > 0
    assert stats.capacity_bytes == 64 << 20
    assert stats.backend.startswith("redis ")


async def test_a_lookup_makes_the_whole_chain_recent(store: RedisStore) -> None:
    for number in range(3):
        await store.put(TENANT, key_of(number), b"v")
    await store.count_prefix(TENANT, keys_of(range(3)))
    for task in list(store._touches):
        await task
    idle = [
        await store._redis.object("IDLETIME", b"kv1:" + TENANT.encode() + b":" + key_of(n)) for n in range(3)
    ]
    assert idle == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "value"), [("maxmemory-policy", "noeviction"), ("min-replicas-to-write", "1")]
)
async def test_a_store_that_cannot_write_refuses(store: RedisStore, name: str, value: str) -> None:
    await store._redis.config_set(name, value)
    await store._redis.config_set("maxmemory", "1mb")
    assert await store.put(TENANT, key_of(1), bytes(4 << 20)) is PutOutcome.REFUSED


async def test_says_that_nobody_listens() -> None:
    store = make_store("redis://user:hunter2@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailableError) as caught:
        await store.start()
    await store.close()
    assert "redis://127.0.0.1:1/0 does not answer" in caught.value.message
    assert "hunter2" not in caught.value.message


def test_addresses_are_shown_without_secrets() -> None:
    assert redacted("rediss://u:p@host:6379/3?ssl_keyfile=x") == "rediss://host:6379/3"
    assert redacted("unix:///run/redis.sock") == "unix:///run/redis.sock"
