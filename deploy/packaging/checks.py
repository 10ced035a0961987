"""Every static check of the repository, in one run: `make lint`.

    python deploy/packaging/checks.py [--only NAME]...

All checks run even when one fails, so that one run shows everything there is to do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Check:
    """One command, run from the repository's root. ``remedy`` says how to make it pass."""

    name: str
    command: tuple[str, ...]
    remedy: str


def checks(bin_: Path) -> list[Check]:
    """The checks, quickest first; ``bin_`` is the folder with the tools."""
    python = str(bin_ / "python")
    return [
        Check("ruff-check", (str(bin_ / "ruff"), "check", "."), "ruff check --fix . mends most of it"),
        Check("ruff-format", (str(bin_ / "ruff"), "format", "--check", "."), "run: make format"),
        Check(
            "imports", (str(bin_ / "lint-imports"), "--no-logo"), "see [tool.importlinter] in pyproject.toml"
        ),
        Check("proto-drift", (python, "protos/generate.py", "--check"), "run: make protos"),
        Check(
            "proto-lint",
            (python, "protos/lint.py"),
            "rules: protos/buf.yaml; baseline: protos/lint.py --help",
        ),
        Check("types", (str(bin_ / "mypy"),), "mypy --strict, configured in pyproject.toml"),
    ]


def run(selected: Sequence[Check]) -> list[Check]:
    """Run the checks one after another and return those that failed."""
    failed: list[Check] = []
    for check in selected:
        print(f"── {check.name}", flush=True)
        began = time.monotonic()
        code = subprocess.run(check.command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode
        seconds = time.monotonic() - began
        print(f"── {check.name}: {'ok' if code == 0 else 'FAILED'} ({seconds:.1f} s)", flush=True)
        if code:
            failed.append(check)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 clean, 1 a check failed, 2 a tool is missing."""
    # Not resolved: a virtual environment's python is a link to one that lies beside no tools.
    available = checks(Path(sys.executable).parent)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=[check.name for check in available], default=[])
    only: list[str] = parser.parse_args(argv).only
    selected = [check for check in available if not only or check.name in only]
    missing = [check.command[0] for check in selected if not os.access(check.command[0], os.X_OK)]
    if missing:
        print(f"lint: {missing[0]} is missing: run `make dev`", file=sys.stderr)
        return 2
    failed = run(selected)
    for check in failed:
        print(f"lint: {check.name} failed: {check.remedy}", file=sys.stderr)
    if not failed:
        print(f"lint: {len(selected)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
