"""The client against a real kvstore that is slow, frozen, dead or back."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sealmesh.inference.kv_client import KVClientOptions, KVStoreClient, OutgoingBlock, PutCounts
from sealmesh.inference.kv_tensors import Bytes
from sealmesh.security.tls import TlsFiles
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.tracing import Tracing

from tests.support.kvstore import KVStoreProcess, key_of, keys_of

SPACE = "tenant/1"
# Scheduling noise of a busy machine on top of a deadline.
SLACK_S = 0.3


class Switch:
    """Records what the breaker said."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.closed = threading.Event()

    def __call__(self, opened: bool) -> None:
        (self.opened if opened else self.closed).set()


def telemetry() -> Telemetry:
    return Telemetry("worker", Tracing("worker"), Metrics("worker"), StructuredLogger("worker"))


def make_client(address: str, tls: TlsFiles | None, on_breaker: Callable[[bool], None]) -> KVStoreClient:
    options = KVClientOptions(
        address, tls, lookup_deadline_s=0.2, load_deadline_s=5.0, load_stall_s=0.3, save_deadline_s=1.0
    )
    return KVStoreClient(options, telemetry(), on_breaker=on_breaker)


@pytest.fixture
def kvstore(tmp_path: Path) -> Iterator[KVStoreProcess]:
    with KVStoreProcess(tmp_path) as process:
        yield process


@pytest.fixture
def switch() -> Switch:
    return Switch()


@pytest.fixture
def client(kvstore: KVStoreProcess, switch: Switch) -> Iterator[KVStoreClient]:
    client = make_client(kvstore.grpc_address, kvstore.tls(), switch)
    client.connect()
    assert switch.closed.wait(10)
    switch.closed.clear()
    yield client
    client.close()


@pytest.fixture
def patient(kvstore: KVStoreProcess) -> Iterator[KVStoreClient]:
    """A client whose limits a busy machine does not reach, for what is not about limits."""
    options = KVClientOptions(
        kvstore.grpc_address,
        kvstore.tls(),
        lookup_deadline_s=30,
        load_deadline_s=60,
        load_stall_s=30,
        save_deadline_s=60,
    )
    switch = Switch()
    patient = KVStoreClient(options, telemetry(), on_breaker=switch)
    patient.connect()
    assert switch.closed.wait(10)
    yield patient
    patient.close()


def value_of(number: int, size: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 255, size, np.uint8)


def write(client: KVStoreClient, numbers: range, size: int = 100) -> PutCounts | None:
    return client.write(SPACE, [OutgoingBlock(key_of(n), value_of(n, size)) for n in numbers])


def read(client: KVStoreClient, numbers: range, room: int = 100) -> list[tuple[int, bytes | None]]:
    buffer = np.empty(room, np.uint8)
    return [
        (index, None if value is None else bytes(value))
        for index, value in client.read(SPACE, keys_of(numbers), buffer)
    ]


def timed(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_blocks_go_and_come(patient: KVStoreClient) -> None:
    size = (3 << 20) + 17
    assert write(patient, range(3), size) == PutCounts(stored=3, existing=0, refused=0)
    assert write(patient, range(4), size) == PutCounts(stored=1, existing=3, refused=0)
    assert patient.lookup(SPACE, keys_of(range(6))) == 4
    expected = [(n, value_of(n, size).tobytes()) for n in range(4)]
    assert read(patient, range(5), size) == [*expected, (4, None)]


def test_a_value_with_no_room_comes_as_an_empty_one(patient: KVStoreClient) -> None:
    write(patient, range(1), 5000)
    write(patient, range(1, 2), 100)
    assert read(patient, range(2), 100) == [(0, b""), (1, value_of(1, 100).tobytes())]


def test_a_read_can_be_left(patient: KVStoreClient) -> None:
    write(patient, range(20), 1 << 20)
    buffer = np.empty(1 << 20, np.uint8)
    reading = patient.read(SPACE, keys_of(range(20)), buffer)
    assert next(reading)[0] == 0
    reading.close()
    assert patient.lookup(SPACE, keys_of(range(20))) == 20


def test_nobody_there_costs_little_and_never_raises(switch: Switch) -> None:
    client = make_client("127.0.0.1:1", None, switch)
    assert timed(lambda: client.lookup(SPACE, [key_of(1)])) < 0.2 + SLACK_S
    assert switch.opened.wait(1)
    assert client.lookup(SPACE, [key_of(1)]) is None
    assert write(client, range(1)) is None
    assert read(client, range(1)) == []
    client.close()


def test_a_missing_certificate_never_raises(tmp_path: Path, switch: Switch) -> None:
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "w.pem", tmp_path / "w.key")
    client = make_client("127.0.0.1:1", files, switch)
    assert client.lookup(SPACE, [key_of(1)]) is None
    assert switch.opened.is_set()
    client.close()


