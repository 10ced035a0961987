"""The worker's side: moves blocks between the engine's KV tensors and the store, off the step path.

A step pays only for snapshots of the blocks it filled (one memory copy, without the GIL). Checks,
transport and copies into the tensors happen in threads.
"""

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from sealmesh.inference.kv_blocks import HEADER_BYTES, BlockMismatchError, open_value, write_header
from sealmesh.inference.kv_client import KVStoreClient, OutgoingBlock
from sealmesh.inference.kv_counters import Count, KVCounters
from sealmesh.inference.kv_keys import KeySpace
from sealmesh.inference.kv_plan import LoadPlan, RequestScope, SavePlan
from sealmesh.inference.kv_tensors import BlockTensors, Bytes
from sealmesh.inference.kv_threads import use_every_core
from sealmesh.inference.kv_trace import KVTrace
from sealmesh.telemetry.attributes import Attribute

_LOADERS = 2
_KNOWN_KEYS = 65536
# A key that the store had may have been evicted since; after that long it is offered again.
_KNOWN_LIFETIME_S = 300.0
_BATCH_BLOCKS = 16
_BATCH_BYTES = 32 << 20
_SPARE_BUFFERS = 8
_FLUSH_S = 3.0

_log = logging.getLogger("sealmesh.worker.kv")


@dataclass
class _Snapshot:
    scope: RequestScope
    key: bytes
    parent_key: bytes
    value: Bytes


