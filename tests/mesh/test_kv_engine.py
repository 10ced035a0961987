"""The connector in a real engine with a real store: blocks outlive the engine, failures outlive nothing."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sealmesh.deploy.local.demo_model import convert_demo_model
from sealmesh.deploy.local.tiny_deepseek import make_tiny_deepseek

from tests.support.kv_engine import Answer, KVEngine
from tests.support.kvstore import KVStoreProcess

pytestmark = pytest.mark.engine

BLOCK = 32
ALICE = {"handle": "a" * 32, "epoch": 1, "traceparent": ""}
BOB = {"handle": "b" * 32, "epoch": 1, "traceparent": ""}


def prompt(number: int, length: int) -> list[int]:
    """Token ids that no other number shares a block with."""
    return [100 + (number * 7919 + position * position * 31 + position) % 20000 for position in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_demo_model(tmp_path_factory.mktemp("models") / "smollm2").folder


@pytest.fixture(scope="module")
def kvstore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStoreProcess]:
    with KVStoreProcess(tmp_path_factory.mktemp("kv")) as process:
        yield process


def extra(process: KVStoreProcess, digest: str = "11" * 32) -> dict[str, object]:
    tls = process.tls()
    return {
        "kvstore_address": process.grpc_address,
        "model_digest": digest,
        "tls_ca": str(tls.ca),
        "tls_certificate": str(tls.certificate),
        "tls_key": str(tls.key),
        # Generous, because the machine that runs the tests is busy; the unit tests hold the real one.
        "lookup_deadline_ms": 500,
    }


@pytest.fixture(scope="module")
def cold(model: Path, kvstore: KVStoreProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What a first engine answered; it is gone when this returns, its blocks are in the store."""
    log = tmp_path_factory.mktemp("logs") / "cold.log"
    with KVEngine(model, extra(kvstore), log, block_size=BLOCK) as engine:
        answers = {
            f"p{number}": engine.generate(prompt(number, 420), 40, tenant=ALICE) for number in range(10)
        }
        answers["base"] = engine.generate(prompt(20, 420)[:250] + prompt(21, 170), 16)
    assert all(answer.cached_tokens == 0 for answer in answers.values())
    return answers


@pytest.fixture(scope="module")
def warm(
    model: Path, kvstore: KVStoreProcess, cold: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KVEngine]:
    """A second engine process."""
    assert cold
    log = tmp_path_factory.mktemp("logs") / "warm.log"
    with KVEngine(model, extra(kvstore), log, block_size=BLOCK) as engine:
        yield engine


def test_a_new_process_loads_what_an_old_one_computed(warm: KVEngine, cold: dict[str, Answer]) -> None:
    for number in range(2):
        answer = warm.generate(prompt(number, 420), 40, tenant=ALICE)
        assert answer.cached_tokens == 13 * BLOCK
        assert answer.tokens == cold[f"p{number}"].tokens


def test_several_requests_load_at_once(warm: KVEngine, cold: dict[str, Answer]) -> None:
    answers = warm.generate_together([prompt(2, 420), prompt(3, 420)], 40, tenant=ALICE)
    assert [answer.cached_tokens for answer in answers] == [13 * BLOCK] * 2
    assert [answer.tokens for answer in answers] == [cold["p2"].tokens, cold["p3"].tokens]


def test_the_second_turn_finds_what_was_decoded(warm: KVEngine, cold: dict[str, Answer]) -> None:
    history = prompt(4, 420) + cold["p4"].tokens
    answer = warm.generate(history + prompt(30, 50), 8, tenant=ALICE)
    # 420 prompt tokens and 40 of the answer, of which the last was never fed: 459 // 32 blocks.
    assert answer.cached_tokens == 459 // BLOCK * BLOCK


def test_a_shared_beginning_is_a_partial_hit(warm: KVEngine) -> None:
    answer = warm.generate(prompt(20, 420)[:250] + prompt(22, 170), 16)
    assert answer.cached_tokens == 250 // BLOCK * BLOCK


def test_another_tenant_or_epoch_finds_nothing(warm: KVEngine) -> None:
    assert warm.generate(prompt(8, 420), 1, tenant=BOB).cached_tokens == 0
    assert warm.generate(prompt(9, 420), 1, tenant={**ALICE, "epoch": 2}).cached_tokens == 0


def test_a_store_that_freezes_or_dies_costs_no_request(
    warm: KVEngine, kvstore: KVStoreProcess, cold: dict[str, Answer]
) -> None:
    kvstore.send(signal.SIGSTOP)
    frozen = warm.generate(prompt(5, 420), 40, tenant=ALICE)
    assert frozen.tokens == cold["p5"].tokens
    assert frozen.cached_tokens == 0

    kvstore.send(signal.SIGCONT)
    kvstore.send(signal.SIGKILL)
    dead = warm.generate(prompt(6, 420), 40, tenant=ALICE)
    assert dead.tokens == cold["p6"].tokens

    kvstore.start()
    # The breaker's next probe is at most five seconds away; it has no event to wait for out here.
    pause = threading.Event()
    for _ in range(20):
        pause.wait(0.5)
        back = warm.generate(prompt(7, 420) + prompt(40, 8), 1, tenant=ALICE)
        if back.cached_tokens:
            break
    assert back.cached_tokens == 13 * BLOCK


def test_latent_attention_blocks_come_back_too(model: Path, kvstore: KVStoreProcess, tmp_path: Path) -> None:
    deepseek = make_tiny_deepseek(tmp_path / "deepseek", variant="v2", tokenizer_from=model)
    answers = []
    for run in range(2):
        log = tmp_path / f"{run}.log"
        # The CPU build's mixture-of-experts kernel knows no float32; without AMX it makes the block 16.
        options = {"dtype": "bfloat16", "block_size": BLOCK}
        with KVEngine(deepseek, extra(kvstore, "22" * 32), log, **options) as engine:
            answers.append(engine.generate(prompt(1, 330), 12))
    # The engine chooses the block for latent attention: 16 tokens, or 64 and more with AMX.
    assert answers[0].cached_tokens == 0
    assert 256 <= answers[1].cached_tokens <= 328
    # Random weights have near ties, so only the tokens up to the first are compared.
    assert answers[0].tokens[0] == answers[1].tokens[0]
