"""The worker's side with real tensors and a real kvstore."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from sealmesh.inference.kv_blocks import BlockLayout
from sealmesh.inference.kv_client import KVClientOptions, KVStoreClient
from sealmesh.inference.kv_counters import Count, KVCounters
from sealmesh.inference.kv_keys import KeySpace
from sealmesh.inference.kv_plan import BlockRef, LoadPlan, RequestScope, SavePlan
from sealmesh.inference.kv_tensors import Array, BlockTensors
from sealmesh.inference.kv_trace import KVTrace
from sealmesh.inference.kv_worker import KVWorker
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.tracing import Tracing

from tests.support.kvstore import KVStoreProcess

BLOCKS = 32
SCOPE = RequestScope("tenant/1", "salt", b"", "")
LAYOUT = BlockLayout(bytes(32), "test", "float32", "float32", 16, "sha256_cbor")


class Engine:
    """Tensors and a connector's worker side, as an engine process would hold them."""

    def __init__(
        self,
        process: KVStoreProcess,
        *,
        layout: BlockLayout = LAYOUT,
        width: int = 3,
        queue_bytes: int = 64 << 20,
        seed: int = 0,
    ) -> None:
        self.closed = threading.Event()
        telemetry = Telemetry("worker", Tracing("worker"), Metrics("worker"), StructuredLogger("worker"))
        options = KVClientOptions(process.grpc_address, process.tls(), lookup_deadline_s=1.0)
        client = KVStoreClient(
            options, telemetry, on_breaker=lambda opened: None if opened else self.closed.set()
        )
        self.counters = KVCounters()
        self.worker = KVWorker(
            KeySpace([layout]),
            0,
            client,
            KVTrace(telemetry.tracing),
            self.counters,
            save_queue_bytes=queue_bytes,
        )
        rng = np.random.default_rng(seed)
        self.tensors: list[tuple[str, Array]] = [
            (f"layer{i}", rng.integers(0, 2**31, (BLOCKS, width, 1000), np.int32)) for i in range(4)
        ]
        self.worker.start(BlockTensors(self.tensors, BLOCKS))
        assert self.closed.wait(10)

    def block(self, block_id: int) -> list[bytes]:
        return [tensor[block_id].tobytes() for _, tensor in self.tensors]

    def save(self, blocks: list[BlockRef], scope: RequestScope = SCOPE) -> None:
        self.worker.save([SavePlan(scope, b"", blocks)])

    def wait_saved(self, count: int, name: Count = Count.SAVED_BLOCKS) -> None:
        deadline = threading.Event()
        for _ in range(1000):
            if self.counters.total(name) >= count:
                return
            deadline.wait(0.01)
        raise AssertionError(f"{name} stays at {self.counters.total(name)}, not {count}")

    def load(self, blocks: list[BlockRef], scope: RequestScope = SCOPE) -> set[int]:
        """Loads and returns the blocks that failed."""
        self.worker.start_loads([LoadPlan("r1", scope, blocks)])
        pause = threading.Event()
        failed: set[int] = set()
        for _ in range(2000):
            finished = self.worker.take_finished()
            failed |= self.worker.take_failed_blocks()
            if finished:
                assert finished == {"r1"}
                return failed
            pause.wait(0.005)
        raise AssertionError("the load never ends")


def refs(pairs: list[tuple[int, int]]) -> list[BlockRef]:
    return [BlockRef(block_id, b"hash%d" % number) for block_id, number in pairs]


CHAIN = refs([(block_id, block_id) for block_id in range(8)])
ELSEWHERE = refs([(20 + number, number) for number in range(8)])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStoreProcess]:
    with KVStoreProcess(tmp_path_factory.mktemp("kv")) as process:
        yield process


@pytest.fixture
def raw(shared: KVStoreProcess) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(shared.folder / "data" / "redis.sock")) as client:
        yield client


@pytest.fixture
def kvstore(shared: KVStoreProcess, raw: redis.Redis) -> KVStoreProcess:
    raw.flushdb()
    return shared


@pytest.fixture
def own(tmp_path: Path) -> Iterator[KVStoreProcess]:
    with KVStoreProcess(tmp_path) as process:
        yield process


@pytest.fixture
def first(kvstore: KVStoreProcess) -> Iterator[Engine]:
    engine = Engine(kvstore, seed=1)
    yield engine
    engine.worker.close()


@pytest.fixture
def second(kvstore: KVStoreProcess) -> Iterator[Engine]:
    engine = Engine(kvstore, seed=2)
    yield engine
    engine.worker.close()


def test_what_one_engine_saved_another_loads_into_other_blocks(first: Engine, second: Engine) -> None:
    untouched = [second.block(block_id) for block_id in range(20)]
    first.save(CHAIN)
    first.wait_saved(8)

    assert second.load(ELSEWHERE) == set()

    assert [second.block(20 + i) for i in range(8)] == [first.block(i) for i in range(8)]
    assert [second.block(block_id) for block_id in range(20)] == untouched
    assert second.counters.total(Count.LOADED_BLOCKS) == 8


