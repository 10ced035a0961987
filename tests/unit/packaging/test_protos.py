"""The contract checks: they pass here, and they find what they are there to find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOS = Path(__file__).resolve().parents[3] / "protos"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A script of the protos folder, or of a copy of it."""
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the contracts that may be changed, with its own baseline."""
    folder = tmp_path / "protos"
    shutil.copytree(PROTOS, folder)
    assert run(folder, "lint.py", "--write-baseline").returncode == 0
    assert run(folder, "lint.py").returncode == 0
    return folder


def change(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / "sealmesh" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_lint_finds_a_badly_named_field(copy: Path) -> None:
    change(copy, "common/v1/types.proto", "syntax =", "// x\nsyntax =")
    with (copy / "sealmesh/common/v1/types.proto").open("a") as file:
        file.write("\n// A message.\nmessage Extra {\n  // A field.\n  string badName = 1;\n}\n")
    done = run(copy, "lint.py")
    assert done.returncode == 1
    assert 'Field name "badName" should be lower_snake_case' in done.stdout + done.stderr
    assert "buf lint failed" in done.stderr, "an addition breaks nobody"


def test_lint_finds_a_field_without_a_comment(copy: Path) -> None:
    with (copy / "sealmesh/common/v1/types.proto").open("a") as file:
        file.write("\n// A message.\nmessage Extra {\n  string name = 1;\n}\n")
    done = run(copy, "lint.py")
    assert done.returncode == 1
    assert "should have a non-empty comment" in done.stdout + done.stderr


def test_breaking_finds_a_changed_type(copy: Path) -> None:
    change(copy, "gateway/v1/gateway.proto", "optional uint32 max_tokens", "optional string max_tokens")
    done = run(copy, "lint.py")
    assert done.returncode == 1
    assert 'changed type from "uint32" to "string"' in done.stdout + done.stderr
    assert "buf breaking failed" in done.stderr


def test_breaking_finds_a_removed_rpc(copy: Path) -> None:
    path = copy / "sealmesh/gateway/v1/gateway.proto"
    lines = path.read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if "rpc GetModel(" in line)
    del lines[first : first + 3]
    path.write_text("".join(lines))
    done = run(copy, "lint.py")
    assert done.returncode == 1
    assert '"GetModel"' in done.stdout + done.stderr


def test_a_file_that_does_not_parse_is_one_clear_error(copy: Path) -> None:
    change(copy, "common/v1/types.proto", "message ", "massage ")
    done = run(copy, "lint.py")
    assert done.returncode == 1
    assert "types.proto" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_baseline_says_how_to_make_one(copy: Path) -> None:
    (copy / "baseline.binpb").unlink()
    done = run(copy, "lint.py")
    assert done.returncode == 1
    assert "--write-baseline" in done.stderr


def test_the_baseline_is_small_self_contained_and_without_source_text() -> None:
    data = (PROTOS / "baseline.binpb").read_bytes()
    assert len(data) < 200_000
    image = FileDescriptorSet.FromString(data)
    names = {file.name for file in image.file}
    assert {dependency for file in image.file for dependency in file.dependency} <= names
    assert not any(file.HasField("source_code_info") for file in image.file)
    ours = {str(path.relative_to(PROTOS)) for path in (PROTOS / "sealmesh").rglob("*.proto")}
    assert {name for name in names if name.startswith("sealmesh/")} <= ours


def test_generated_code_that_is_stale_is_noticed(copy: Path) -> None:
    assert run(copy, "generate.py", "--check").returncode == 0
    change(copy, "gateway/v1/gateway.proto", "string prompt = 2", "string prompt_text = 2")
    done = run(copy, "generate.py", "--check")
    assert done.returncode == 1
    assert "stale" in done.stderr
    assert run(copy, "generate.py").returncode == 0
    assert run(copy, "generate.py", "--check").returncode == 0
