"""The Makefile: help by default, an environment of one's own, and Ctrl-C that ends `make up` cleanly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def surroundings() -> dict[str, str]:
    """This process's environment without what a make around the tests has put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and name not in ("MFLAGS", "VENV", "PYTHON", "ARGS")
    }


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env=surroundings()
    )


def test_make_alone_explains_every_target() -> None:
    done = make()
    assert done.returncode == 0
    targets = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    explained = set(re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE))
    assert explained == set(targets[1].split())


@pytest.mark.parametrize("target", ["test", "test-fast", "test-full", "lint", "up"])
def test_a_given_environment_is_never_touched(target: str) -> None:
    commands = [line for line in make("-n", target, "VENV=/elsewhere").stdout.splitlines() if line.strip()]
    assert any("/elsewhere/bin/" in line for line in commands)
    assert not any("bootstrap.py" in line for line in commands if not line.startswith(":"))


def test_the_default_environment_is_bootstrapped_first() -> None:
    commands = make("-n", "test").stdout.splitlines()
    assert "bootstrap.py --dev" in commands[0]


@contextmanager
def make_up(environment: Path) -> Iterator[subprocess.Popen[str]]:
    """`make up` with a stand-in for sealmesh, in a process group of its own as a terminal would."""
    process = subprocess.Popen(
        ["make", "up", f"VENV={environment}"],
        cwd=ROOT,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def stand_in(folder: Path) -> None:
    """A sealmesh that says when it runs and takes a moment to stop, in order."""
    program = folder / "bin/sealmesh"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        "trap 'sleep 0.3; echo stopped in order, state $SEALMESH_STATE; exit 0' INT TERM\n"
        "echo running\n"
        "while :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reaches_sealmesh_and_make_waits_for_it(tmp_path: Path, sent: signal.Signals) -> None:
    stand_in(tmp_path)
    with make_up(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # as a terminal does
        else:
            process.send_signal(sent)  # as a service manager does: make passes it on
        rest = process.stdout.read()
        process.wait(timeout=10)
    assert "stopped in order" in rest
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_make_up_keeps_the_state_in_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEALMESH_STATE", raising=False)
    stand_in(tmp_path)
    with make_up(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        assert f"state {ROOT}/.sealmesh" in process.stdout.read()
