"""The wheel: one import package, nothing of the repository's other folders, and it imports when installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.full
def test_the_wheel_claims_only_sealmesh(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"sealmesh"}
    assert "sealmesh/__init__.py" in names
    for part in ("gateway", "inference", "kvstore", "security", "telemetry", "deploy", "protos"):
        assert any(name.startswith(f"sealmesh/{part}/") for name in names), part
        assert f"sealmesh/{part}/py.typed" in names
    assert not any("packaging" in name or "/tests/" in name or name.endswith(".proto") for name in names)


@pytest.mark.full
def test_the_installed_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=120)
    # Ahead of this environment's own, editable sealmesh.
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import sealmesh, sealmesh.deploy.cli.main, sealmesh.protos.gateway.v1.gateway_pb2
assert sealmesh.__file__.startswith({str(tmp_path / "site")!r}), sealmesh.__file__
print(sealmesh.__version__)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.1.0"


@pytest.mark.full
def test_bootstrap_works_from_nothing_and_then_finds_nothing_to_do(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "deploy/packaging/bootstrap.py"), "--venv", str(tmp_path / "env")]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert first.returncode == 0, first.stderr
    assert "Environment ready" in first.stdout
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
