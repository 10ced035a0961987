"""The breaker: one failure, then nothing until a probe succeeded."""

import threading
from collections.abc import Iterator

import pytest
from sealmesh.inference.kv_breaker import CircuitBreaker


class Peer:
    """Answers or fails probes, and tells when it was probed."""

    def __init__(self) -> None:
        self.good = threading.Event()
        self.probes = threading.Semaphore(0)
        self.changes: list[bool] = []
        self.closed_again = threading.Event()
        self.breaker = CircuitBreaker(
            self.probe, first_backoff_s=0.01, max_backoff_s=0.05, on_change=self.changed
        )

    def probe(self) -> None:
        self.probes.release()
        if not self.good.is_set():
            raise ConnectionError

    def changed(self, opened: bool) -> None:
        self.changes.append(opened)
        if not opened:
            self.closed_again.set()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.breaker.stop()


def test_starts_closed_and_a_failure_opens_it_once(peer: Peer) -> None:
    assert peer.breaker.closed
    peer.breaker.fail()
    peer.breaker.fail()
    assert not peer.breaker.closed
    assert peer.changes == [True]


def test_stays_open_while_probes_fail_and_closes_with_the_first_good_one(peer: Peer) -> None:
    peer.breaker.fail()
    for _ in range(3):
        assert peer.probes.acquire(timeout=5)
    assert not peer.breaker.closed
    peer.good.set()
    assert peer.closed_again.wait(5)
    assert peer.breaker.closed
    assert peer.changes == [True, False]


def test_opens_again_after_it_closed(peer: Peer) -> None:
    peer.good.set()
    for _ in range(3):
        peer.closed_again.clear()
        peer.breaker.fail()
        assert peer.closed_again.wait(5)
    assert peer.changes == [True, False] * 3


def test_start_opens_until_the_peer_answered(peer: Peer) -> None:
    peer.breaker.start()
    assert not peer.breaker.closed
    assert peer.probes.acquire(timeout=5)
    peer.good.set()
    assert peer.closed_again.wait(5)
    assert peer.breaker.closed
    assert peer.changes == [False]


def test_a_stopped_breaker_probes_no_more(peer: Peer) -> None:
    peer.breaker.fail()
    assert peer.probes.acquire(timeout=5)
    peer.breaker.stop()
    while peer.probes.acquire(blocking=False):
        pass
    assert not peer.probes.acquire(timeout=0.2)
