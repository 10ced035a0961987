"""Settings: precedence, refusal of what nobody reads, masking, help."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.settings import (
    ServiceSettings,
    effective,
    load_settings,
    resolve_settings,
)


class WorkerSettings(ServiceSettings):
    """A worker, for tests."""

    name: str = Field(default="worker-0", description="name of the worker")
    kv_lookup_deadline_ms: int = Field(default=50, ge=1, description="longest wait for a lookup")
    workers: list[str] = Field(default_factory=list, description="addresses")
    engine_args: dict[str, object] = Field(default_factory=dict, description="passed through")
    model_dir: Path | None = Field(default=None, description="folder of the model")
    allow_plaintext: bool = Field(
        default=False, description="serve a folder that is not sealed, 100% at own risk"
    )
    token: SecretStr = Field(default=SecretStr(""), description="a secret")
    redis_url: str = Field(default="", description="where Redis is")


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALMESH_WORKER_NAME", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(
        '[worker]\nname = "from-file"\nkv_lookup_deadline_ms = 20\nmodel_dir = "models/a"\n'
        "[worker.engine_args]\nmax_num_seqs = 4\n[gateway]\nanything = 1\n"
    )
    return path


def load(*argv: str) -> WorkerSettings:
    return load_settings(WorkerSettings, "worker", argv)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        load(*argv)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_defaults() -> None:
    assert load() == WorkerSettings()


def test_each_source_wins_over_those_below(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--config", str(config)).name == "from-file"
    monkeypatch.setenv("SEALMESH_WORKER_NAME", "from-environment")
    assert load("--config", str(config)).name == "from-environment"
    assert load("--config", str(config), "--name", "from-flag").name == "from-flag"
    assert load("--config", str(config)).kv_lookup_deadline_ms == 20


def test_origins_are_told(config: Path) -> None:
    resolved = resolve_settings(
        WorkerSettings,
        "worker",
        config=config,
        environ={"SEALMESH_WORKER_REDIS_URL": "redis://h"},
        flags={"token": "x"},
    )
    assert resolved.origins["name"] == "file"
    assert resolved.origins["redis_url"] == "environment"
    assert resolved.origins["token"] == "flag"
    assert resolved.origins["log_level"] == "default"


def test_paths_of_the_file_count_from_its_folder(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--config", str(config)).model_dir == config.parent / "models/a"
    assert load("--config", str(config), "--model-dir", "here").model_dir == Path("here")
    monkeypatch.setenv("SEALMESH_WORKER_MODEL_DIR", "")
    assert load("--config", str(config)).model_dir is None


def test_lists_tables_and_booleans_in_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("--workers", "a:1,b:2", "--workers", "c:3", "--allow-plaintext")
    assert loaded.workers == ["a:1", "b:2", "c:3"]
    assert loaded.allow_plaintext is True
    arguments = load("--engine-args", "seqs=4", "--engine-args", "quant=a,b", "--engine-args", "eager=true")
    assert arguments.engine_args == {"seqs": 4, "quant": "a,b", "eager": True}
    monkeypatch.setenv("SEALMESH_WORKER_WORKERS", "x:1, y:2")
    monkeypatch.setenv("SEALMESH_WORKER_ENGINE_ARGS", '{"a": [1, 2]}')
    monkeypatch.setenv("SEALMESH_WORKER_ALLOW_PLAINTEXT", "true")
    loaded = load()
    assert (loaded.workers, loaded.engine_args) == (["x:1", "y:2"], {"a": [1, 2]})
    assert load("--no-allow-plaintext").allow_plaintext is False


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("[worker]\nnmae = 1\n", ["unknown setting nmae in [worker]", "did you mean name?"]),
        ("[wroker]\nname = 'x'\n", ["unknown section [wroker]", "did you mean worker?"]),
        ("[worker]\nkv_lookup_deadline_ms = 'soon'\n", ["kv_lookup_deadline_ms", "integer", "mesh.toml"]),
        ("[worker]\nkv_lookup_deadline_ms = 0\n", ["kv_lookup_deadline_ms", "greater than or equal to 1"]),
        ("[worker\n", ["not valid TOML", "line 1"]),
        ("worker = 3\n", ["worker must be a section"]),
        ("[worker]\nlog_level = 'loud'\n", ["log_level", "'debug', 'info'"]),
        ("[worker]\ntls_ca = 'ca.pem'\n", ["tls_certificate and tls_key must be set too"]),
        ("[worker]\notlp_endpoint = 'localhost:4317'\n", ["otlp_endpoint"]),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, telling: list[str]
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    line = refused(capsys, "--config", str(path))
    assert line.startswith("sealmesh worker: ")
    for part in telling:
        assert part in line


def test_a_missing_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--config", str(tmp_path / "none.toml"))
    assert "none.toml" in line
    assert "No such file" in line


def test_unknown_environment_is_refused_with_a_near_match(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEALMESH_STATE", "/somewhere")
    monkeypatch.setenv("SEALMESH_GATEWAY_ANYTHING", "1")
    load()
    monkeypatch.setenv("SEALMESH_WORKER_NAM", "x")
    line = refused(capsys)
    assert "SEALMESH_WORKER_NAM;" in line
    assert "did you mean SEALMESH_WORKER_NAME" in line


@pytest.mark.parametrize(
    ("argv", "telling"),
    [
        (["--nmae=x"], "unknown flag --nmae; did you mean --name?"),
        (["--nam", "x"], "unknown flag --nam; did you mean --name?"),
        (["stray"], "unknown flag stray"),
        (["--name"], "expected one argument"),
        (["--kv-lookup-deadline-ms", "x"], "from --kv-lookup-deadline-ms"),
        (["--engine-args", "novalue"], "must have the form key=value"),
        (["--engine-args", "{broken"], "--engine-args is not valid JSON"),
    ],
)
def test_wrong_flags_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], telling: str
) -> None:
    assert telling in refused(capsys, *argv)


def test_a_secret_is_in_no_error_and_no_listing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEALMESH_WORKER_TOKEN", "hunter2")
    monkeypatch.setenv("SEALMESH_WORKER_REDIS_URL", "rediss://user:hunter2@host:6379/0")
    shown = effective(load())
    assert shown["token"] == "********"
    assert shown["redis_url"] == "rediss://user:********@host:6379/0"
    assert "hunter2" not in json.dumps(shown)
    path = tmp_path / "mesh.toml"
    path.write_text("[worker]\ntoken = ['hunter2']\n")
    monkeypatch.delenv("SEALMESH_WORKER_TOKEN")
    assert "hunter2" not in refused(capsys, "--config", str(path))


def test_effective_is_json_and_complete(config: Path) -> None:
    shown = effective(load("--config", str(config)))
    assert set(shown) == set(WorkerSettings.model_fields)
    assert json.loads(json.dumps(shown))["engine_args"] == {"max_num_seqs": 4}
    assert shown["token"] == ""


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load("--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for name, field in WorkerSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert f"SEALMESH_WORKER_{name.upper()}" in text
        assert field.description is not None
        assert field.description in text
    assert re.search(r"longest wait for a lookup\s+default: 50", text)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        WorkerSettings().name = "x"  # type: ignore[misc]


@given(st.dictionaries(st.text(string.ascii_lowercase + "_", min_size=1, max_size=30), st.text(max_size=30)))
def test_any_environment_is_read_or_refused_by_name(environ: dict[str, str]) -> None:
    variables = {f"SEALMESH_WORKER_{name.upper()}": value for name, value in environ.items()}
    known = set(environ) <= set(WorkerSettings.model_fields)
    try:
        resolve_settings(WorkerSettings, "worker", environ=variables)
    except SealmeshError as exc:
        refusal = exc
    else:
        assert known
        return
    assert (refusal.reason, "\n" in refusal.message) == ("CONFIGURATION_INVALID", False)
