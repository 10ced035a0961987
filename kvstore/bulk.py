"""Large values out of Redis without copies: the kernel writes them straight into their own buffers.

redis-py's asyncio reader moves a value through a 64 KiB stream buffer and several slices; for blocks of
megabytes that costs more than Redis and the socket together. Connections are opened by redis-py (address,
TLS, password, database); then their transport gets this protocol, which knows one command: GET.
RESP: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

_LINE_BYTES: Final = 64 << 10
_MAX_VALUE_BYTES: Final = 512 << 20

Reply = memoryview | None


class _Replies(asyncio.BufferedProtocol):
    """Parses replies to GET; `expect` says how many belong together."""

    def __init__(self) -> None:
        self._scratch = bytearray(_LINE_BYTES)
        self._line = bytearray()
        self._value: bytearray | None = None
        self._filled = 0
        self._replies: list[Reply] = []
        self._error: ResponseError | None = None
        self._wanted = 0
        self._done: asyncio.Future[list[Reply]] | None = None
        self.broken: Exception | None = None

    def expect(self, count: int) -> "asyncio.Future[list[Reply]]":
        """A future of the next `count` replies."""
        self._replies, self._error, self._wanted = [], None, count
        self._done = asyncio.get_running_loop().create_future()
        if self.broken is not None:
            self._done.set_exception(self.broken)
        return self._done

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._value is not None:
            return memoryview(self._value)[self._filled :]
        return memoryview(self._scratch)

    def buffer_updated(self, nbytes: int) -> None:
        if self._value is not None:
            self._filled += nbytes
            self._end_value_if_full()
            return
        data = memoryview(self._scratch)[:nbytes]
        try:
            while data:
                data = self._take(data)
        except (InvalidResponse, ValueError) as error:
            self._break(InvalidResponse(f"unexpected reply to GET: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(RedisConnectionError("connection closed by the server"))

    def _take(self, data: memoryview) -> memoryview:
        """Consumes a line, or the part of a value that came with it; returns what is left."""
        if self._value is not None:
            count = min(len(data), len(self._value) - self._filled)
            self._value[self._filled : self._filled + count] = data[:count]
            self._filled += count
            self._end_value_if_full()
            return data[count:]
        # A line is a few bytes; a value begins within one scratch buffer behind it.
        end = bytes(data[:_LINE_BYTES]).find(b"\n")
        if end < 0:
            self._line += data
            if len(self._line) > _LINE_BYTES:
                raise InvalidResponse("endless line")
            return data[len(data) :]
        self._line += data[: end + 1]
        line, self._line = bytes(self._line).rstrip(b"\r\n"), bytearray()
        self._reply(line)
        return data[end + 1 :]

    def _reply(self, line: bytes) -> None:
        kind, rest = line[:1], line[1:]
        if kind == b"$" and rest != b"-1":
            size = int(rest)
            if not 0 <= size <= _MAX_VALUE_BYTES:
                raise InvalidResponse(f"a value of {size} bytes")
            # With the line end behind it, so that one read can take both.
            self._value, self._filled = bytearray(size + 2), 0
        elif kind in (b"$", b"_"):
            self._finish(None)
        elif kind == b"-":
            self._error = self._error or ResponseError(rest.decode(errors="replace"))
            self._finish(None)
        else:
            raise InvalidResponse(repr(line[:32]))

    def _end_value_if_full(self) -> None:
        if self._value is not None and self._filled == len(self._value):
            value, self._value = self._value, None
            self._finish(memoryview(value)[:-2])

    def _finish(self, reply: Reply) -> None:
        self._replies.append(reply)
        if len(self._replies) == self._wanted and self._done is not None and not self._done.done():
            if self._error is not None:
                self._done.set_exception(self._error)
            else:
                self._done.set_result(self._replies)

    def _break(self, error: Exception) -> None:
        self.broken = self.broken or error
        if self._done is not None and not self._done.done():
            self._done.set_exception(self.broken)


class _Connection:
    """A connection of redis-py whose transport was taken over."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self.replies = _Replies()

    async def open(self) -> None:
        await self._connection.connect()  # type: ignore[no-untyped-call]
        writer = self._connection._writer
        if writer is None:
            raise RedisConnectionError("connection closed by the server")
        self._transport = writer.transport
        self._transport.set_protocol(self.replies)

    async def get(self, names: Sequence[bytes]) -> list[Reply]:
        done = self.replies.expect(len(names))
        self._transport.write(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(n), n) for n in names))
        return await done

    def close(self) -> None:
        self._transport.abort()
        self._connection._close()  # type: ignore[no-untyped-call]


class BulkReader:
    """GETs of many values at once, over connections of its own.

    Args:
        pool: Says how to connect; its own connections are not used.
        connections: Most connections that are kept open.
        timeout_s: Time for one batch, connecting included.
    """

    def __init__(self, pool: ConnectionPool, *, connections: int, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(connections)
        self._idle: deque[_Connection] = deque()

    async def get(self, names: Sequence[bytes]) -> list[Reply]:
        """Values in the order of the names, None for one that is gone.

        Raises:
            RedisError: The server refused, or closed the connection.
            TimeoutError: It took too long.
        """
        async with self._slots, asyncio.timeout(self._timeout_s):
            connection = await self._connect()
            try:
                values = await connection.get(names)
            except ResponseError:
                self._idle.append(connection)
                raise
            except BaseException:
                # Replies that are still to come would be taken for those of the next batch.
                connection.close()
                raise
            self._idle.append(connection)
            return values

    def close(self) -> None:
        """Closes every idle connection."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.replies.broken is None:
                return connection
            connection.close()
        connection = _Connection(self._pool.make_connection())  # type: ignore[no-untyped-call]
        await connection.open()
        return connection
