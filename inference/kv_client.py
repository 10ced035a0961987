"""Synchronous client of the kvstore for the engine's process: deadlines everywhere, a breaker in front.

Nothing here raises because the store is bad: a lookup is None, a read ends early, a write is not stored.
Channels are made on first use, so that a process that forks before it never shares one.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from sealmesh.inference.kv_breaker import CircuitBreaker
from sealmesh.inference.kv_tensors import Bytes
from sealmesh.protos.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from sealmesh.security.tls import TlsFiles, channel_credentials
from sealmesh.telemetry.runtime.channel import open_sync_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.telemetry import Telemetry

_PIECE_BYTES = 1 << 20
_PROBE_DEADLINE_S = 1.0
_WATCH_INTERVAL_S = 0.02
# A namespace and a key that nobody has: a probe measures the whole way to Redis.
_PROBE_NAMESPACE = "probe/0"
_PROBE_KEY = bytes(32)


@dataclass(frozen=True)
class KVClientOptions:
    """Where the store is and how long it may take.

    Args:
        address: host:port of kvstore.
        tls: This worker's certificate; None speaks plain text.
        lookup_deadline_s: A lookup that takes longer is a miss.
        load_deadline_s: A read that takes longer in all ends where it is.
        load_stall_s: A read with no byte for that long ends where it is.
        save_deadline_s: A write that takes longer is given up.
    """

    address: str
    tls: TlsFiles | None
    lookup_deadline_s: float = 0.05
    load_deadline_s: float = 2.0
    load_stall_s: float = 0.5
    save_deadline_s: float = 5.0


@dataclass(frozen=True)
class OutgoingBlock:
    """A block to write: key, whole value, key of the block before it in its chain (empty for the first),
    whether to overwrite a value that did not verify."""

    key: bytes
    value: Bytes
    parent_key: bytes = b""
    replace: bool = False


@dataclass(frozen=True)
class PutCounts:
    """What became of written blocks."""

    stored: int
    existing: int
    refused: int


class KVStoreClient:
    """Client of one kvstore. Thread safe.

    Args:
        on_breaker: Called with True when the breaker opens and False when it closes.
    """

    def __init__(
        self,
        options: KVClientOptions,
        telemetry: Telemetry,
        *,
        on_breaker: Callable[[bool], None] = lambda opened: None,
    ) -> None:
        self._options = options
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: kvstore_pb2_grpc.KVStoreServiceStub | None = None
        self._closed = False
        self.breaker = CircuitBreaker(self._ask_nothing, on_change=on_breaker)

    def connect(self) -> None:
        """Begins to connect in the background, so that the first lookup does not pay for the handshake.

        The breaker is open until the first probe is answered.
        """
        self.breaker.start()

    def close(self) -> None:
        """Ends every call and closes the channel."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._stub = self._channel, None, None
        self.breaker.stop()
        if channel is not None:
            channel.close()

    def lookup(self, namespace: str, keys: Sequence[bytes], *, patient: bool = False) -> int | None:
        """How many leading keys are present, or None when the store did not say so in time.

        Args:
            patient: Nobody waits for the answer: the deadline is that of a write.
        """
        if not self.breaker.closed:
            return None
        try:
            response = self._ready_stub().LookupPrefix(
                kvstore_pb2.LookupPrefixRequest(namespace=namespace, keys=keys),
                timeout=self._options.save_deadline_s if patient else self._options.lookup_deadline_s,
            )
        except _UNAVAILABLE:
            self.breaker.fail()
            return None
        return min(response.present_count, len(keys))

    def read(
        self, namespace: str, keys: Sequence[bytes], buffer: Bytes
    ) -> Generator[tuple[int, memoryview | None], None, None]:
        """Yields (position, value or None when gone) in order; ends early when the store fails.

        Args:
            buffer: Room for one value; a value that does not fit is yielded as an empty one. A yielded
                value lies in it and is valid until the next step.
        """
        if not self.breaker.closed:
            return
        try:
            call = self._ready_stub().GetBlocks(
                kvstore_pb2.GetBlocksRequest(namespace=namespace, keys=keys),
                timeout=self._options.load_deadline_s,
            )
        except _UNAVAILABLE:
            self.breaker.fail()
            return
        watch = _StallWatch(call.cancel, self._options.load_stall_s)
        try:
            filled = 0
            fits = True
            for piece in call:
                watch.progress()
                if piece.missing:
                    yield piece.index, None
                    continue
                if piece.size_bytes:
                    filled, fits = 0, piece.size_bytes <= len(buffer)
                fits = fits and filled + len(piece.data) <= len(buffer)
                if fits:
                    np.copyto(buffer[filled : filled + len(piece.data)], np.frombuffer(piece.data, np.uint8))
                    filled += len(piece.data)
                if piece.last:
                    # The consumer's time is not the store's.
                    watch.pause()
                    yield piece.index, buffer.data[: filled if fits else 0]
                    watch.progress()
        except grpc.RpcError:
            self.breaker.fail()
        finally:
            watch.stop()
            call.cancel()

    def write(self, namespace: str, blocks: Sequence[OutgoingBlock]) -> PutCounts | None:
        """Writes blocks of one namespace, or returns None when the store failed or took too long."""
        if not self.breaker.closed:
            return None
        try:
            response = self._ready_stub().PutBlocks(
                _pieces(namespace, blocks), timeout=self._options.save_deadline_s
            )
        except _UNAVAILABLE:
            self.breaker.fail()
            return None
        return PutCounts(response.stored_count, response.existing_count, response.refused_count)

    def _ask_nothing(self) -> None:
        self._ready_stub().LookupPrefix(
            kvstore_pb2.LookupPrefixRequest(namespace=_PROBE_NAMESPACE, keys=[_PROBE_KEY]),
            timeout=_PROBE_DEADLINE_S,
        )

    def _ready_stub(self) -> kvstore_pb2_grpc.KVStoreServiceStub:
        with self._lock:
            if self._closed:
                raise ClientClosedError
            if self._stub is None:
                tls = self._options.tls
                self._channel = open_sync_channel(
                    self._options.address,
                    channel_credentials(tls) if tls is not None else None,
                    expected_role="kvstore" if tls is not None else None,
                    telemetry=self._telemetry,
                )
                self._stub = kvstore_pb2_grpc.KVStoreServiceStub(self._channel)
            return self._stub


