"""Blocks in Redis or Valkey: pipelined reads, SET NX writes, a deadline on every command."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from opentelemetry.trace import SpanKind
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sealmesh.kvstore.bulk import BulkReader
from sealmesh.kvstore.metrics import KVStoreMetrics
from sealmesh.kvstore.store import PutOutcome, StoreStats, StoreUnavailableError
from sealmesh.telemetry.attributes import Attribute, AttributeValue
from sealmesh.telemetry.tracing import Tracing

# One EXISTS of this many keys is one command to pack and one integer to parse.
_EXISTS_CHUNK = 64
_EXISTS_CHUNKS_PER_PIPELINE = 64
_TOUCH_CHUNK = 512
_SCAN_COUNT = 1000
# Small, so that the first bytes are soon on their way; the size of values then says how many fit.
_FIRST_READ_BATCH = 1
_MOST_READ_BATCH = 32


@dataclass(frozen=True)
class RedisOptions:
    """How to talk to Redis.

    Args:
        url: Gives the redis://, rediss:// or unix:// address; asked at start, because an embedded server
            chooses its socket when it starts.
        connections: Most connections at once.
        connect_timeout_ms: Time to open one, milliseconds.
        command_timeout_ms: Time for one command or pipeline, milliseconds.
        read_window_bytes: Bytes of values to hold per read: half of it sent, half of it fetched ahead.
    """

    url: Callable[[], str]
    connections: int = 16
    connect_timeout_ms: int = 1000
    command_timeout_ms: int = 2000
    read_window_bytes: int = 16 << 20


class RedisStore:
    """A Store in one Redis server. Keys are "kv1:" + namespace + ":" + the 32 bytes of the block key.

    Presence is asked with multi-key EXISTS and values with pipelined GETs. The order of a chain is kept
    against LRU eviction by touching it from its tail, so that the head is always the most recent.
    """

    def __init__(self, options: RedisOptions, tracing: Tracing, metrics: KVStoreMetrics) -> None:
        self._options = options
        self._tracing = tracing
        self._metrics = metrics
        self._client: Redis | None = None
        self._bulk: BulkReader | None = None
        self._touches: set[asyncio.Task[None]] = set()
        self._address = ""

    async def start(self) -> None:
        options = self._options
        url = options.url()
        self._address = redacted(url)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=options.connections,
            timeout=options.command_timeout_ms / 1e3,
            socket_connect_timeout=options.connect_timeout_ms / 1e3,
            socket_timeout=options.command_timeout_ms / 1e3,
            # The caller has a deadline and can recompute: a retry behind its back only adds delay.
            retry=Retry(NoBackoff(), 0),
        )
        self._client = Redis(connection_pool=pool)
        self._bulk = BulkReader(
            pool,
            connections=max(1, options.connections // 4),
            timeout_s=options.command_timeout_ms / 1e3,
        )
        await self.ping()

    async def close(self) -> None:
        for task in self._touches:
            task.cancel()
        if self._bulk is not None:
            self._bulk.close()
            self._bulk = None
        if self._client is not None:
            client, self._client = self._client, None
            with contextlib.suppress(RedisError):
                await client.aclose(close_connection_pool=True)
                await client.connection_pool.disconnect()

    async def ping(self) -> None:
        async with self._command("PING"):
            await self._redis.ping()

    async def count_prefix(self, namespace: str, keys: Sequence[bytes]) -> int:
        names = [_name(namespace, key) for key in keys]
        present = 0
        async with self._command("EXISTS", len(names)):
            step = _EXISTS_CHUNK * _EXISTS_CHUNKS_PER_PIPELINE
            for start in range(0, len(names), step):
                found, complete = await self._count_in(names[start : start + step])
                present += found
                if not complete:
                    break
        if present:
            self._touch_later(names[:present])
        return present

    async def _count_in(self, names: Sequence[bytes]) -> tuple[int, bool]:
        chunks = [names[i : i + _EXISTS_CHUNK] for i in range(0, len(names), _EXISTS_CHUNK)]
        pipeline = self._redis.pipeline(transaction=False)
        for chunk in chunks:
            pipeline.exists(*chunk)
        present = 0
        for chunk, count in zip(chunks, cast(list[int], await pipeline.execute()), strict=True):
            if count == len(chunk):
                present += count
                continue
            if count:
                single = self._redis.pipeline(transaction=False)
                for name in chunk:
                    single.exists(name)
                for there in cast(list[int], await single.execute()):
                    if not there:
                        break
                    present += 1
            return present, False
        return present, True

    def _touch_later(self, names: Sequence[bytes]) -> None:
        if len(self._touches) >= self._options.connections // 2:
            return
        task = asyncio.create_task(self._touch(names))
        self._touches.add(task)
        task.add_done_callback(self._touches.discard)

    async def _touch(self, names: Sequence[bytes]) -> None:
        # A chain that was not touched is only evicted earlier; the command itself counted the error.
        with contextlib.suppress(StoreUnavailableError):
            async with self._command("TOUCH", len(names)):
                backwards = list(reversed(names))
                for start in range(0, len(backwards), _TOUCH_CHUNK):
                    await self._redis.touch(*backwards[start : start + _TOUCH_CHUNK])

    async def read(
        self, namespace: str, keys: Sequence[bytes]
    ) -> AsyncGenerator[tuple[int, memoryview | None], None]:
        names = [_name(namespace, key) for key in keys]
        start, batch = 0, _FIRST_READ_BATCH
        ahead: asyncio.Task[list[memoryview | None]] | None = None
        try:
            while start < len(names):
                if ahead is None:
                    ahead = asyncio.create_task(self._get(names[start : start + batch]))
                values = await ahead
                ahead = None
                following = start + len(values)
                size = max((len(value) for value in values if value is not None), default=0)
                batch = max(1, min(_MOST_READ_BATCH, self._options.read_window_bytes // 2 // max(size, 1)))
                if following < len(names):
                    ahead = asyncio.create_task(self._get(names[following : following + batch]))
                for offset, value in enumerate(values):
                    yield start + offset, value
                start = following
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _get(self, names: Sequence[bytes]) -> list[memoryview | None]:
        async with self._command("GET", len(names)):
            if self._bulk is None:
                raise StoreUnavailableError(f"the store at {self._address} is not connected")
            return await self._bulk.get(names)

    async def put(self, namespace: str, key: bytes, value: bytes, *, replace: bool = False) -> PutOutcome:
        async with self._command("SET"):
            try:
                written = await self._redis.set(_name(namespace, key), value, nx=not replace)
            except ResponseError as error:
                # Out of memory, read-only or unable to persist: an answer, and a reason not to store.
                self._metrics.refused(_reason(error))
                return PutOutcome.REFUSED
        return PutOutcome.STORED if written else PutOutcome.EXISTING

    async def delete_namespace(self, namespace: str) -> int:
        deleted = 0
        async with self._command("UNLINK"):
            batch: list[bytes] = []
            async for name in self._redis.scan_iter(match=_name(namespace, b"") + b"*", count=_SCAN_COUNT):
                batch.append(name)
                if len(batch) >= _SCAN_COUNT:
                    deleted += await self._redis.unlink(*batch)
                    batch.clear()
            if batch:
                deleted += await self._redis.unlink(*batch)
        return deleted

    async def stats(self) -> StoreStats:
        async with self._command("INFO"):
            info = cast(dict[str, object], await self._redis.info())
            count = await self._redis.dbsize()
        name = "valkey" if info.get("server_name") == "valkey" else "redis"
        version = info.get("valkey_version") if name == "valkey" else info.get("redis_version")
        return StoreStats(
            block_count=count,
            used_bytes=_number(info, "used_memory"),
            capacity_bytes=_number(info, "maxmemory"),
            evicted_count=_number(info, "evicted_keys"),
            backend=f"{name} {version}",
        )

    @property
    def _redis(self) -> Redis:
        if self._client is None:
            raise StoreUnavailableError(f"the store at {self._address} is not connected")
        return self._client

    @contextlib.asynccontextmanager
    async def _command(self, operation: str, size: int = 1) -> AsyncIterator[None]:
        """One span and one observation per command or pipeline; Redis errors become one clear error."""
        attributes: dict[Attribute, AttributeValue] = {
            Attribute.DB_SYSTEM: "redis",
            Attribute.DB_OPERATION: operation,
            Attribute.SERVER_ADDRESS: self._address,
        }
        if size > 1:
            attributes[Attribute.DB_BATCH_SIZE] = size
        with (
            self._tracing.span(operation, attributes, kind=SpanKind.CLIENT),
            self._metrics.redis_command(operation),
        ):
            try:
                yield
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                raise StoreUnavailableError(
                    f"Redis at {self._address} does not answer {operation} "
                    f"({type(error).__name__}: {error}): check that it runs and that the address is right"
                ) from error
            except RedisError as error:
                raise StoreUnavailableError(
                    f"Redis at {self._address} refused {operation}: {error}"
                ) from error


def redacted(url: str) -> str:
    """The address without user and password, for messages and spans."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _name(namespace: str, key: bytes) -> bytes:
    return b"kv1:" + namespace.encode() + b":" + key


def _number(info: dict[str, object], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) else 0


def _reason(error: ResponseError) -> str:
    text = str(error)
    for prefix, reason in (("OOM", "memory"), ("command not allowed", "memory"), ("READONLY", "readonly")):
        if text.startswith(prefix):
            return reason
    return "readonly" if "read only" in text.lower() else "error"