def test_a_snapshot_is_taken_at_once(first: Engine, second: Engine) -> None:
    expected = [first.block(i) for i in range(8)]
    first.save(CHAIN)
    for _, tensor in first.tensors:
        tensor[...] = 0
    first.wait_saved(8)
    assert second.load(ELSEWHERE) == set()
    assert [second.block(20 + i) for i in range(8)] == expected


def test_known_blocks_are_not_saved_twice(first: Engine, second: Engine) -> None:
    first.save(CHAIN[:6])
    first.wait_saved(6)
    first.save(CHAIN)
    first.wait_saved(8)
    second.save(CHAIN)
    second.wait_saved(8, Count.EXISTING_BLOCKS)
    assert first.counters.total(Count.SAVED_BLOCKS) == 8
    assert first.counters.total(Count.EXISTING_BLOCKS) == 0
    assert second.counters.total(Count.SAVED_BLOCKS) == 0


@pytest.mark.parametrize(
    "scope",
    [
        RequestScope("tenant/2", "salt", b"", ""),
        RequestScope("other/1", "salt", b"", ""),
        RequestScope("tenant/1", "pepper", b"", ""),
        RequestScope("tenant/1", "salt", b"lora", ""),
    ],
    ids=["epoch", "tenant", "salt", "adapter"],
)
def test_another_scope_finds_nothing(first: Engine, second: Engine, scope: RequestScope) -> None:
    first.save(CHAIN)
    first.wait_saved(8)
    before = second.block(20)
    assert second.load(ELSEWHERE, scope) == {ref.block_id for ref in ELSEWHERE}
    assert second.block(20) == before


def test_a_block_that_is_gone_ends_the_load(first: Engine, second: Engine, raw: redis.Redis) -> None:
    first.save(CHAIN[:3] + CHAIN[4:])
    first.wait_saved(7)
    assert second.load(ELSEWHERE) == {23, 24, 25, 26, 27}
    assert [second.block(20 + i) for i in range(3)] == [first.block(i) for i in range(3)]


def stored(raw: redis.Redis) -> dict[bytes, bytes]:
    values: dict[bytes, bytes] = {}
    for name in raw.scan_iter(b"kv1:*"):
        value = raw.get(name)
        assert isinstance(value, bytes)
        values[name] = value
    return values


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "garbage", "empty", "longer"])
def test_a_damaged_value_is_a_miss_and_is_replaced(
    first: Engine, second: Engine, raw: redis.Redis, damage: str
) -> None:
    first.save(CHAIN)
    first.wait_saved(8)
    values = stored(raw)
    for name, value in values.items():
        damaged = {
            "flip": value[:-1] + bytes([value[-1] ^ 1]),
            "cut": value[:-1],
            "swap": next(other for other in values.values() if other != value),
            "garbage": bytes(len(value)),
            "empty": b"",
            "longer": value + b"x",
        }[damage]
        raw.set(name, damaged)
    before = second.block(20)

    assert second.load(ELSEWHERE) == {ref.block_id for ref in ELSEWHERE}

    assert second.block(20) == before
    assert second.counters.total(Count.MISMATCHED_BLOCKS) == 1
    # The engine computes the block and saves it: the bad value goes.
    second.save(ELSEWHERE[:1])
    second.wait_saved(1)
    assert first.load(CHAIN[:1]) == set()
    assert first.block(0) == before


def test_an_engine_with_other_tensors_never_loads_these(kvstore: KVStoreProcess, first: Engine) -> None:
    first.save(CHAIN)
    first.wait_saved(8)
    other = Engine(kvstore, width=2)
    assert other.load(ELSEWHERE) == {ref.block_id for ref in ELSEWHERE}
    assert other.counters.total(Count.MISMATCHED_BLOCKS) == 1
    other.worker.close()


def test_a_full_queue_drops_and_counts(own: KVStoreProcess) -> None:
    engine = Engine(own, queue_bytes=3 * 49_000)
    own.send(signal.SIGSTOP)
    engine.save(CHAIN)
    assert engine.counters.total(Count.DROPPED_BLOCKS) >= 4
    own.send(signal.SIGCONT)
    engine.worker.close()


def test_a_dead_store_fails_the_load_and_nothing_else(own: KVStoreProcess) -> None:
    engine = Engine(own)
    engine.save(CHAIN)
    engine.wait_saved(8)
    own.send(signal.SIGKILL)
    assert engine.load(ELSEWHERE) == {ref.block_id for ref in ELSEWHERE}
    engine.save(refs([(9, 9)]))
    assert engine.counters.total(Count.SAVED_BLOCKS) == 8
    engine.worker.close()


def test_closing_flushes_what_waits(kvstore: KVStoreProcess, second: Engine) -> None:
    engine = Engine(kvstore, seed=1)
    engine.save(CHAIN)
    engine.worker.close()
    assert second.load(ELSEWHERE) == set()
