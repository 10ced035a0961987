"""What engine the settings ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
from sealmesh.inference.settings import WorkerSettings
from sealmesh.inference.vllm_engine import EnginePlan
from sealmesh.inference.worker import prepare_engine
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.unit.inference.test_model_folder import write_weights


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "dtype": "float32"}))
    write_weights(folder / "model.safetensors", {"w": ("F32", 400)})
    return {
        "model": "m",
        "model_dir": folder,
        "allow_plaintext": True,
        "private_dir": tmp_path,
        "device": "cpu",
    }


def plan(settings: dict[str, Any], **changed: Any) -> EnginePlan:
    return prepare_engine(WorkerSettings(**{**settings, **changed}))


def test_a_plain_folder(settings: dict[str, Any]) -> None:
    made = plan(settings, engine_args={"seed": 3}, max_model_len=77, kv_cache_gib=2, log_format="json")
    assert (made.folder, made.version, made.dtype) == (settings["model_dir"], "", "float32")
    assert (made.weight_bytes, made.kv_cache_gib, made.max_model_len) == (400, 2, 77)
    assert made.arguments == {"seed": 3}
    assert made.log == "info:json"
    assert made.private.is_dir()
    assert made.private.stat().st_mode & 0o777 == 0o700
    made.release()
    assert not made.private.exists()


def test_a_dtype_that_was_asked_for_wins(settings: dict[str, Any]) -> None:
    made = plan(settings, dtype="bfloat16")
    assert (made.dtype, made.weight_bytes) == ("bfloat16", 200)


def test_the_kv_store_is_wired_to_the_connector(settings: dict[str, Any], tmp_path: Path) -> None:
    tls = {name: tmp_path / name for name in ("tls_ca", "tls_certificate", "tls_key")}
    made = plan(
        settings,
        kvstore_address="127.0.0.1:9102",
        kv_lookup_deadline_ms=30,
        kv_options={"save": False},
        trace_dir=tmp_path / "traces",
        **tls,
    )
    wired = made.arguments["kv_transfer_config"]
    assert isinstance(wired, dict)
    extra = wired["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    digest = extra.pop("model_digest")
    assert isinstance(digest, str)
    assert len(bytes.fromhex(digest)) == 32
    assert extra == {
        "kvstore_address": "127.0.0.1:9102",
        "lookup_deadline_ms": 30,
        "save": False,
        "trace_dir": str(tmp_path / "traces"),
        **{name: str(path) for name, path in tls.items()},
    }
    del wired["kv_connector_extra_config"]
    assert wired == {
        "kv_connector": "SealmeshKVConnector",
        "kv_connector_module_path": "sealmesh.inference.kv_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def test_an_unknown_option_of_the_connector_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SealmeshError, match="unknown key sav;") as refused:
        plan(settings, kvstore_address="127.0.0.1:9102", kv_options={"sav": True})
    assert refused.value.reason == "CONFIGURATION_INVALID"


def test_a_missing_folder_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SealmeshError, match=r"does not exist: set worker\.model_dir"):
        plan(settings, model_dir=tmp_path / "nowhere")
