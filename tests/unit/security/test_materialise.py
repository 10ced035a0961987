"""Small files of a model live in memory only, privately, and go away; loading writes nothing in the clear."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sealmesh.security.sealed.materialise import DEFAULT_BASE, filesystem_of, materialise, remove_abandoned
from sealmesh.security.sealed.reader import open_sealed
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.unit.security.conftest import SAMPLE_FILES, Lab

SHM = DEFAULT_BASE
BLOBS = {path: content for path, content in SAMPLE_FILES.items() if not path.endswith(".safetensors")}

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm on this machine")


def test_the_small_files_and_nothing_else_are_there_and_private(lab: Lab, sample: Path) -> None:
    with lab.open(sample) as model, materialise(model) as folder:
        found = {str(p.relative_to(folder.path)): p for p in folder.path.rglob("*") if p.is_file()}
        assert {path: file.read_bytes() for path, file in found.items()} == BLOBS
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in found.values())
        assert filesystem_of(folder.path) == "tmpfs"
    assert not folder.path.exists()
    folder.close()


def test_code_is_written_only_when_allowed(lab: Lab) -> None:
    sealed = lab.seal(lab.plain(SAMPLE_FILES | {"modeling.py": b"print()"}), allow_code=True)
    with lab.open(sealed) as model:
        with materialise(model) as folder:
            assert not (folder.path / "modeling.py").exists()
        with materialise(model, allow_code=True) as folder:
            assert (folder.path / "modeling.py").read_bytes() == b"print()"


def test_a_folder_on_disk_is_refused(lab: Lab, sample: Path, tmp_path: Path) -> None:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary folder of this machine is in memory")
    with lab.open(sample) as model, pytest.raises(SealmeshError, match="not in memory") as caught:
        materialise(model, base=tmp_path)
    assert caught.value.reason == "CONFIGURATION_INVALID"
    with pytest.raises(SealmeshError, match="cannot tell the file system"):
        filesystem_of(tmp_path / "none")


def test_a_changed_file_leaves_no_folder(lab: Lab, tampered: Path) -> None:
    path = tampered / "config.json.sealed"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = set(SHM.iterdir())
    with lab.open(tampered) as model, pytest.raises(SealmeshError, match=r"config\.json"):
        materialise(model)
    assert not {path for path in set(SHM.iterdir()) - before if path.name.startswith("sealmesh-model-")}


CHILD = """
import sys
from pathlib import Path
from sealmesh.security.keys.signing import load_verifying_key
from sealmesh.security.keys.sources import KeyFileSource
from sealmesh.security.sealed.materialise import materialise
from sealmesh.security.sealed.reader import open_sealed
model = open_sealed(Path(sys.argv[1]), pinned=[load_verifying_key(Path(sys.argv[2]))])
model.unlock(KeyFileSource.from_file(Path(sys.argv[3])))
folder = materialise(model)
print(folder.path, flush=True)
sys.stdin.readline()
"""


def start_child(lab: Lab, sample: Path) -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(sample), str(lab.verifying_key_file), str(lab.root_key_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_the_end_of_the_process_removes_the_folder(lab: Lab, sample: Path) -> None:
    child, path = start_child(lab, sample)
    assert path.is_dir()
    child.communicate("\n", timeout=30)
    assert child.returncode == 0
    assert not path.exists()


def test_a_killed_process_leaves_a_folder_that_the_next_one_removes(lab: Lab, sample: Path) -> None:
    child, path = start_child(lab, sample)
    assert path not in remove_abandoned(SHM), "the folder of a living process was taken away"
    assert (path / "config.json").exists()
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    assert path.is_dir()
    told: list[Path] = []
    with lab.open(sample) as model, materialise(model, on_abandoned=told.append):
        assert not path.exists()
    assert path in told


AUDITED_LOAD = """
import os, sys
from pathlib import Path
written = []
def hook(event, args):
    if event == "open" and args[0] is not None:
        flags = args[2] if isinstance(args[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(os.fsdecode(args[0]) if not isinstance(args[0], int) else str(args[0]))
from sealmesh.security.keys.signing import load_verifying_key
from sealmesh.security.keys.sources import KeyFileSource
from sealmesh.security.sealed.materialise import materialise
from sealmesh.security.sealed.reader import open_sealed
sys.dont_write_bytecode = True
sys.addaudithook(hook)
with open_sealed(Path(sys.argv[1]), pinned=[load_verifying_key(Path(sys.argv[2]))]) as model:
    model.unlock(KeyFileSource.from_file(Path(sys.argv[3])))
    seen = 0
    def allocate(info):
        made = bytearray(info.size_bytes)
        return made, made
    for info, content in model.stream_tensors(allocate, threads=2):
        seen += len(content)
    with materialise(model) as folder:
        written = [path for path in written if not path.startswith(str(folder.path))]
print(seen, written)
"""


def test_loading_opens_no_file_for_writing_but_in_memory(lab: Lab, sample: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sample.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", AUDITED_LOAD, sample, lab.verifying_key_file, lab.root_key_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seen, _, written = done.stdout.strip().partition(" ")
    assert int(seen) > 20_000
    assert written == "[]"
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in sample.rglob("*")} == before


def test_looking_at_a_model_does_not_unlock_it(lab: Lab, sample: Path) -> None:
    with (
        open_sealed(sample, pinned=[lab.verifying_key]) as model,
        pytest.raises(RuntimeError, match="unlocked"),
    ):
        materialise(model)
