"""`make lint`: it runs every check, and fails for each of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    """The module deploy/packaging/checks.py, which is run as a script and is in no package."""
    spec = importlib.util.spec_from_file_location("checks", ROOT / "deploy/packaging/checks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["checks"] = module
    spec.loader.exec_module(module)
    return module


def test_a_failing_check_does_not_hide_the_next_one(checks: ModuleType) -> None:
    python = sys.executable
    plan = [
        checks.Check("bad", (python, "-c", "raise SystemExit(3)"), "mend it"),
        checks.Check("good", (python, "-c", "pass"), ""),
        checks.Check("worse", (python, "-c", "raise SystemExit(1)"), "mend it too"),
    ]
    assert [check.name for check in checks.run(plan)] == ["bad", "worse"]
