"""The scheduler's side: which blocks of a request to load, and which to save, step by step.

Knows nothing of vLLM but the few attributes of a request in `EngineRequest`. All methods run on the
scheduler's thread and none waits: lookups run in threads of their own, and a request whose lookup is
under way is asked for again, until the deadline makes it a miss.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from sealmesh.inference.kv_client import KVStoreClient
from sealmesh.inference.kv_counters import Count, KVCounters
from sealmesh.inference.kv_keys import KeySpace
from sealmesh.inference.kv_plan import BlockRef, LoadPlan, RequestScope, SavePlan, StepPlan, parse_tenant
from sealmesh.inference.kv_threads import use_every_core
from sealmesh.inference.kv_trace import KVTrace
from sealmesh.telemetry.attributes import Attribute

_LOOKUP_THREADS = 4
# How long a lookup's answer is believed, for a request that waits for memory in the meantime.
_ANSWER_LIFETIME_S = 5.0


class EngineRequest(Protocol):
    """What is read of the engine's request object."""

    request_id: str
    num_preemptions: int
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


@dataclass(frozen=True)
class ScheduledRequest:
    """A request that runs in this step.

    Attributes:
        block_ids: Blocks that it got; all of them when `replaces`, else those after the ones it had.
        computed_tokens: Tokens whose KV state is in its blocks after this step.
    """

    request_id: str
    block_ids: Sequence[int]
    replaces: bool
    computed_tokens: int


@dataclass
class _Lookup:
    future: Future[int | None]
    started: float
    preemptions: int


@dataclass
class _Tracked:
    request: EngineRequest
    scope: RequestScope
    block_ids: list[int] = field(default_factory=list)
    saved_blocks: int = 0
    lookup: _Lookup | None = None
    local_blocks: int = 0
    loading: list[int] = field(default_factory=list)
    load_failed: bool = False


