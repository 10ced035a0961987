"""`sealmesh up` with everything real: first run, what it leaves on disk, restart, refusals, Ctrl-C."""

from __future__ import annotations

import json
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from sealmesh.deploy.local.demo_model import convert_demo_model
from sealmesh.deploy.local.record import read_record

from tests.support.mesh import MODEL, RunningMesh, cli_environment, contains_any, json_of, new_mesh, run_cli

pytestmark = pytest.mark.engine

WORDS = (
    "river",
    "stone",
    "cloud",
    "garden",
    "winter",
    "music",
    "silver",
    "market",
    "bridge",
    "forest",
    "letter",
)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_demo_model(tmp_path_factory.mktemp("plain") / MODEL).folder


def test_everything_is_ready(mesh: RunningMesh) -> None:
    done = mesh.cli("status", "--json")
    status = json_of(done)
    assert done.returncode == 0, status
    assert status["ready"] is True
    services = status["services"]
    assert isinstance(services, list)
    assert [service["name"] for service in services] == ["vault", "kvstore", "worker-0", "gateway"]
    assert all(service["ready"] for service in services), services


def test_it_knows_the_capital_of_france(mesh: RunningMesh) -> None:
    question = "What is the capital of France?"
    done = mesh.cli("chat", question, "--temperature", "0", "--max-tokens", "24", check=True)
    assert "Paris" in done.stdout
    document = json_of(
        mesh.cli("chat", question, "--temperature", "0", "--max-tokens", "24", "--json", check=True)
    )
    assert document["content"] == done.stdout.removesuffix("\n")
    assert document["model"] == MODEL


def test_models_and_settings_are_shown_without_secrets(mesh: RunningMesh) -> None:
    models = json.loads(mesh.cli("models", "--json", check=True).stdout)
    assert [model["id"] for model in models] == [MODEL]
    shown = mesh.cli("config", "show", "--json", check=True).stdout
    settings = json.loads(shown)
    assert settings["worker"]["max_model_len"] == {"value": 4096, "origin": "file"}
    assert settings["kvstore"]["redis_url"]["origin"] == "default"
    assert mesh.api_key not in shown


def test_every_service_has_metrics(mesh: RunningMesh) -> None:
    for service in mesh.record().services:
        answer = httpx.get(mesh.metrics_url(service.name), timeout=10)
        assert answer.status_code == httpx.codes.OK
        assert "sealmesh_build_info" in answer.text, service.name


def test_the_state_folder_is_closed_to_others(mesh: RunningMesh) -> None:
    for folder in (mesh.state.root, mesh.state.keys, mesh.state.tls, mesh.state.access, mesh.state.vault):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    secrets = [
        *(mesh.state.root_key, mesh.state.api_key, mesh.state.gateway_secret, mesh.state.signing_key),
        *mesh.state.tls.glob("*.key"),
    ]
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_no_weight_and_no_prompt_lies_in_the_clear(mesh: RunningMesh, plain_model: Path) -> None:
    secret = "The ginkgo at number nineteen is mine"
    mesh.cli("chat", secret, "--max-tokens", "4", check=True)
    samples = _weight_samples(plain_model / "model.safetensors")
    needles = [*samples, secret.encode()]
    assert contains_any(plain_model / "model.safetensors", needles) == samples[0], "the scan finds nothing"
    for path in mesh.state.root.rglob("*"):
        if path.is_file():
            # KV blocks of a prompt are numbers; its text must be nowhere.
            assert contains_any(path, needles) is None, path
    # Plain folders of a run that goes on elsewhere on this machine are none of this mesh's business.
    left = Path("/dev/shm").glob("sealmesh-plain-*")  # noqa: S108
    assert [folder for folder in left if not psutil.pid_exists(int(folder.name.split("-")[2]))] == []


