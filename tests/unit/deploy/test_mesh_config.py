"""What the services of a local mesh are told."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.deploy.local.mesh_config import (
    MeshSettings,
    Sections,
    ServedModel,
    listen_addresses,
    load_mesh_settings,
    local_sections,
    merge,
    override,
    parse_override,
    plan_mesh,
    user_sections,
)
from sealmesh.deploy.local.state import StateFolder
from sealmesh.deploy.local.toml_text import TomlValue, dump_toml
from sealmesh.telemetry.runtime.errors import SealmeshError

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)
values: st.SearchStrategy[TomlValue] = st.recursive(
    scalars,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(keys, below, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(keys, values, max_size=4))
def test_what_is_written_reads_back(document: dict[str, TomlValue]) -> None:
    assert tomllib.loads(dump_toml(document)) == document


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    state = StateFolder(tmp_path)
    state.create()
    return state


def sections_of(state: StateFolder, mesh: MeshSettings) -> Sections:
    return local_sections(state, mesh, ServedModel("demo", state.models, None, None, state.verifying_key))


def test_default_ports_order_and_commands(state: StateFolder) -> None:
    mesh = MeshSettings()
    plan = plan_mesh(state, mesh, sections_of(state, mesh))
    assert [(spec.name, spec.stage, spec.ready_url) for spec in plan.services] == [
        ("vault", 0, "http://127.0.0.1:9201/readyz"),
        ("kvstore", 1, "http://127.0.0.1:9202/readyz"),
        ("worker-0", 2, "http://127.0.0.1:9211/readyz"),
        ("gateway", 3, "http://127.0.0.1:8080/readyz"),
    ]
    assert [spec.essential for spec in plan.services] == [True, False, True, True]
    assert plan.gateway_url == "http://127.0.0.1:8080"
    for spec in plan.services:
        assert spec.command[1] == "-m"
        assert spec.command[3:5] == ("--config", str(state.mesh_config))


def test_more_workers_get_their_own_name_ports_and_certificate(state: StateFolder) -> None:
    mesh = MeshSettings(workers=3, kvstore=False, port_offset=100)
    sections = sections_of(state, mesh)
    plan = plan_mesh(state, mesh, sections)
    assert [spec.name for spec in plan.services] == ["vault", "worker-0", "worker-1", "worker-2", "gateway"]
    assert sections["gateway"]["workers"] == ["127.0.0.1:9211", "127.0.0.1:9212", "127.0.0.1:9213"]
    assert sections["worker"]["kvstore_address"] == ""
    flags = plan.services[3].command
    assert flags[flags.index("--name") + 1] == "worker-2"
    assert flags[flags.index("--grpc-address") + 1] == "127.0.0.1:9213"
    assert flags[flags.index("--tls-key") + 1].endswith("/worker-worker-2.key")
    assert len(set(listen_addresses(mesh, sections).values())) == 10


def test_an_override_wins_and_reaches_into_tables(state: StateFolder) -> None:
    sections = sections_of(state, MeshSettings())
    sections = merge(sections, {"worker": {"dtype": "float16", "engine_args": {"seed": 1, "a": 2}}})
    texts = ("worker.max_model_len=4096", "worker.engine_args.seed=7", "gateway.http_address=127.0.0.1:9")
    override(sections, map(parse_override, texts))
    assert sections["worker"]["max_model_len"] == 4096
    assert sections["worker"]["dtype"] == "float16"
    assert sections["worker"]["engine_args"] == {"seed": 7, "a": 2}
    assert sections["gateway"]["http_address"] == "127.0.0.1:9"


@pytest.mark.parametrize(
    "text", ["", "worker", "worker=1", "worker.x", ".x=1", "worker.=1", "cache.x=1", "worker.x=null"]
)
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(SealmeshError):
        parse_override(text)


def test_an_unknown_key_of_the_users_file_is_named(state: StateFolder) -> None:
    state.user_config.write_text("[mesh]\nworkerz = 2\n")
    with pytest.raises(SealmeshError, match=r"workerz.*workers"):
        load_mesh_settings(state, {})


def test_the_users_file_may_say_some_settings_of_a_service_only(state: StateFolder) -> None:
    state.user_config.write_text(
        "[worker]\nkv_cache_gib = 2\n[vault]\nlog_level = 'debug'\n"
        "[kvstore]\nmax_memory_bytes = 1073741824\n[gateway]\nmax_body_bytes = 1000000\n"
    )
    assert user_sections(state)["worker"] == {"kv_cache_gib": 2}
    assert set(user_sections(state)) == {"worker", "vault", "kvstore", "gateway"}
    state.user_config.write_text("[worker]\nkv_cache_gibs = 2\n")
    with pytest.raises(SealmeshError, match="kv_cache_gib"):
        user_sections(state)


def test_flags_win_over_the_users_file(state: StateFolder) -> None:
    state.user_config.write_text('[mesh]\nworkers = 2\nname = "x"\n')
    mesh = load_mesh_settings(state, {"workers": 3})
    assert (mesh.workers, mesh.name) == (3, "x")
