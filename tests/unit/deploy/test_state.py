"""State folder discovery, its modes, and the record of a running mesh."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from sealmesh.deploy.local.addresses import split_address, taken_addresses
from sealmesh.deploy.local.record import MeshLock, lock_is_held, read_record
from sealmesh.deploy.local.state import StateFolder, find_state, write_private


def test_the_flag_wins_then_the_variable_then_the_nearest_folder_then_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    deep = project / "a/b"
    deep.mkdir(parents=True)
    variable = {"SEALMESH_STATE": str(tmp_path / "named")}

    def found(explicit: Path | None = None, environment: dict[str, str] | None = None) -> Path:
        return find_state(explicit, environment=environment or {}, working_folder=deep).root

    assert found() == tmp_path / "home/.local/state/sealmesh"
    assert found(environment={"XDG_STATE_HOME": str(tmp_path / "xdg")}) == tmp_path / "xdg/sealmesh"
    (project / ".sealmesh").mkdir()
    assert found() == project / ".sealmesh"
    assert found(environment=variable) == tmp_path / "named"
    assert found(explicit=tmp_path / "flag", environment=variable) == tmp_path / "flag"


def test_folders_and_files_are_closed_to_others_even_when_they_were_open(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    state.root.mkdir(mode=0o755)
    state.create()
    for folder in (state.root, *state.root.iterdir()):
        assert folder.stat().st_mode & 0o077 == 0, folder
    write_private(state.api_key, b"old")
    write_private(state.api_key, b"secret")
    assert state.api_key.read_bytes() == b"secret"
    assert state.api_key.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.keys.iterdir()] == ["api-key"]


@pytest.mark.parametrize("address", ["8080", "host:", "host:0", "host:65536", "host:-1", ":80", "host:8o"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        split_address(address)


def test_addresses_are_split() -> None:
    assert split_address("127.0.0.1:8080") == ("127.0.0.1", 8080)
    assert split_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("share", [False, True])
def test_a_taken_port_is_named_with_its_purpose_even_when_its_listener_shares(share: bool) -> None:
    with socket.socket() as listener:
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = f"127.0.0.1:{other.getsockname()[1]}"
        problems = taken_addresses({"gateway HTTP": taken, "vault": free, "kvstore": free})
    assert problems == {
        "gateway HTTP": f"{taken} is in use",
        "kvstore": f"{free} is also given to vault",
    }


def test_a_lock_is_seen_from_elsewhere_and_freed(tmp_path: Path) -> None:
    path = tmp_path / "mesh.lock"
    assert not lock_is_held(path)
    lock = MeshLock(path)
    assert lock.acquire()
    assert lock_is_held(path)
    assert not MeshLock(path).acquire()
    lock.release()
    assert not lock_is_held(path)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "services": [{"x": 1}]}']
)
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mesh.json"
    assert read_record(path) is None
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        read_record(path)