def _weight_samples(path: Path) -> list[bytes]:
    """Stretches of 64 bytes of tensor data, spread over the file."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        start, size = 8 + header, path.stat().st_size
        samples = []
        for part in range(1, 30):
            file.seek(start + (size - start) * part // 30)
            samples.append(file.read(64))
    return [sample for sample in samples if len(set(sample)) > 16]


def test_a_second_up_says_that_the_first_runs(mesh: RunningMesh) -> None:
    done = mesh.cli("up", "--detach", "--port-offset", str(mesh.port_offset))
    assert done.returncode == 1
    assert done.stderr.startswith("error: a mesh runs already in")
    assert mesh.url in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert mesh.cli("status").returncode == 0


def test_taken_ports_are_one_clear_line_before_anything_starts(mesh: RunningMesh, tmp_path: Path) -> None:
    state = tmp_path / "other"
    started = time.monotonic()
    done = run_cli("up", "--port-offset", str(mesh.port_offset), state=state)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"gateway (HTTP) 127.0.0.1:{8080 + mesh.port_offset} is in use" in line
    assert "--port-offset" in line
    assert time.monotonic() - started < 20
    assert not (state / "models").exists()


def test_wrong_settings_are_one_clear_line(tmp_path: Path) -> None:
    for flags, wanted in (
        (["--set", "worker.max_model_lenn=1"], "max_model_len"),
        (["--set", "nonsense"], "section.field=value"),
        (["--model", str(tmp_path / "missing")], "does not exist"),
        (["--model", str(tmp_path)], "no model folder"),
        (["--engine-arg", "nonsense"], "key=value"),
    ):
        done = run_cli("up", "--port-offset", "20000", *flags, state=tmp_path / "state")
        assert done.returncode in (1, 2), flags
        assert wanted in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr


def test_a_restart_keeps_the_cache_and_the_answer(mesh: RunningMesh, note: list[str]) -> None:
    source = random.Random(7)
    prompt = "Sum this up: " + " ".join(source.choices(WORDS, k=1500))
    flags = ("--temperature", "0", "--max-tokens", "16", "--json")
    cold = json_of(mesh.cli("chat", prompt, *flags, check=True))
    _wait_until_saved(mesh)
    mesh.down()
    seconds = mesh.up()
    mesh.cli("chat", "Say hello.", "--max-tokens", "4", check=True)
    hit = json_of(mesh.cli("chat", prompt, *flags, check=True))
    assert hit["content"] == cold["content"]
    usage = hit["usage"]
    assert isinstance(usage, dict)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * usage["prompt_tokens"], usage
    first_cold, first_hit = cold["first_token_s"], hit["first_token_s"]
    assert isinstance(first_cold, float)
    assert isinstance(first_hit, float)
    assert first_hit < first_cold / 2, (first_cold, first_hit)
    note.append(
        f"restart {seconds:.1f} s; first token {first_cold:.2f} s cold, {first_hit:.2f} s from the store, "
        f"{cached} of {usage['prompt_tokens']} tokens cached"
    )


def _wait_until_saved(mesh: RunningMesh) -> None:
    """Blocks are saved in the background: wait until their number stands still."""
    last, same = -1.0, 0
    deadline = time.monotonic() + 60
    while same < 4:
        assert time.monotonic() < deadline, "blocks were never saved"
        text = httpx.get(mesh.metrics_url("kvstore"), timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith("sealmesh_kvstore_blocks_total")]
        stored = sum(float(line.split()[-1]) for line in lines if 'outcome="stored"' in line)
        same = same + 1 if stored == last and stored > 0 else 0
        last = stored
        time.sleep(0.5)


def test_a_trace_joins_gateway_worker_and_kvstore(mesh: RunningMesh) -> None:
    mesh.cli("chat", "Name three colours, please. " * 20, "--max-tokens", "8", check=True)
    # Spans are written in the background, in each process by itself.
    wanted = {"gateway", "worker", "kvstore"}
    deadline = time.monotonic() + 20
    while True:
        rows = json.loads(mesh.cli("trace", "list", "--json", check=True).stdout)
        newest = next(row for row in rows if "chat" in row["root"])
        if wanted <= set(newest["services"]):
            break
        assert time.monotonic() < deadline, rows[:3]
        time.sleep(0.5)
    drawn = mesh.cli("trace", "show", newest["trace_id"], check=True).stdout
    assert "gateway" in drawn
    assert "KVStoreService/LookupPrefix" in drawn


@pytest.fixture
def foreground(tmp_path: Path, plain_model: Path) -> Iterator[tuple[RunningMesh, subprocess.Popen[str]]]:
    """`sealmesh up` in the foreground with a state folder of its own."""
    other = new_mesh(tmp_path / "state")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sealmesh.deploy.cli.main", "up", "--model", str(plain_model)),
            *("--port-offset", str(other.port_offset), "--set", "worker.max_model_len=512"),
        ],
        env={**cli_environment(), "SEALMESH_STATE": str(other.state.root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield other, process
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_ctrl_c_while_the_engine_loads_leaves_no_process(
    foreground: tuple[RunningMesh, subprocess.Popen[str]],
) -> None:
    other, process = foreground
    deadline = time.monotonic() + 180
    while True:
        assert process.poll() is None, process.stdout and process.stdout.read()
        record = read_record(other.state.mesh_record)
        worker = next((s for s in record.services if s.name == "worker-0"), None) if record else None
        # The engine's own process is there: more than the worker and the tracker of its resources.
        if record and worker and worker.pid and len(psutil.Process(worker.pid).children(recursive=True)) >= 2:
            break
        assert time.monotonic() < deadline, "the engine process never came"
        time.sleep(0.1)
    names = [found.name() for found in other.look()]
    assert "redis-server" in names, names
    assert len(names) >= 8  # supervisor, keeper, vault, kvstore, Redis, worker, tracker, engine
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    other.assert_nothing_left()
    assert not other.state.mesh_record.exists()
