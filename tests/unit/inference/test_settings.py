from pathlib import Path
from typing import Any

import pytest
from sealmesh.inference.engine_args import command_line
from sealmesh.inference.sealed_options import SealedLoadOptions
from sealmesh.inference.settings import WorkerSettings
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.settings import resolve_settings

TLS = {"tls_ca": "a", "tls_certificate": "b", "tls_key": "c"}


def resolve(**flags: Any) -> WorkerSettings:
    return resolve_settings(WorkerSettings, "worker", flags={"model": "m", **flags}).settings


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "vault_address"),
        ({"model_dir": "/models/x"}, "allow_plaintext"),
        ({"vault_address": "127.0.0.1:1"}, "mTLS"),
        ({"model_dir": "/x", "allow_plaintext": True, "engine_args": {"load-format": "auto"}}, "load_format"),
        (
            {"model_dir": "/x", "allow_plaintext": True, "engine_args": {"--enable-log-requests": True}},
            "logged",
        ),
        ({"model_dir": "/x", "allow_plaintext": True, "kv_cache_gib": 0}, "kv_cache_gib"),
        ({"model_dir": "/x", "allow_plaintext": True, "device": "tpu"}, "device"),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_to_change(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SealmeshError, match=words) as refused:
        resolve(**flags)
    assert refused.value.reason == "CONFIGURATION_INVALID"


def test_a_sealed_and_a_plain_worker() -> None:
    assert resolve(vault_address="127.0.0.1:9101", **TLS).sealed
    plain = resolve(model_dir="/models/x", allow_plaintext=True, engine_args={"--seed": 1})
    assert not plain.sealed
    assert plain.engine_args == {"seed": 1}


def test_engine_arguments_become_flags() -> None:
    assert command_line(
        {
            "seed": -1,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": None,
            "hf_overrides": {"a": [1]},
            "served_model_name": ["a", "b"],
            "lora_modules": [{"name": "x", "path": "/y"}],
        }
    ) == [
        "--seed=-1",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--hf-overrides", '{"a": [1]}'),
        *("--served-model-name", "a", "b"),
        *("--lora-modules", '{"name": "x", "path": "/y"}'),
    ]


def options(**changed: Any) -> dict[str, Any]:
    names = ("vault_address", "model", "tls_ca", "tls_certificate", "tls_key", "verifying_key")
    return {**dict.fromkeys(names, "x"), **changed}


def test_loader_options_survive_the_way_through_vllm() -> None:
    parsed = SealedLoadOptions.parse(options(threads=2))
    assert SealedLoadOptions.parse(parsed.to_extra_config()) == parsed
    assert parsed.tls_files().ca == Path("x")


@pytest.mark.parametrize("changed", [{"threads": "2"}, {"threads": True}, {"key": "secret"}, {"model": None}])
def test_loader_options_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="model_loader_extra_config"):
        SealedLoadOptions.parse(options(**changed))


def test_a_missing_loader_option_is_named() -> None:
    with pytest.raises(ValueError, match="verifying_key"):
        SealedLoadOptions.parse({name: value for name, value in options().items() if name != "verifying_key"})
