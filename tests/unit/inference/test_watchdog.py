import pytest
from sealmesh.inference.watchdog import Watchdog
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.support.fake_engine import FakeEngine


class Scene:
    """An engine, a number of open requests and a clock that tests move."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.now = 100.0
        self.watchdog = Watchdog(self.engine, 10.0, clock=lambda: self.now)
        self.watchdog.observe()

    def passes(self, seconds: float, *, steps: int = 0) -> None:
        self.now += seconds
        self.engine.steps += steps
        self.watchdog.observe()


def test_an_idle_engine_is_ready_for_ever() -> None:
    scene = Scene()
    scene.passes(10_000)
    assert scene.watchdog.readiness().ok


def test_a_request_without_a_step_makes_it_not_ready_and_a_step_heals_it() -> None:
    scene = Scene()
    scene.passes(500)
    scene.engine.unfinished = 1
    scene.passes(9)
    assert scene.watchdog.readiness().ok
    scene.passes(2)
    state = scene.watchdog.readiness()
    assert not state.ok
    assert "11 s" in state.reason
    scene.passes(0.1, steps=1)
    assert scene.watchdog.readiness().ok


def test_idle_time_before_a_request_does_not_count() -> None:
    scene = Scene()
    scene.passes(5, steps=3)
    scene.passes(500)
    scene.engine.unfinished = 1
    scene.passes(1)
    assert scene.watchdog.stalled_s == pytest.approx(1)


def test_an_engine_with_long_steps_gets_more_patience() -> None:
    scene = Scene()
    scene.engine.unfinished = 1
    scene.passes(9, steps=1)
    scene.passes(9, steps=1)
    scene.passes(60)
    assert scene.watchdog.readiness().ok
    scene.passes(20)
    assert not scene.watchdog.readiness().ok


async def test_a_dead_engine_ends_the_worker_with_its_reason() -> None:
    scene = Scene()
    scene.engine.failure = "the engine process ended"
    assert not scene.watchdog.readiness().ok
    with pytest.raises(SealmeshError, match="the engine process ended") as failed:
        await scene.watchdog.run()
    assert failed.value.reason == "ENGINE_FAILED"


async def test_a_stuck_engine_ends_the_worker_after_twice_the_patience() -> None:
    scene = Scene()
    scene.engine.unfinished = 2
    scene.passes(21)
    with pytest.raises(SealmeshError, match="no step for 21 s with 2 requests"):
        await scene.watchdog.run()
