"""The scheduler's side against a scripted store: what is loaded, what is saved, and when nobody waits."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from sealmesh.inference.kv_blocks import BlockLayout
from sealmesh.inference.kv_client import KVStoreClient
from sealmesh.inference.kv_counters import Count, KVCounters
from sealmesh.inference.kv_keys import KeySpace
from sealmesh.inference.kv_plan import StepPlan
from sealmesh.inference.kv_scheduler import KVScheduler, ScheduledRequest
from sealmesh.inference.kv_trace import KVTrace
from sealmesh.telemetry.tracing import Tracing

BLOCK = 4
LAYOUT = BlockLayout(bytes(32), "test", "float32", "float32", BLOCK, "sha256_cbor")


@dataclass
class Request:
    """The attributes of a vLLM request that the connector reads."""

    request_id: str
    num_tokens: int
    num_preemptions: int = 0
    num_computed_tokens: int = 0

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return [b"h%d" % block for block in range(self.num_tokens // BLOCK)]


class Breaker:
    """A breaker that a test opens by hand."""

    closed = True


@dataclass
class Store:
    """Answers lookups when told to."""

    present: int | None = 0
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)
    breaker: Breaker = field(default_factory=Breaker)

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> int | None:
        self.asked.append(len(keys))
        self.gate.wait(10)
        return None if self.present is None else min(self.present, len(keys))


class Side:
    """A scheduler with its clock in hand."""

    def __init__(self, store: Store, *, ranks: int = 1, save: bool = True) -> None:
        self.now = 0.0
        self.store = store
        self.counters = KVCounters()
        self.scheduler = KVScheduler(
            KeySpace([LAYOUT] * ranks),
            cast(KVStoreClient, store),
            KVTrace(Tracing("worker")),
            self.counters,
            block_tokens=BLOCK,
            lookup_deadline_s=0.05,
            save=save,
            clock=lambda: self.now,
        )

    def track(self, request: Request, **options: bool) -> None:
        self.scheduler.track(
            request,
            transfer_params=None,
            cache_salt="",
            lora_digest=b"",
            opaque=options.get("opaque", False),
        )

    def matched(self, request: Request, computed: int = 0) -> int:
        """The answer once the lookup is done."""
        pause = threading.Event()
        for _ in range(1000):
            answer = self.scheduler.matched_tokens(request.request_id, computed)
            if answer is not None:
                return answer
            pause.wait(0.002)
        raise AssertionError("the lookup never ends")

    def step(
        self, request: Request, blocks: Sequence[int], computed: int, *, replaces: bool = True
    ) -> StepPlan:
        request.num_computed_tokens = computed
        return self.scheduler.take_plan([ScheduledRequest(request.request_id, blocks, replaces, computed)])


def open_store(present: int | None) -> Store:
    store = Store(present)
    store.gate.set()
    return store


def saved(plan: StepPlan) -> list[tuple[int, bytes]]:
    return [(block.block_id, block.block_hash) for save in plan.saves for block in save.blocks]


def early(plan: StepPlan) -> list[int]:
    return [block.block_id for save in plan.early_saves for block in save.blocks]


def test_a_cold_request_loads_nothing_and_saves_blocks_as_they_fill() -> None:
    side = Side(open_store(0))
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request) == 0
    # Chunked prefill: 6 tokens, then 12 more, then one token at a time.
    assert saved(side.step(request, [10, 11, 12, 13, 14], 6)) == [(10, b"h0")]
    assert saved(side.step(request, [], 18, replaces=False)) == [(11, b"h1"), (12, b"h2"), (13, b"h3")]
    request.num_tokens = 20
    assert saved(side.step(request, [], 19, replaces=False)) == []
    assert saved(side.step(request, [15], 20, replaces=False)) == [(14, b"h4")]


@pytest.mark.parametrize(
    ("tokens", "present", "local", "loaded"),
    [
        (18, 4, 0, 16),
        (18, 2, 0, 8),
        (18, 4, 8, 8),
        (18, 1, 8, 0),
        (18, 0, 0, 0),
        # The last token is always computed: a fully stored prompt keeps its last block back.
        (16, 4, 0, 12),
        (17, 4, 0, 16),
        (4, 1, 0, 0),
    ],
)
def test_matches_what_is_beyond_the_engines_own_cache(
    tokens: int, present: int, local: int, loaded: int
) -> None:
    side = Side(open_store(present))
    request = Request("r", num_tokens=tokens)
    side.track(request)
    assert side.matched(request, local) == loaded


def test_a_load_names_the_blocks_behind_the_local_ones() -> None:
    side = Side(open_store(3))
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request, 4) == 8
    side.scheduler.allocated("r", [10, 11, 12], 8)
    (load,) = side.scheduler.take_plan([]).loads
    assert load.request_id == "r"
    assert load.scope.namespace == "local/1"
    assert [(b.block_id, b.block_hash) for b in load.blocks] == [(11, b"h1"), (12, b"h2")]
    # What was loaded or looked up is there already; what is computed behind it is saved.
    assert saved(side.step(request, [10, 11, 12, 13, 14], 18)) == [(13, b"h3")]


def test_two_ranks_must_both_have_a_block() -> None:
    side = Side(open_store(5), ranks=2)
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request) == 2 * BLOCK
    assert side.store.asked == [8]


def test_nobody_waits_for_a_lookup_and_a_late_one_is_a_miss() -> None:
    store = Store(4)
    side = Side(store)
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.scheduler.matched_tokens("r", 0) is None
    side.now = 0.049
    assert side.scheduler.matched_tokens("r", 0) is None
    side.now = 0.051
    assert side.scheduler.matched_tokens("r", 0) == 0
    store.gate.set()
    assert side.scheduler.matched_tokens("r", 0) == 0
    assert len(store.asked) == 1
    assert side.counters.total(Count.LOOKUP_FAILURES) == 1


def test_an_open_breaker_is_not_even_asked() -> None:
    side = Side(open_store(4))
    side.store.breaker.closed = False
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.scheduler.matched_tokens("r", 0) == 0
    assert side.store.asked == []


def test_a_store_that_fails_is_a_miss_and_blocks_are_saved_all_the_same() -> None:
    side = Side(open_store(None))
    request = Request("r", num_tokens=9)
    side.track(request)
    assert side.matched(request) == 0
    assert [block for block, _ in saved(side.step(request, [1, 2, 3], 9))] == [1, 2]


def test_a_failed_load_is_not_tried_again_and_its_blocks_are_saved_anew() -> None:
    side = Side(open_store(4))
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request) == 16
    side.scheduler.allocated("r", [10, 11, 12, 13], 16)
    side.scheduler.loads_failed({12, 13})
    assert side.scheduler.matched_tokens("r", 0) == 0
    assert saved(side.step(request, [10, 11, 12, 13, 14], 18)) == [(12, b"h2"), (13, b"h3")]


def test_a_failed_load_of_one_request_is_none_of_another() -> None:
    side = Side(open_store(4))
    for name, blocks in (("a", [10, 11, 12, 13]), ("b", [20, 21, 22, 23])):
        request = Request(name, num_tokens=18)
        side.track(request)
        side.matched(request)
        side.scheduler.allocated(name, blocks, 16)
    side.scheduler.loads_failed({12, 13})
    assert side.scheduler.matched_tokens("a", 0) == 0
    assert side.scheduler.matched_tokens("b", 0) == 16


def test_a_preempted_request_looks_up_again_and_gets_new_blocks() -> None:
    side = Side(open_store(0))
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request) == 0
    side.step(request, [1, 2, 3, 4, 5], 16)
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    request.num_tokens = 21
    side.store.present = 4
    assert side.matched(request) == 16
    side.scheduler.allocated("r", [6, 7, 8, 9], 16)
    plan = side.step(request, [6, 7, 8, 9, 10, 11], 21)
    assert saved(plan) == [(10, b"h4")]
    assert [block.block_id for block in plan.loads[0].blocks] == [6, 7, 8, 9]
    assert side.store.asked == [4, 5]


def test_a_finished_request_saves_its_last_full_block_before_it_is_reused() -> None:
    side = Side(open_store(0))
    request = Request("r", num_tokens=7)
    side.track(request)
    side.matched(request)
    side.step(request, [1, 2, 3], 7)
    # Two more tokens were sampled; the second of them was never fed.
    request.num_tokens, request.num_computed_tokens = 9, 8
    side.scheduler.finished("r", [1, 2, 3])
    assert early(side.scheduler.take_plan([])) == [2]
    assert not side.scheduler.tracks("r")


def test_the_sampled_but_unfed_last_token_never_fills_a_block() -> None:
    side = Side(open_store(0))
    request = Request("r", num_tokens=7)
    side.track(request)
    side.matched(request)
    side.step(request, [1, 2], 7)
    request.num_tokens, request.num_computed_tokens = 8, 8
    side.scheduler.finished("r", [1, 2])
    assert early(side.scheduler.take_plan([])) == []


def test_a_request_aborted_while_it_loads_saves_nothing() -> None:
    side = Side(open_store(4))
    request = Request("r", num_tokens=18)
    side.track(request)
    side.matched(request)
    side.scheduler.allocated("r", [1, 2, 3, 4], 16)
    request.num_computed_tokens = 16
    side.scheduler.finished("r", [1, 2, 3, 4])
    plan = side.scheduler.take_plan([])
    assert early(plan) == []
    # The worker still has to report the end of the load, or the engine would never free the blocks.
    assert len(plan.loads) == 1


def test_inputs_other_than_tokens_bypass_the_store() -> None:
    side = Side(open_store(4))
    request = Request("r", num_tokens=18)
    side.track(request, opaque=True)
    assert side.scheduler.matched_tokens("r", 0) == 0
    assert saved(side.step(request, [1, 2, 3, 4, 5], 18)) == []
    side.scheduler.finished("r", [1, 2, 3, 4, 5])
    assert side.store.asked == []


def test_saving_can_be_switched_off() -> None:
    side = Side(open_store(0), save=False)
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request) == 0
    assert saved(side.step(request, [1, 2, 3, 4, 5], 18)) == []


def test_an_old_answer_is_asked_for_again() -> None:
    side = Side(open_store(4))
    request = Request("r", num_tokens=18)
    side.track(request)
    assert side.matched(request) == 16
    side.now = 60.0
    side.store.present = 1
    assert side.matched(request) == 4
    assert side.store.asked == [4, 4]
