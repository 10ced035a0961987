"""Buffers in /dev/shm that a killed engine leaves behind."""

import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest
from sealmesh.inference.shared_memory import note_buffers, remove_noted_buffers

SHM = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is

# As an engine process does; killed together with its resource tracker, which is why it has none.
ENGINE = """
from multiprocessing import resource_tracker, shared_memory
buffer = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(buffer._name, "shared_memory")
print(buffer.name, flush=True)
input()
"""


@pytest.fixture
def engine() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = SHM / process.stdout.readline().strip()
    assert path.exists()
    try:
        yield process, path
    finally:
        process.kill()
        process.communicate()
        path.unlink(missing_ok=True)


def test_what_a_killed_engine_left_is_removed_and_nothing_that_lives(
    engine: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, path = engine
    other = shared_memory.SharedMemory(create=True, size=4096)
    try:
        note_buffers(tmp_path)
        assert remove_noted_buffers(tmp_path) == []
        assert path.exists()
        process.kill()
        process.wait()
        assert remove_noted_buffers(tmp_path) == [path]
        assert not path.exists()
        # Not noted: it is this process's own, not one of a child.
        assert (SHM / other.name).exists()
    finally:
        other.close()
        other.unlink()


def test_a_new_buffer_of_an_old_name_stays(
    engine: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, path = engine
    note_buffers(tmp_path)
    process.kill()
    process.wait()
    # Made before the old one goes, so that it cannot get its inode.
    new = shared_memory.SharedMemory(create=True, size=4096)
    (SHM / new.name).rename(path)
    new.close()
    resource_tracker.unregister(f"/{new.name}", "shared_memory")
    assert remove_noted_buffers(tmp_path) == []
    assert path.exists()


def test_a_folder_without_a_note_has_nothing_to_remove(tmp_path: Path) -> None:
    assert remove_noted_buffers(tmp_path) == []
    (tmp_path / "shared-memory").write_bytes(b"\xff not a note\n1 ../../etc/passwd\n")
    assert remove_noted_buffers(tmp_path) == []
