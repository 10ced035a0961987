"""The set-up script: what it detects, when it is content, what it mends, and how it fails."""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from sealmesh.deploy.packaging import bootstrap

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "deploy/packaging/bootstrap.py"


def executable(path: Path, text: str) -> Path:
    """A small program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)
    return path


def package(venv: Path, name: str, complete: bool = True) -> Path:
    """An installed package of an environment, as its metadata shows it."""
    info = venv / f"lib/python3.11/site-packages/{name}.dist-info"
    info.mkdir(parents=True)
    if complete:
        (info / "RECORD").touch()
    return info


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment with one package and a stamp for the digest "d"."""
    folder = tmp_path / "env"
    executable(folder / "bin/python", "#!/bin/sh\n")
    package(folder, "grpcio-1.0")
    bootstrap.write_stamp(folder, {"run": "d"})
    return folder


# ── Device, Python, platform, disk ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("files", "device"),
    [
        ([], "cpu"),
        (["dev/nvidia0"], "cuda"),
        (["dev/davinci0"], "ascend"),
        (["dev/davinci0", "dev/nvidia0"], "ascend"),
        (["dev/nvidiactl", "dev/davinci_manager"], "cpu"),
        (["dev/dxg"], "cpu"),
    ],
)
def test_the_device_follows_from_device_files(tmp_path: Path, files: list[str], device: str) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / name).touch()
    assert bootstrap.detect_device({"PATH": ""}, tmp_path)[0] == device


def test_a_named_device_wins(tmp_path: Path) -> None:
    found = bootstrap.detect_device({"SEALMESH_DEVICE": "Ascend"}, tmp_path)
    assert found == ("ascend", "SEALMESH_DEVICE=ascend")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError, match="SEALMESH_DEVICE=tpu is not a device") as caught:
        bootstrap.detect_device({"SEALMESH_DEVICE": "tpu"}, tmp_path)
    assert "auto, cpu, cuda, ascend" in caught.value.remedy


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 14)])
def test_a_fitting_python_is_used_as_it_is(version: tuple[int, int]) -> None:
    assert bootstrap.find_python(version, {"PATH": ""}) is None


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_another_python_on_the_path_is_taken_instead(tmp_path: Path, version: tuple[int, int]) -> None:
    executable(tmp_path / "python3.12", "#!/bin/sh\n")
    assert bootstrap.find_python(version, {"PATH": str(tmp_path)}) == str(tmp_path / "python3.12")


def test_a_name_that_leads_to_no_python_is_passed_over(tmp_path: Path) -> None:
    executable(tmp_path / "python3.13", "#!/bin/sh\nexit 127\n")
    executable(tmp_path / "python3.11", "#!/bin/sh\n")
    assert bootstrap.find_python((3, 10), {"PATH": str(tmp_path)}) == str(tmp_path / "python3.11")


def test_no_fitting_python_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(bootstrap.BootstrapError, match=r"Python 3\.9 will not do.*3\.11 to 3\.14") as caught:
        bootstrap.find_python((3, 9), {"PATH": str(tmp_path)})
    assert "make up PYTHON=" in caught.value.remedy


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "riscv64")]
)
def test_an_unsupported_platform_is_refused(system: str, machine: str) -> None:
    with pytest.raises(bootstrap.BootstrapError, match=f"{system} {machine}"):
        bootstrap.check_platform(system, machine, ("glibc", "2.36"), "cpu")


@pytest.mark.parametrize("libc", [("glibc", "2.28"), ("", ""), ("musl", "1.2")])
def test_a_c_library_that_the_wheels_are_not_built_for_is_refused(libc: tuple[str, str]) -> None:
    bootstrap.check_platform("Linux", "aarch64", ("glibc", "2.31"), "cpu")
    with pytest.raises(bootstrap.BootstrapError, match=r"need glibc 2\.31 or newer"):
        bootstrap.check_platform("Linux", "x86_64", libc, "cpu")


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    bootstrap.check_disk(tmp_path, 1)
    with pytest.raises(bootstrap.BootstrapError, match="GiB free and the environment needs"):
        bootstrap.check_disk(tmp_path, free * 2)


def test_a_python_without_ensurepip_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(bootstrap.BootstrapError, match="has no module ensurepip") as caught:
        bootstrap.check_modules()
    assert f"python3.{sys.version_info[1]}-venv" in caught.value.remedy


# ── When there is nothing to do ───────────────────────────────────────────────────────────────────


def test_the_environment_of_a_complete_run_is_current(venv: Path) -> None:
    assert bootstrap.is_current(venv, "d", dev=False)


