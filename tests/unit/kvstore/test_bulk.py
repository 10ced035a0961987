"""The reader of large values: any cut of the byte stream gives the same replies."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from sealmesh.kvstore.bulk import BulkReader, _Replies
from sealmesh.kvstore.embedded import EmbeddedRedis
from sealmesh.telemetry.logging import StructuredLogger

Value = bytes | None


def encode(value: Value) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def plain(values: list[memoryview | None]) -> list[Value]:
    return [None if value is None else bytes(value) for value in values]


async def parse(stream: bytes, cuts: list[int], count: int) -> list[Value]:
    replies = _Replies()
    done = replies.expect(count)
    position = 0
    for cut in [*sorted(cuts), len(stream)]:
        while position < cut:
            buffer = replies.get_buffer(-1)
            size = min(len(buffer), cut - position)
            buffer[:size] = stream[position : position + size]
            position += size
            replies.buffer_updated(size)
    return plain(await asyncio.wait_for(done, 1))


@settings(deadline=None)
@given(
    values=st.lists(
        st.none()
        | st.binary(max_size=40)
        | st.builds(lambda size: bytes(range(250)) * size, st.integers(0, 600)),
        min_size=1,
        max_size=6,
    ),
    data=st.data(),
)
def test_any_cut_gives_the_same_values(values: list[Value], data: st.DataObject) -> None:
    stream = b"".join(map(encode, values))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    assert asyncio.run(parse(stream, cuts, len(values))) == values


@given(garbage=st.binary(min_size=1, max_size=60), data=st.data())
def test_garbage_never_hangs_or_escapes(garbage: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(garbage)), max_size=5))

    async def read() -> None:
        replies = _Replies()
        done = replies.expect(1)
        position = 0
        for cut in [*sorted(cuts), len(garbage)]:
            while position < cut:
                buffer = replies.get_buffer(-1)
                size = min(len(buffer), cut - position)
                buffer[:size] = garbage[position : position + size]
                position += size
                replies.buffer_updated(size)
        replies.connection_lost(None)
        try:
            await asyncio.wait_for(done, 1)
        except RedisError:
            return
        assert garbage[:1] in (b"$", b"_")

    asyncio.run(read())


async def test_an_error_reply_is_raised_after_the_whole_batch() -> None:
    stream = encode(b"a") + b"-LOADING Redis is loading\r\n" + encode(b"b")
    with pytest.raises(ResponseError, match="LOADING"):
        await parse(stream, [3], 3)


@pytest.mark.parametrize("reply", [b":1\r\n", b"$x\r\n", b"$-7\r\n", b"$99999999999\r\n", b"*1\r\n"])
async def test_other_replies_break_the_connection(reply: bytes) -> None:
    with pytest.raises(InvalidResponse):
        await parse(reply, [], 1)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    logger = StructuredLogger("kvstore", logging.getLogger("test"))
    server = EmbeddedRedis(tmp_path / "kv", max_memory_bytes=64 << 20, logger=logger)
    await server.start()
    yield server
    await server.close()


async def test_reads_from_a_real_server_and_survives_its_kicks(server: EmbeddedRedis) -> None:
    pool = ConnectionPool.from_url(server.url)
    client = Redis(connection_pool=pool)
    values = {b"k%d" % n: bytes([n]) * (n * 300_001) for n in range(12)}
    for name, value in values.items():
        await client.set(name, value)
    reader = BulkReader(pool, connections=2, timeout_s=5)

    async def check() -> None:
        assert plain(await reader.get([*values, b"none"])) == [*values.values(), None]

    await asyncio.gather(*(check() for _ in range(5)))

    await client.client_kill_filter(_type="normal", skipme=True)
    # Both connections were kicked; how soon a client sees that is up to the kernel.
    with contextlib.suppress(RedisConnectionError):
        await check()
    with contextlib.suppress(RedisConnectionError):
        await check()
    await check()

    await client.lpush("list", "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await reader.get([b"k1", b"list"])
    await check()

    reader.close()
    await client.aclose(close_connection_pool=True)


async def test_a_batch_that_takes_too_long_poisons_no_later_one(server: EmbeddedRedis) -> None:
    pool = ConnectionPool.from_url(server.url)
    client = Redis(connection_pool=pool)
    await client.set("a", b"1" * 100)
    await client.set("b", b"2" * 100)
    reader = BulkReader(pool, connections=1, timeout_s=0.3)
    assert plain(await reader.get([b"a"])) == [b"1" * 100]
    await client.execute_command("CLIENT", "PAUSE", "600", "ALL")  # type: ignore[no-untyped-call]
    with pytest.raises(TimeoutError):
        await reader.get([b"a"])
    slow = BulkReader(pool, connections=1, timeout_s=5)
    assert plain(await slow.get([b"b"])) == [b"2" * 100]
    assert plain(await reader.get([b"b"])) == [b"2" * 100]
    reader.close()
    slow.close()
    await client.aclose(close_connection_pool=True)
