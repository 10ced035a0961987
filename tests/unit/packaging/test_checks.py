"""`make lint`: it runs every check, and fails for each of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sealmesh.deploy.packaging import checks


def test_a_failing_check_does_not_hide_the_next_one() -> None:
    python = sys.executable
    plan = [
        checks.Check("bad", (python, "-c", "raise SystemExit(3)"), "mend it"),
        checks.Check("good", (python, "-c", "pass"), ""),
        checks.Check("worse", (python, "-c", "raise SystemExit(1)"), "mend it too"),
    ]
    assert [check.name for check in checks.run(plan)] == ["bad", "worse"]


def test_the_exit_code_and_the_remedy_of_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = sys.executable
    plan = [checks.Check("bad", (python, "-c", "raise SystemExit(1)"), "mend it")]
    monkeypatch.setattr(checks, "checks", lambda _bin: plan)
    assert checks.main([]) == 1
    assert "bad failed: mend it" in capfd.readouterr().err


def test_a_missing_tool_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = [checks.Check("gone", (str(tmp_path / "no-such-tool"),), "")]
    monkeypatch.setattr(checks, "checks", lambda _bin: plan)
    assert checks.main([]) == 2
    error = capfd.readouterr().err
    assert "no-such-tool is missing" in error
    assert "make dev" in error