class ClientClosedError(Exception):
    """The client was closed while somebody still used it."""


# A certificate that cannot be read is no reason to fail a request either: the breaker says so once.
_UNAVAILABLE = (grpc.RpcError, ClientClosedError, SealmeshError)


class _StallWatch:
    """Calls `cancel` once when no progress was reported for `limit_s`."""

    def __init__(self, cancel: Callable[[], object], limit_s: float) -> None:
        self._cancel = cancel
        self._limit_s = limit_s
        self._last: float | None = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="kv-stall-watch", daemon=True).start()

    def progress(self) -> None:
        self._last = time.monotonic()

    def pause(self) -> None:
        self._last = None

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_WATCH_INTERVAL_S):
            last = self._last
            if last is not None and time.monotonic() - last > self._limit_s:
                self._cancel()
                return


def _pieces(namespace: str, blocks: Iterable[OutgoingBlock]) -> Iterator[kvstore_pb2.PutBlocksRequest]:
    for block in blocks:
        size = len(block.value)
        for start in range(0, size, _PIECE_BYTES):
            first, stop = start == 0, min(start + _PIECE_BYTES, size)
            yield kvstore_pb2.PutBlocksRequest(
                namespace=namespace if first else "",
                key=block.key if first else b"",
                parent_key=block.parent_key if first else b"",
                size_bytes=size if first else 0,
                replace=block.replace and first,
                data=block.value[start:stop].tobytes(),
                last=stop == size,
            )
