"""The command line: help, exit codes, one-line errors, and commands that need no engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sealmesh.deploy.cli.main import build_app, run
from sealmesh.deploy.cli.up import printable
from typer.main import get_command

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("SEALMESH_STATE", str(folder))
    monkeypatch.setenv("NO_COLOR", "1")
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file({"weight": np.arange(500_000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def commands() -> list[tuple[str, ...]]:
    """Every command by its path."""

    def walk(command: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        children: dict[str, object] | None = getattr(command, "commands", None)
        if children is None:
            yield path
        for name, child in (children or {}).items():
            yield from walk(child, (*path, name))

    return list(walk(get_command(build_app()), ()))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sealmesh.deploy.cli.main import run; run(['--help']); "
        "heavy = {'grpc', 'torch', 'vllm', 'numpy', 'httpx', 'pydantic', 'cryptography', 'psutil'}; "
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...], capsys: Capture) -> None:
    if path == ("serve",):
        assert run(["serve", "-h"]) == 0
    else:
        assert run([*path, "--help"]) == 0
    assert "Usage: sealmesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "wanted"),
    [
        (["nonsense"], 2, "No such command"),
        (["up", "--workers", "0"], 2, "workers"),
        (["up", "--set", "worker.x"], 2, "section.field=value"),
        (["up", "--set", "cache.x=1"], 2, "sections are"),
        (["up", "--engine-arg", "seed"], 2, "key=value"),
        (["chat", "hi"], 1, "no mesh runs"),
        (["chat", "   ", "--url", "http://127.0.0.1:1"], 2, "API key"),
        (["status"], 1, "No mesh runs"),
        (["down"], 0, "No mesh runs"),
        (["inspect", "/nonexistent"], 1, "/nonexistent"),
        (["verify", "/nonexistent"], 2, "verifying key"),
        (["trace", "last"], 1, "no trace yet"),
        (["trace", "show", "abc"], 1, "names no trace"),
        (["config", "show"], 2, "sealmesh up"),
        (["serve", "cache"], 2, "no service"),
        (["pii", "mask", ""], 2, "empty"),
        (["keys", "api-key", "create", "--tenant", "Not Good"], 2, "tenant"),
        (["keys", "api-key", "list"], 1, "keys.toml"),
    ],
)
def test_errors_are_one_line_with_the_documented_code(
    arguments: list[str], code: int, wanted: str, capsys: Capture
) -> None:
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert wanted in shown.err
    assert shown.out == ""
    if code and "Usage:" not in shown.err:
        assert len(shown.err.splitlines()) == 1


def test_a_model_is_sealed_shown_verified_and_unsealed(plain: Path, tmp_path: Path, capsys: Capture) -> None:
    sealed, clear = tmp_path / "demo", tmp_path / "clear"
    assert run(["seal", str(plain), "--out", str(sealed), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["name"], report["version"], report["tensor_count"]) == ("demo", 1, 1)
    assert run(["inspect", str(sealed), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["manifest_digest"] == report["manifest_digest"]
    assert shown["signer_known"] is True
    assert "tensors" not in shown
    assert run(["verify", str(sealed), "--tags"]) == 0
    assert run(["seal", str(plain), "--out", str(sealed)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert run(["unseal", str(sealed), "--out", str(clear), "--yes"]) == 0
    assert "in the clear" in capsys.readouterr().err
    assert (clear / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_a_flipped_bit_is_refused_with_code_3(plain: Path, tmp_path: Path, capsys: Capture) -> None:
    sealed = tmp_path / "demo"
    assert run(["seal", str(plain), "--out", str(sealed)]) == 0
    target = sealed / "model.safetensors.sealed"
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    capsys.readouterr()
    assert run(["verify", str(sealed)]) == 3
    assert "model.safetensors.sealed" in capsys.readouterr().err
    assert run(["unseal", str(sealed), "--out", str(tmp_path / "clear"), "--yes"]) == 3
    assert not (tmp_path / "clear").exists()


def test_slots_let_a_passphrase_open_a_model(plain: Path, tmp_path: Path, capsys: Capture) -> None:
    sealed, good, bad = tmp_path / "demo", tmp_path / "good", tmp_path / "bad"
    for path, text in ((good, "correct horse"), (bad, "battery staple")):
        path.write_text(text + "\n")
        path.chmod(0o600)
    assert run(["seal", str(plain), "--out", str(sealed)]) == 0
    assert run(["keys", "slots", "add", str(sealed), "--new-passphrase-file", str(good)]) == 0
    slot = capsys.readouterr().out.split()[-1]
    assert run(["verify", str(sealed), "--passphrase-file", str(good)]) == 0
    capsys.readouterr()
    assert run(["verify", str(sealed), "--passphrase-file", str(bad)]) == 3
    assert "wrong passphrase" in capsys.readouterr().err
    assert run(["keys", "slots", "remove", str(sealed), slot[:12]]) == 0
    assert run(["keys", "slots", "list", str(sealed), "--json"]) == 0
    assert [entry["kind"] for entry in json.loads(capsys.readouterr().out)] == ["key-file"]


def test_api_keys_are_shown_once(state: Path, capsys: Capture) -> None:
    assert run(["keys", "api-key", "create", "--tenant", "acme", "--days", "7"]) == 0
    key = capsys.readouterr().out.strip()
    assert run(["keys", "api-key", "list", "--json"]) == 0
    shown = capsys.readouterr().out
    assert key not in shown
    (entry,) = json.loads(shown)
    assert key.startswith(entry["prefix"])
    assert entry["tenant"] == "acme"


def test_pii_is_found_and_masked_alike_on_every_run(capsys: Capture) -> None:
    text = "身份证11010519491231002X"
    assert run(["pii", "detect", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"type": "CN_ID", "start": 3, "end": 21, "score": pytest.approx(1, abs=0.2)}
    ]
    assert run(["pii", "mask", text]) == 0
    masked = capsys.readouterr().out
    assert "1101" not in masked
    assert masked.startswith("身份证")


# --- chat against a gateway that is played --------------------------------------------------------------

CHUNKS = (
    '{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}',
    '{"choices":[{"index":0,"delta":{"content":"Pa"}}]}',
    '{"choices":[{"index":0,"delta":{"content":"ris"},"finish_reason":"stop"}]}',
    '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":5}}}',
)


class PlayedGateway(BaseHTTPRequestHandler):
    answer: tuple[str, ...] = (*CHUNKS, "[DONE]")
    status = 200
    bodies: list[dict[str, object]]

    def do_GET(self) -> None:
        self._send(200, "application/json", b'{"data":[{"id":"demo","max_model_len":4096}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append({**json.loads(body), "key": self.headers["Authorization"]})
        if self.status != 200:
            self._send(self.status, "application/json", b'{"error":{"message":"no such thing","code":404}}')
        else:
            events = "".join(f"data: {chunk}\n\n" for chunk in self.answer).encode()
            self._send(200, "text/event-stream", events)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlayedGateway]]:
    class Handler(PlayedGateway):
        bodies: list[dict[str, object]] = []  # noqa: RUF012 - one class per test

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("SEALMESH_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("SEALMESH_API_KEY", "sk-test")
        yield Handler
        server.shutdown()
        thread.join()


def test_chat_streams_the_answer_and_shows_usage(gateway: type[PlayedGateway], capsys: Capture) -> None:
    assert run(["chat", "Capital?", "--system", "Be brief", "--temperature", "0", "-v"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Paris\n"
    assert "9 prompt tokens (5 cached), 2 answer tokens, finish stop" in shown.err
    (body,) = gateway.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Capital?"},
    ]
    assert (body["model"], body["temperature"], body["key"]) == ("demo", 0, "Bearer sk-test")
    assert "max_tokens" not in body


def test_a_conversation_carries_its_history(
    gateway: type[PlayedGateway], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Capital?", "", "Sure?"])

    def answer(_prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    assert run(["chat"]) == 0
    assert [message["content"] for message in gateway.bodies[1]["messages"]] == ["Capital?", "Paris", "Sure?"]  # type: ignore[attr-defined]


def test_a_cut_stream_is_not_taken_for_an_answer(gateway: type[PlayedGateway], capsys: Capture) -> None:
    gateway.answer = CHUNKS[:2]
    assert run(["chat", "Capital?"]) == 1
    assert "cut off" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [(400, 2), (401, 3), (403, 3), (404, 2), (429, 1), (503, 1)])
def test_refusals_have_their_exit_code(
    gateway: type[PlayedGateway], capsys: Capture, status: int, code: int
) -> None:
    gateway.status = status
    assert run(["chat", "Capital?"]) == code
    assert capsys.readouterr().err == f"error: no such thing (HTTP {status})\n"


def test_log_lines_cannot_steer_the_terminal() -> None:
    assert printable("\x1b[31mred\x1b[0m \x1b]0;title\x07done\r\x08!") == "red done  !"