class KVWorker:
    """Loads and saves blocks of one rank.

    Args:
        rank: This rank's position in the key space.
        save_queue_bytes: Bytes of snapshots that may wait; further blocks are dropped and counted.
    """

    def __init__(
        self,
        keys: KeySpace,
        rank: int,
        client: KVStoreClient,
        trace: KVTrace,
        counters: KVCounters,
        *,
        save_queue_bytes: int,
    ) -> None:
        self._keys = keys
        self._rank = rank
        self._client = client
        self._trace = trace
        self._counters = counters
        self._save_queue_bytes = save_queue_bytes
        self._tensors: BlockTensors | None = None
        self._digest = b""
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._buffers = threading.local()
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._mismatched: OrderedDict[bytes, None] = OrderedDict()
        self._queue: deque[_Snapshot] = deque()
        self._queued = threading.Condition()
        self._queued_bytes = 0
        self._spare: list[Bytes] = []
        self._closing = False
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kv-load", initializer=use_every_core)
        self._saver = threading.Thread(target=self._save_loop, name="kv-save", daemon=True)

    @property
    def value_bytes(self) -> int:
        """Bytes of one stored value of this rank."""
        return HEADER_BYTES + self._ready().payload_bytes

    def start(self, tensors: BlockTensors) -> None:
        """Takes the engine's tensors and starts to connect and to save."""
        self._tensors = tensors
        self._digest = tensors.physical_digest(self._keys.layout_digest(self._rank))
        self._client.connect()
        self._saver.start()

    def close(self) -> None:
        """Gives waiting saves a few seconds, then ends every thread."""
        deadline = time.monotonic() + _FLUSH_S
        with self._queued:
            while self._queue and self._client.breaker.closed and time.monotonic() < deadline:
                self._queued.wait(timeout=0.05)
            self._closing = True
            self._queued.notify_all()
        if self._saver.is_alive():
            self._saver.join(timeout=max(0.1, deadline - time.monotonic()))
        self._client.close()
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def start_loads(self, plans: Iterable[LoadPlan]) -> None:
        """Fetches blocks in the background; `take_finished` tells when."""
        for plan in plans:
            self._loaders.submit(self._load, plan)

    def take_finished(self) -> set[str]:
        """Requests whose loads ended since the last call, well or not."""
        with self._lock:
            finished, self._finished = self._finished, set()
            return finished

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were not loaded, since the last call; never later than their request is finished."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def save(self, plans: Iterable[SavePlan]) -> None:
        """Snapshots blocks to be stored. Drops what does not fit into the queue or has nowhere to go."""
        for plan in plans:
            hashes = [plan.parent, *(block.block_hash for block in plan.blocks)]
            parent, *keys = self._keys.keys(self._rank, plan.scope, hashes)
            if not plan.parent:
                parent = b""
            for block, key in zip(plan.blocks, keys, strict=True):
                if not self._is_known(key):
                    self._snapshot(plan.scope, block.block_id, key, parent)
                parent = key

    # --- loading

    def _load(self, plan: LoadPlan) -> None:
        done = 0
        try:
            done = self._fetch(plan)
        except Exception:  # noqa: BLE001 - a lost load must still release the request
            _log.exception("loading KV blocks failed; they are computed")
        finally:
            failed = [block.block_id for block in plan.blocks[done:]]
            with self._lock:
                self._failed_blocks.update(failed)
                self._finished.add(plan.request_id)
            self._counters.add(Count.FAILED_BLOCKS, len(failed))

    def _fetch(self, plan: LoadPlan) -> int:
        """Fetches until the first block that is gone or does not verify: those behind it are of no use."""
        tensors = self._ready()
        keys = self._keys.keys(self._rank, plan.scope, [block.block_hash for block in plan.blocks])
        started = time.perf_counter()
        done, outcome = 0, "unavailable"
        reading = self._client.read(plan.scope.namespace, keys, self._buffer())
        asked = {Attribute.KV_BLOCKS_ASKED: len(keys)}
        with (
            self._trace.span("kv.load", plan.scope.traceparent, asked) as note,
            contextlib.closing(reading),
        ):
            for index, value in reading:
                if index != done or value is None:
                    outcome = "missing"
                    break
                try:
                    payload = open_value(value, keys[index], self._digest, tensors.payload_bytes)
                except BlockMismatchError as error:
                    outcome = f"mismatch-{error.reason}"
                    self._mismatch(keys[index], error)
                    break
                tensors.copy_in(plan.blocks[index].block_id, np.frombuffer(payload, np.uint8))
                done += 1
            if done == len(keys):
                outcome = "loaded"
            size = done * self.value_bytes
            note({Attribute.KV_BLOCKS_HIT: done, Attribute.KV_BYTES: size, Attribute.KV_OUTCOME: outcome})
        self._remember(keys[:done])
        elapsed_us = round((time.perf_counter() - started) * 1e6)
        self._counters.add(Count.LOADED_BLOCKS, done)
        self._counters.add(Count.LOADED_BYTES, size)
        self._counters.add(Count.LOAD_MICROSECONDS, elapsed_us)
        return done

    def _buffer(self) -> Bytes:
        buffer: Bytes | None = getattr(self._buffers, "value", None)
        if buffer is None:
            buffer = np.empty(self.value_bytes, np.uint8)
            self._buffers.value = buffer
        return buffer

    def _mismatch(self, key: bytes, error: BlockMismatchError) -> None:
        self._counters.add(Count.MISMATCHED_BLOCKS)
        _log.warning("a stored KV block does not verify (%s) and is computed anew", error.reason)
        with self._lock:
            # When the block was computed it replaces the bad value.
            self._mismatched[key] = None
            while len(self._mismatched) > _KNOWN_KEYS:
                self._mismatched.popitem(last=False)
            self._known.pop(key, None)

    # --- saving

    def _snapshot(self, scope: RequestScope, block_id: int, key: bytes, parent: bytes) -> None:
        size = self.value_bytes
        with self._queued:
            if self._queued_bytes + size > self._save_queue_bytes or not self._client.breaker.closed:
                self._counters.add(Count.DROPPED_BLOCKS)
                return
            value = self._spare.pop() if self._spare else np.empty(size, np.uint8)
            self._queued_bytes += size
        self._ready().copy_out(block_id, value[HEADER_BYTES:])
        with self._queued:
            self._queue.append(_Snapshot(scope, key, parent, value))
            self._queued.notify()

    def _save_loop(self) -> None:
        use_every_core()
        while True:
            with self._queued:
                while not self._queue and not self._closing:
                    self._queued.wait()
                if self._closing:
                    return
                batch = self._next_batch()
            try:
                self._store(batch)
            except Exception:  # noqa: BLE001 - saving is optional; the loop must live
                _log.exception("saving KV blocks failed; they are dropped")
                self._counters.add(Count.DROPPED_BLOCKS, len(batch))
            with self._queued:
                self._queued_bytes -= sum(len(item.value) for item in batch)
                self._spare += [item.value for item in batch][: _SPARE_BUFFERS - len(self._spare)]
                self._queued.notify_all()

    def _next_batch(self) -> list[_Snapshot]:
        batch = [self._queue.popleft()]
        limit = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // len(batch[0].value)))
        while self._queue and len(batch) < limit and self._queue[0].scope == batch[0].scope:
            batch.append(self._queue.popleft())
        return batch

    def _store(self, batch: Sequence[_Snapshot]) -> None:
        scope = batch[0].scope
        with self._trace.span("kv.save", scope.traceparent, {Attribute.KV_BLOCKS_ASKED: len(batch)}) as note:
            with self._lock:
                replaced = {item.key for item in batch if item.key in self._mismatched}
            present = 0
            if not replaced:
                keys = [item.key for item in batch]
                present = self._client.lookup(scope.namespace, keys, patient=True) or 0
            missing = batch[present:]
            blocks: list[OutgoingBlock] = []
            for item in missing:
                write_header(item.value.data, item.key, self._digest)
                blocks.append(
                    OutgoingBlock(item.key, item.value, item.parent_key, replace=item.key in replaced)
                )
            counts = self._client.write(scope.namespace, blocks) if blocks else None
            if blocks and counts is None:
                self._counters.add(Count.DROPPED_BLOCKS, len(blocks))
                note({Attribute.KV_OUTCOME: "unavailable"})
                return
            stored = counts.stored if counts else 0
            note(
                {
                    Attribute.KV_BLOCKS_STORED: stored,
                    Attribute.KV_BYTES: stored * self.value_bytes,
                    Attribute.KV_OUTCOME: "saved",
                }
            )
        self._counters.add(Count.SAVED_BLOCKS, stored)
        self._counters.add(Count.SAVED_BYTES, stored * self.value_bytes)
        self._counters.add(Count.EXISTING_BLOCKS, present + (counts.existing if counts else 0))
        self._counters.add(Count.REFUSED_BLOCKS, counts.refused if counts else 0)
        if counts is None or not counts.refused:
            self._remember([item.key for item in batch])

    # --- keys that the store is known to have

    def _is_known(self, key: bytes) -> bool:
        with self._lock:
            known_at = self._known.get(key)
            return known_at is not None and time.monotonic() - known_at < _KNOWN_LIFETIME_S

    def _remember(self, keys: Iterable[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            for key in keys:
                self._known[key] = now
                self._known.move_to_end(key)
                self._mismatched.pop(key, None)
            while len(self._known) > _KNOWN_KEYS:
                self._known.popitem(last=False)

    def _ready(self) -> BlockTensors:
        if self._tensors is None:
            raise RuntimeError("the connector was not given the engine's KV tensors")
        return self._tensors