def test_another_role_behind_the_address_is_not_trusted(tmp_path: Path, switch: Switch) -> None:
    with KVStoreProcess(tmp_path) as process:
        imposter = process.authority.issue("gateway", "gateway-0")
        process.stop()
        flags = ["--tls-certificate", str(imposter.certificate), "--tls-key", str(imposter.key)]
        with KVStoreProcess(tmp_path, *flags, authority=process.authority) as other:
            client = make_client(other.grpc_address, other.tls(), switch)
            assert client.lookup(SPACE, [key_of(1)]) is None
            client.close()


def test_a_frozen_store_costs_one_deadline_then_nothing_then_comes_back(
    client: KVStoreClient, kvstore: KVStoreProcess, switch: Switch
) -> None:
    write(client, range(1))
    kvstore.send(signal.SIGSTOP)

    assert 0.15 < timed(lambda: client.lookup(SPACE, [key_of(0)])) < 0.2 + SLACK_S
    assert switch.opened.is_set()
    assert timed(lambda: [client.lookup(SPACE, [key_of(0)]) for _ in range(1000)]) < 0.1
    assert timed(lambda: write(client, range(1, 2))) < 0.1
    assert timed(lambda: read(client, range(1))) < 0.1

    kvstore.send(signal.SIGCONT)
    assert switch.closed.wait(10)
    assert client.lookup(SPACE, [key_of(0)]) == 1


def test_a_read_from_a_store_that_freezes_ends_at_the_stall_limit(
    client: KVStoreClient, patient: KVStoreClient, kvstore: KVStoreProcess
) -> None:
    size = 1 << 20
    write(patient, range(64), size)
    buffer = np.empty(size, np.uint8)
    reading = client.read(SPACE, keys_of(range(64)), buffer)
    assert next(reading)[0] == 0
    kvstore.send(signal.SIGSTOP)
    started = time.monotonic()
    rest = list(reading)
    assert time.monotonic() - started < 0.3 + SLACK_S
    assert len(rest) < 63
    assert not client.breaker.closed


def test_a_read_from_a_store_that_dies_ends(
    client: KVStoreClient, patient: KVStoreClient, kvstore: KVStoreProcess
) -> None:
    size = 1 << 20
    write(patient, range(64), size)
    reading = client.read(SPACE, keys_of(range(64)), np.empty(size, np.uint8))
    assert next(reading)[0] == 0
    kvstore.send(signal.SIGKILL)
    assert timed(lambda: list(reading)) < 0.3 + SLACK_S


def test_a_slow_consumer_is_not_a_stall(client: KVStoreClient, patient: KVStoreClient) -> None:
    write(patient, range(3))
    indexes = []
    for index, _ in client.read(SPACE, keys_of(range(3)), np.empty(100, np.uint8)):
        indexes.append(index)
        time.sleep(0.5)
    assert indexes == [0, 1, 2]
    assert client.breaker.closed


def test_a_frozen_redis_is_a_miss_within_the_deadline(
    client: KVStoreClient, kvstore: KVStoreProcess, switch: Switch
) -> None:
    write(client, range(1))
    redis = kvstore.redis
    redis.suspend()
    assert timed(lambda: client.lookup(SPACE, [key_of(0)])) < 0.2 + SLACK_S
    redis.resume()
    assert switch.closed.wait(10)
    assert client.lookup(SPACE, [key_of(0)]) == 1


def test_a_killed_redis_comes_back_with_its_blocks(
    client: KVStoreClient, kvstore: KVStoreProcess, switch: Switch
) -> None:
    write(client, range(1))
    # The append-only file is synced every second.
    time.sleep(1.2)
    kvstore.redis.kill()
    client.lookup(SPACE, [key_of(0)])
    kvstore.wait_for("the embedded Redis is back")
    if not client.breaker.closed:
        assert switch.closed.wait(10)
    assert client.lookup(SPACE, [key_of(0)]) == 1


def test_a_restarted_store_is_found_again(
    client: KVStoreClient, kvstore: KVStoreProcess, switch: Switch
) -> None:
    write(client, range(1))
    kvstore.send(signal.SIGKILL)
    assert client.lookup(SPACE, [key_of(0)]) is None
    assert switch.opened.is_set()
    kvstore.start()
    assert switch.closed.wait(20)
    assert client.lookup(SPACE, [key_of(0)]) == 1


def test_a_closed_client_answers_nothing(client: KVStoreClient) -> None:
    client.close()
    assert client.lookup(SPACE, [key_of(0)]) is None
    assert write(client, range(1)) is None
