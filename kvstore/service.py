"""KVStoreService over a Store: bounded messages, pieces of at most 1 MiB, one error model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
from sealmesh.kvstore.metrics import KVStoreMetrics
from sealmesh.kvstore.store import KEY_BYTES, PutOutcome, Store, check_keys, check_namespace
from sealmesh.protos.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from sealmesh.telemetry.runtime.errors import SealmeshError

#: Most bytes of a value in one message.
PIECE_BYTES = 1 << 20
# Writes to Redis under way for one PutBlocks stream: enough to hide a round trip, few enough that a
# fast sender waits for a slow store and not in our memory.
_WRITES_AHEAD = 4


@dataclass
class _Incoming:
    """A block that is being received."""

    namespace: str
    key: bytes
    size_bytes: int
    replace: bool
    accepted: bool
    pieces: list[bytes] = field(default_factory=list)
    received_bytes: int = 0


class KVStoreService(kvstore_pb2_grpc.KVStoreServiceServicer):
    """Serves blocks. Checkpoints are not part of this service yet and answer UNIMPLEMENTED.

    Args:
        store: Where the blocks are.
        max_value_bytes: Larger values are refused (counted, not an error).
        lookup_timeout_s: A lookup that takes longer fails with DEADLINE_EXCEEDED, also when the caller
            would wait longer.
    """

    def __init__(
        self, store: Store, metrics: KVStoreMetrics, *, max_value_bytes: int, lookup_timeout_s: float
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._max_value_bytes = max_value_bytes
        self._lookup_timeout_s = lookup_timeout_s

    async def LookupPrefix(
        self,
        request: kvstore_pb2.LookupPrefixRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.LookupPrefixRequest, kvstore_pb2.LookupPrefixResponse],
    ) -> kvstore_pb2.LookupPrefixResponse:
        check_namespace(request.namespace)
        check_keys(request.keys)
        try:
            async with asyncio.timeout(self._lookup_timeout_s):
                present = await self._store.count_prefix(request.namespace, request.keys)
        except TimeoutError as error:
            raise SealmeshError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE_EXCEEDED",
                f"Redis took longer than {self._lookup_timeout_s * 1e3:.0f} ms to look up "
                f"{len(request.keys)} keys",
            ) from error
        self._metrics.looked_up(len(request.keys), present)
        return kvstore_pb2.LookupPrefixResponse(present_count=present)

    async def GetBlocks(
        self,
        request: kvstore_pb2.GetBlocksRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.GetBlocksRequest, kvstore_pb2.GetBlocksResponse],
    ) -> AsyncIterator[kvstore_pb2.GetBlocksResponse]:
        check_namespace(request.namespace)
        check_keys(request.keys)
        async with contextlib.aclosing(self._store.read(request.namespace, request.keys)) as blocks:
            async for index, value in blocks:
                self._metrics.read(None if value is None else len(value))
                # Each yield waits until the transport has taken the message: a slow reader slows the
                # reads from Redis.
                for piece in _cut(index, value):
                    yield piece

    async def PutBlocks(
        self,
        request_iterator: AsyncIterator[kvstore_pb2.PutBlocksRequest],
        context: grpc.aio.ServicerContext[kvstore_pb2.PutBlocksRequest, kvstore_pb2.PutBlocksResponse],
    ) -> kvstore_pb2.PutBlocksResponse:
        counts = dict.fromkeys(PutOutcome, 0)
        slots = asyncio.Semaphore(_WRITES_AHEAD)

        async def write(block: _Incoming) -> None:
            try:
                outcome = PutOutcome.REFUSED
                if block.accepted:
                    outcome = await self._store.put(
                        block.namespace, block.key, b"".join(block.pieces), replace=block.replace
                    )
                else:
                    self._metrics.refused("size")
                counts[outcome] += 1
                self._metrics.put(outcome.value, block.size_bytes)
            finally:
                slots.release()

        block: _Incoming | None = None
        try:
            async with asyncio.TaskGroup() as writes:
                async for piece in request_iterator:
                    if block is None:
                        block = self._begin(piece)
                    self._append(block, piece)
                    if piece.last:
                        await slots.acquire()
                        writes.create_task(write(block))
                        block = None
        except* SealmeshError as group:
            raise _first(group) from None
        if block is not None:
            raise _malformed("data", "the stream ended inside a block; its last piece must say so")
        return kvstore_pb2.PutBlocksResponse(
            stored_count=counts[PutOutcome.STORED],
            existing_count=counts[PutOutcome.EXISTING],
            refused_count=counts[PutOutcome.REFUSED],
        )

    def _begin(self, piece: kvstore_pb2.PutBlocksRequest) -> _Incoming:
        check_namespace(piece.namespace)
        check_keys([piece.key])
        if piece.parent_key and len(piece.parent_key) != KEY_BYTES:
            raise _malformed("parent_key", f"a parent key has {KEY_BYTES} bytes or none")
        if piece.size_bytes == 0:
            raise _malformed("size_bytes", "the first piece of a block must give the size of the whole value")
        return _Incoming(
            namespace=piece.namespace,
            key=piece.key,
            size_bytes=piece.size_bytes,
            replace=piece.replace,
            # An over-large block is read to its end and dropped, so that the blocks behind it are kept.
            accepted=piece.size_bytes <= self._max_value_bytes,
        )

    def _append(self, block: _Incoming, piece: kvstore_pb2.PutBlocksRequest) -> None:
        if len(piece.data) > PIECE_BYTES:
            raise _malformed(
                "data", f"a piece has {len(piece.data)} bytes; at most {PIECE_BYTES} are allowed"
            )
        block.received_bytes += len(piece.data)
        if block.received_bytes > block.size_bytes or (
            piece.last and block.received_bytes != block.size_bytes
        ):
            raise _malformed(
                "size_bytes",
                f"the pieces of a block have {block.received_bytes} bytes, its first one promised "
                f"{block.size_bytes}",
            )
        if block.accepted:
            block.pieces.append(piece.data)

    async def DeleteTenant(
        self,
        request: kvstore_pb2.DeleteTenantRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.DeleteTenantRequest, kvstore_pb2.DeleteTenantResponse],
    ) -> kvstore_pb2.DeleteTenantResponse:
        check_namespace(request.namespace)
        deleted = await self._store.delete_namespace(request.namespace)
        return kvstore_pb2.DeleteTenantResponse(deleted_count=deleted)

    async def GetStats(
        self,
        request: kvstore_pb2.GetStatsRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.GetStatsRequest, kvstore_pb2.GetStatsResponse],
    ) -> kvstore_pb2.GetStatsResponse:
        stats = await self._store.stats()
        return kvstore_pb2.GetStatsResponse(
            block_count=stats.block_count,
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            hit_count=self._metrics.hit_count,
            miss_count=self._metrics.miss_count,
            evicted_count=stats.evicted_count,
            backend=stats.backend,
        )


def _cut(index: int, value: memoryview | None) -> Iterator[kvstore_pb2.GetBlocksResponse]:
    if value is None:
        yield kvstore_pb2.GetBlocksResponse(index=index, missing=True, last=True)
        return
    for start in range(0, max(len(value), 1), PIECE_BYTES):
        yield kvstore_pb2.GetBlocksResponse(
            index=index,
            data=bytes(value[start : start + PIECE_BYTES]),
            size_bytes=len(value) if start == 0 else 0,
            last=start + PIECE_BYTES >= len(value),
        )


def _first(group: BaseExceptionGroup[SealmeshError]) -> SealmeshError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SealmeshError)
    return error


def _malformed(field_name: str, message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, field=field_name)