def test_other_pins_are_not_current(venv: Path) -> None:
    assert not bootstrap.is_current(venv, "e", dev=False)


def test_an_environment_without_the_tools_does_not_serve_a_run_that_needs_them(venv: Path) -> None:
    assert not bootstrap.is_current(venv, "d", dev=True)
    bootstrap.write_stamp(venv, {"run": "d", "dev": "t"})
    assert bootstrap.is_current(venv, "t", dev=True)
    assert bootstrap.is_current(venv, "d", dev=False)


def test_a_package_that_went_missing_is_noticed(venv: Path) -> None:
    shutil.rmtree(venv / "lib/python3.11/site-packages/grpcio-1.0.dist-info")
    assert not bootstrap.is_current(venv, "d", dev=False)


def test_an_unwanted_package_that_came_in_is_noticed(venv: Path) -> None:
    package(venv, "something_else-1.0")
    assert bootstrap.is_current(venv, "d", dev=False)
    package(venv, "torchvision-0.28.0")
    assert not bootstrap.is_current(venv, "d", dev=False)


def test_a_python_that_is_gone_is_noticed(venv: Path) -> None:
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to(venv / "no-such-python")
    assert not bootstrap.is_current(venv, "d", dev=False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"digests": 1, "installed": []}', "null"])
def test_a_damaged_stamp_is_no_stamp(venv: Path, text: str) -> None:
    (venv / bootstrap.STAMP).write_text(text)
    assert not bootstrap.is_current(venv, "d", dev=False)


def test_no_environment_is_not_current(tmp_path: Path) -> None:
    assert not bootstrap.is_current(tmp_path / "none", "d", dev=False)


def test_the_digest_depends_on_device_tools_and_pins() -> None:
    cpu, cuda = bootstrap.PROFILES["cpu"], bootstrap.PROFILES["cuda"]
    digests = {bootstrap.digest(profile, dev) for profile in (cpu, cuda) for dev in (False, True)}
    assert len(digests) == 4
    assert bootstrap.digest(cpu, dev=False) == bootstrap.digest(cpu, dev=False)


def test_every_file_of_every_profile_exists() -> None:
    for profile in bootstrap.PROFILES.values():
        for name in (*profile.pinned, *profile.resolved, *([profile.torch] if profile.torch else [])):
            assert (bootstrap.PINS / name).is_file()


# ── Mending ───────────────────────────────────────────────────────────────────────────────────────


def test_leftovers_of_an_interrupted_installation_are_swept(venv: Path) -> None:
    partial = package(venv, "torch-2.0", complete=False)
    backup = partial.parent / "~orch"
    backup.mkdir()
    assert bootstrap.sweep(venv) == ["torch-2.0.dist-info", "~orch"]
    assert bootstrap.installed(venv) == {"grpcio-1.0.dist-info"}
    assert bootstrap.sweep(venv) == []


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(bootstrap.BootstrapError, match="is not a virtual environment"):
        bootstrap.make_venv(tmp_path, quiet())
    assert (tmp_path / "thesis.tex").exists()


# ── pip and uv, as small programs that say what they were asked ───────────────────────────────────


def quiet() -> bootstrap.Progress:
    return bootstrap.Progress(io.StringIO(), 1)


def fake_pip(venv: Path, body: str) -> Path:
    """Replace the environment's Python by a program that notes its arguments and runs ``body``."""
    notes = venv / "asked"
    executable(venv / "bin/python", f'#!/bin/sh\necho "$@" >> {notes}\n{textwrap.dedent(body)}\n')
    return notes


def test_progress_follows_what_pip_says(venv: Path) -> None:
    fake_pip(
        venv,
        "echo Collecting torch; echo '  Downloading x-1.whl (2 MB)'; echo Installing collected packages: x",
    )
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    bootstrap.run_pip(venv, ["install", "x"], bootstrap.Progress(shown, 1), 1)
    assert "fetching 1 of 1: x (2 MB)" in shown.getvalue() or "installing" in shown.getvalue()


def test_what_pip_said_last_is_kept(venv: Path) -> None:
    fake_pip(venv, "echo 'ERROR: No matching distribution found for x==1'; exit 1")
    with pytest.raises(bootstrap.PipFailedError) as caught:
        bootstrap.run_pip(venv, ["install", "x"], quiet(), 1)
    assert caught.value.output == "ERROR: No matching distribution found for x==1"