class KVScheduler:
    """Plans loads and saves.

    Args:
        block_tokens: Tokens in a block of the engine.
        hashes_per_block: Entries of `block_hashes` for one block, 1 or more.
        lookup_deadline_s: Longest time that a lookup may hold a request back.
        save: Whether blocks are saved.
    """

    def __init__(
        self,
        keys: KeySpace,
        client: KVStoreClient,
        trace: KVTrace,
        counters: KVCounters,
        *,
        block_tokens: int,
        hashes_per_block: int = 1,
        lookup_deadline_s: float = 0.05,
        save: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._client = client
        self._trace = trace
        self._counters = counters
        self._block_tokens = block_tokens
        self._hashes_per_block = hashes_per_block
        self._deadline_s = lookup_deadline_s
        self._save = save
        self._clock = clock
        self._requests: dict[str, _Tracked] = {}
        self._plan = StepPlan()
        self._threads = ThreadPoolExecutor(
            _LOOKUP_THREADS, thread_name_prefix="kv-lookup", initializer=use_every_core
        )

    def start(self) -> None:
        """Connects in the background."""
        self._client.connect()

    def close(self) -> None:
        """Stops lookups and closes the client."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def track(
        self,
        request: EngineRequest,
        *,
        transfer_params: Mapping[str, object] | None,
        cache_salt: str,
        lora_digest: bytes,
        opaque: bool,
    ) -> None:
        """Takes a request up and starts its lookup.

        Args:
            transfer_params: Its kv_transfer_params.
            opaque: It has inputs other than tokens; nothing of it is loaded or saved.
        """
        tenant = None if opaque else parse_tenant(transfer_params)
        if tenant is None:
            return
        namespace, traceparent = tenant
        scope = RequestScope(namespace, cache_salt, lora_digest, traceparent)
        tracked = _Tracked(request, scope)
        self._requests[request.request_id] = tracked
        self._start_lookup(tracked)

    def tracks(self, request_id: str) -> bool:
        """Whether the request was taken up and is not over."""
        return request_id in self._requests

    def matched_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond those that the engine has; None: ask again.

        Args:
            computed_tokens: Tokens in the engine's own prefix cache, a multiple of the block.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.load_failed:
            return 0
        lookup = tracked.lookup
        stale = lookup is not None and (
            lookup.preemptions != tracked.request.num_preemptions
            or self._clock() - lookup.started > _ANSWER_LIFETIME_S
        )
        if lookup is None or stale:
            lookup = self._start_lookup(tracked)
        if lookup is None:
            return 0
        if not lookup.future.done():
            if self._clock() - lookup.started < self._deadline_s:
                return None
            # It ends by itself at its own deadline; nobody waits for it any longer.
            self._counters.add(Count.LOOKUP_FAILURES)
            tracked.lookup = _Lookup(_done(None), self._clock(), lookup.preemptions)
            return 0
        present = lookup.future.result() or 0
        tracked.saved_blocks = max(tracked.saved_blocks, present)
        tracked.local_blocks = computed_tokens // self._block_tokens
        return max(0, present - tracked.local_blocks) * self._block_tokens

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine gave blocks to a request, the first `external_tokens` behind its own to be loaded."""
        tracked = self._requests.get(request_id)
        if tracked is None or external_tokens <= 0:
            return
        first = tracked.local_blocks
        count = external_tokens // self._block_tokens
        blocks = [BlockRef(block_ids[i], self._hash(tracked, i)) for i in range(first, first + count)]
        tracked.loading = [block.block_id for block in blocks]
        tracked.block_ids = list(block_ids)
        tracked.saved_blocks = max(tracked.saved_blocks, first + count)
        self._plan.loads.append(LoadPlan(request_id, tracked.scope, blocks))

    def take_plan(self, scheduled: Iterable[ScheduledRequest]) -> StepPlan:
        """The work of this step; the next one starts empty."""
        plan, self._plan = self._plan, StepPlan()
        for item in scheduled:
            tracked = self._requests.get(item.request_id)
            if tracked is None:
                continue
            tracked.loading = []
            if item.replaces:
                tracked.block_ids = list(item.block_ids)
            else:
                tracked.block_ids += item.block_ids
            self._plan_saves(tracked, item.computed_tokens, plan.saves)
        return plan

    def loads_failed(self, block_ids: Iterable[int]) -> None:
        """Blocks that the worker could not load: they are computed, so they are to be saved again."""
        failed = set(block_ids)
        for tracked in self._requests.values():
            for position, block_id in enumerate(tracked.loading):
                if block_id in failed:
                    tracked.load_failed = True
                    tracked.saved_blocks = min(tracked.saved_blocks, tracked.local_blocks + position)
                    break

    def finished(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request is over; blocks that its last tokens filled are saved before they are used again."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None or tracked.loading:
            return
        tracked.block_ids = list(block_ids)
        # The last token was sampled but never fed: its state was not computed.
        computed = min(tracked.request.num_computed_tokens, tracked.request.num_tokens - 1)
        self._plan_saves(tracked, computed, self._plan.early_saves)

    def _plan_saves(self, tracked: _Tracked, computed_tokens: int, saves: list[SavePlan]) -> None:
        if not self._save:
            return
        first = tracked.saved_blocks
        # A hash exists only for tokens that are certain, so drafts of speculative decoding stay out.
        end = min(
            computed_tokens // self._block_tokens,
            len(tracked.request.block_hashes) // self._hashes_per_block,
            len(tracked.block_ids),
        )
        if end <= first:
            return
        blocks = [BlockRef(tracked.block_ids[i], self._hash(tracked, i)) for i in range(first, end)]
        parent = self._hash(tracked, first - 1) if first else b""
        saves.append(SavePlan(tracked.scope, parent, blocks))
        tracked.saved_blocks = end

    def _hash(self, tracked: _Tracked, block: int) -> bytes:
        # Hashes are chained: the one of a block's last part stands for everything before it.
        return tracked.request.block_hashes[(block + 1) * self._hashes_per_block - 1]

    def _start_lookup(self, tracked: _Tracked) -> _Lookup | None:
        # One token must be left to compute, or there would be nothing to sample from.
        blocks = min(
            (tracked.request.num_tokens - 1) // self._block_tokens,
            len(tracked.request.block_hashes) // self._hashes_per_block,
        )
        if blocks <= 0 or not self._client.breaker.closed:
            tracked.lookup = None
            return None
        hashes = [self._hash(tracked, block) for block in range(blocks)]
        future = self._threads.submit(self._look_up, tracked.scope, hashes)
        tracked.lookup = _Lookup(future, self._clock(), tracked.request.num_preemptions)
        return tracked.lookup

    def _look_up(self, scope: RequestScope, hashes: Sequence[bytes]) -> int | None:
        asked = {Attribute.KV_BLOCKS_ASKED: len(hashes)}
        with self._trace.span("kv.lookup", scope.traceparent, asked) as note:
            keys = self._keys.keys_of_all_ranks(scope, hashes)
            count = self._client.lookup(scope.namespace, keys)
            self._counters.add(Count.LOOKUPS)
            self._counters.add(Count.ASKED_BLOCKS, len(hashes))
            if count is None:
                self._counters.add(Count.LOOKUP_FAILURES)
                note({Attribute.KV_OUTCOME: "unavailable"})
                return None
            present = count // self._keys.ranks
            self._counters.add(Count.HIT_BLOCKS, present)
            outcome = "hit" if present == len(hashes) else "partial" if present else "miss"
            note({Attribute.KV_BLOCKS_HIT: present, Attribute.KV_OUTCOME: outcome})
            return present


def _done(value: int | None) -> Future[int | None]:
    future: Future[int | None] = Future()
    future.set_result(value)
    return future
