"""What `sealmesh up` makes before it starts anything: secrets once, and sealed models from plain ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sealmesh.deploy.local import first_run
from sealmesh.deploy.local.first_run import plain_folder, prepare_model, prepare_secrets
from sealmesh.deploy.local.mesh_config import MeshSettings, identities, tls_files
from sealmesh.deploy.local.state import StateFolder
from sealmesh.gateway.access.keys import read_key_file
from sealmesh.security.keys.signing import create_signing_key
from sealmesh.security.keys.sources import create_root_key
from sealmesh.telemetry.runtime.errors import SealmeshError


@dataclass
class Steps:
    """A reporter that remembers."""

    labels: list[str] = field(default_factory=list)

    @contextmanager
    def step(self, label: str) -> Iterator[Steps]:
        self.labels.append(label)
        yield self

    def update(self, detail: str = "", fraction: float | None = None) -> None:
        assert fraction is None or 0 <= fraction <= 1


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    state = StateFolder(tmp_path / "state")
    prepare_secrets(state, MeshSettings(), Steps())
    return state


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file({"weight": np.ones(1000, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_secrets_are_made_once_and_kept(state: StateFolder) -> None:
    paths = (state.root_key, state.signing_key, state.gateway_secret, state.api_key, state.tls / "ca.pem")
    before = {path: path.read_bytes() for path in paths}
    steps = Steps()
    prepare_secrets(state, MeshSettings(workers=2), steps)
    assert steps.labels == []
    assert {path: path.read_bytes() for path in paths} == before
    for role, name in identities(MeshSettings(workers=2)):
        assert all(path.exists() for path in tls_files(state, role, name)), (role, name)
    (key,) = read_key_file(state.access_keys).keys.values()
    assert state.api_key.read_text().startswith(key.prefix)


def test_a_plain_folder_is_sealed_once(state: StateFolder, plain: Path) -> None:
    steps = Steps()
    model = prepare_model(state, MeshSettings(model=plain), steps)
    assert (model.name, model.models_dir, model.root_key_file) == ("tiny", state.models, state.root_key)
    assert steps.labels == ["Sealing tiny with SM4"]
    assert prepare_model(state, MeshSettings(model=plain), steps) == model
    assert len(steps.labels) == 1


def test_a_changed_folder_is_not_served_under_the_old_seal(state: StateFolder, plain: Path) -> None:
    prepare_model(state, MeshSettings(model=plain), Steps())
    (plain / "config.json").write_text('{"changed": true}')
    with pytest.raises(SealmeshError, match="sealed from something other"):
        prepare_model(state, MeshSettings(model=plain), Steps())
    other = prepare_model(state, MeshSettings(model=plain, name="tiny-2"), Steps())
    assert other.name == "tiny-2"


def test_a_sealed_folder_is_used_in_place_under_its_sealed_name(
    state: StateFolder, plain: Path, tmp_path: Path
) -> None:
    prepare_model(state, MeshSettings(model=plain), Steps())
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(state.models / "tiny", elsewhere / "renamed")
    model = prepare_model(state, MeshSettings(model=elsewhere / "renamed"), Steps())
    assert (model.name, model.models_dir, model.root_key_file) == ("tiny", elsewhere, state.root_key)
    with pytest.raises(SealmeshError, match="was sealed as 'tiny'"):
        prepare_model(state, MeshSettings(model=elsewhere / "renamed", name="x"), Steps())


def test_a_wrong_key_or_signer_is_found_before_anything_starts(
    state: StateFolder, plain: Path, tmp_path: Path
) -> None:
    prepare_model(state, MeshSettings(model=plain), Steps())
    sealed = state.models / "tiny"
    key = tmp_path / "other.key"
    create_root_key(key)
    with pytest.raises(SealmeshError, match="--key-file or --passphrase-file") as refused:
        prepare_model(state, MeshSettings(model=sealed, key_file=key), Steps())
    assert refused.value.reason == "KEY_SLOT_MISMATCH"
    create_signing_key(tmp_path / "other.signing", tmp_path / "other.pub")
    with pytest.raises(SealmeshError, match="--verifying-key") as refused:
        prepare_model(state, MeshSettings(model=sealed, verifying_key=tmp_path / "other.pub"), Steps())
    assert refused.value.reason == "INTEGRITY_FAILURE"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_weights_or_config_is_named(state: StateFolder, plain: Path, missing: str) -> None:
    (plain / missing).unlink()
    with pytest.raises(SealmeshError, match=r"tiny is no model folder: it needs config\.json and"):
        prepare_model(state, MeshSettings(model=plain), Steps())


def test_plain_folders_are_private_and_go_also_after_a_failure() -> None:
    seen: list[Path] = []

    def fail_half_way() -> None:
        with plain_folder(1) as folder:
            seen.append(folder)
            assert folder.stat().st_mode & 0o077 == 0
            (folder / "weights").write_text("plain")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert not seen[0].exists()


def test_what_a_killed_run_left_in_the_clear_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_run, "_MEMORY_FOLDER", tmp_path)
    dead = tmp_path / "sealmesh-plain-4194999-abc"
    alive = tmp_path / "sealmesh-plain-1-abc"
    for folder in (dead, alive):
        folder.mkdir()
    first_run._remove_stale_plain_folders()
    assert not dead.exists()
    assert alive.exists()