def test_pip_is_kept_inside_the_environment() -> None:
    child = bootstrap.child_environment({"PIP_USER": "1", "PYTHONPATH": "/x", "PIP_INDEX_URL": "mirror"})
    assert "PIP_USER" not in child
    assert "PYTHONPATH" not in child
    assert child["PIP_INDEX_URL"] == "mirror", "a user's own registry settings stay"


def test_torch_comes_from_pip_where_pip_knows_it(venv: Path) -> None:
    notes = fake_pip(venv, "exit 0")
    bootstrap.install_torch(venv, "torch==2.13.0+cpu", quiet())
    assert notes.read_text().splitlines()[-1].endswith("torch==2.13.0+cpu")


def test_torch_comes_from_uv_where_pip_does_not_know_it(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(venv, "echo 'ERROR: No matching distribution found for torch==2.13.0+cpu'; exit 1")
    notes = tmp_path / "uv-asked"
    executable(tmp_path / "path/uv", f'#!/bin/sh\necho "$@" > {notes}\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    bootstrap.install_torch(venv, "torch==2.13.0+cpu", quiet())
    assert notes.read_text().split() == [
        *("pip", "install", "--python", str(venv / "bin/python"), "--no-deps"),
        *("--torch-backend=cpu", "torch==2.13.0"),
    ]


def test_uv_is_fetched_by_hash_where_there_is_none(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "uv-asked"
    body = f"""
    target=$(echo "$@" | sed -n 's/.*--target \\([^ ]*\\).*/\\1/p')
    [ -n "$target" ] || {{ echo 'ERROR: No matching distribution found for torch'; exit 1; }}
    /bin/mkdir -p $target/bin
    printf '#!/bin/sh\\necho uv "$@" > {notes}\\n' > $target/bin/uv
    /bin/chmod +x $target/bin/uv
    """
    asked = fake_pip(venv, body)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    bootstrap.install_torch(venv, "torch==2.13.0+cpu", quiet())
    assert notes.read_text().startswith("uv pip install")
    assert "--require-hashes" in asked.read_text().splitlines()[-1]


def test_torch_that_nobody_has_is_one_clear_error(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(venv, "echo 'ERROR: No matching distribution found for torch'; exit 1")
    executable(tmp_path / "path/uv", "#!/bin/sh\nexit 2\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    with pytest.raises(bootstrap.BootstrapError, match="neither by pip nor in PyTorch's own index") as caught:
        bootstrap.install_torch(venv, "torch==2.13.0+cpu", quiet())
    assert "PIP_FIND_LINKS" in caught.value.remedy


def test_packages_that_break_the_engine_are_uninstalled(venv: Path) -> None:
    package(venv, "torchvision-0.28.0")
    package(venv, "torchmetrics-1.0")
    notes = fake_pip(venv, "exit 0")
    bootstrap.remove_unwanted(venv, quiet())
    assert notes.read_text().splitlines() == ["-m pip --no-color uninstall --yes torchvision"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
            "not the one that was pinned",
        ),
        (
            "NewConnectionError: Failed to establish\nERROR: No matching distribution found for x",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for x==1", "has no x==1 for this Python"),
        ("(from versions: none)\nERROR: No matching distribution found for x==1", "or cannot be reached"),
        ("something else", "pip failed"),
    ],
)
def test_what_pip_says_is_explained(said: str, meant: str) -> None:
    assert meant in str(bootstrap.explain(said))


# ── The script as a whole ─────────────────────────────────────────────────────────────────────────


def run_script(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **(env or {})}
    )


def test_an_error_is_two_lines_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_script("--venv", str(tmp_path), "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        f"bootstrap: {tmp_path} is not a virtual environment",
        "           → move it away, or remove it",
    ]
    assert "Traceback" not in done.stderr


def test_a_broken_environment_is_made_anew_and_an_unreachable_index_is_one_clear_error(
    tmp_path: Path,
) -> None:
    executable(tmp_path / "env/bin/python", "#!/bin/sh\nexit 1\n")
    (tmp_path / "env/pyvenv.cfg").touch()
    done = run_script(
        *("--venv", str(tmp_path / "env"), "--device", "cpu"),
        # Nothing listens on port 9 (discard) of this machine.
        env={
            "PIP_INDEX_URL": "http://127.0.0.1:9/index",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_FIND_LINKS": "",
        },
    )
    assert done.returncode == 1
    assert "making it anew" in done.stdout
    assert "bootstrap: the package index cannot be reached" in done.stderr
    assert not (tmp_path / "env" / bootstrap.STAMP).exists()


def test_a_python_that_is_too_old_can_still_read_the_script_and_say_so() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
