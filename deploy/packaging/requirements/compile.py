"""Compile the pinned requirement files: `make requirements` (needs uv, from the dev tools).

    python deploy/packaging/requirements/compile.py [--upgrade] [--upgrade-package NAME]...

cpu.txt   pyproject.toml's dependencies and cpu.in, less cpu-excludes.txt
dev.txt   pyproject.toml's extra "dev", less what cpu.txt holds already
demo.txt  demo.in alone
uv.txt    uv.in alone

Versions that are pinned stay unless an upgrade is asked for. Every file of a release is listed by
hash, so one file serves all platforms; no registry is named, so each machine uses its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
HEADER = "# Compiled by `make requirements` from {sources}. Do not edit.\n"

# The platforms that pyproject.toml's [tool.uv] resolves for, as marker environments.
PYTHONS = ("3.11.0", "3.11.9", "3.12.8", "3.13.5", "3.14.1")
MACHINES = ("x86_64", "aarch64")
# What uv's markers come to on those platforms, said shortly.
SHORT_MARKERS = (
    "platform_machine == 'x86_64'",
    "platform_machine == 'aarch64'",
    "python_full_version < '3.11.3'",
    "platform_machine == 'x86_64' and python_version < '3.13'",
    *(f"python_version {sign} '3.{minor}'" for minor in (12, 13, 14) for sign in ("<", ">=")),
)


def outcome(marker: str) -> tuple[bool, ...]:
    """On which of our platforms ``marker`` holds."""
    parsed = Marker(marker)
    return tuple(
        parsed.evaluate(
            {
                "implementation_name": "cpython",
                "platform_machine": machine,
                "platform_python_implementation": "CPython",
                "platform_system": "Linux",
                "python_full_version": python,
                "python_version": python.rpartition(".")[0],
                "sys_platform": "linux",
            }
        )
        for python, machine in product(PYTHONS, MACHINES)
    )


def shorten(marker: str) -> str:
    """The shortest marker that decides alike on our platforms; "" where it always holds."""
    wanted = outcome(marker)
    if all(wanted):
        return ""
    return next((short for short in SHORT_MARKERS if outcome(short) == wanted), marker)


def blocks(text: str) -> Iterable[tuple[str, str]]:
    """Each requirement of a compiled file: its canonical name, and its lines with a short marker."""
    for block in re.split(r"\n(?=[A-Za-z0-9])", "\n" + text):
        first, _, rest = block.partition("\n")
        specification = first.removesuffix("\\").strip()
        if not specification:
            continue
        requirement = Requirement(specification)
        marker = shorten(str(requirement.marker)) if requirement.marker else ""
        pinned = f"{requirement.name}{requirement.specifier}" + (f" ; {marker}" if marker else "")
        yield canonicalize_name(requirement.name), f"{pinned} \\\n{rest.rstrip()}\n"


def names(path: Path) -> set[str]:
    """The packages that a compiled file pins."""
    return {name for name, _ in blocks("".join(_without_comments(path)))}


def _without_comments(path: Path) -> Iterable[str]:
    return (line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise SystemExit("requirements: uv is not installed: run `make requirements`, which installs it")
    return found


def compile_file(target: Path, sources: Sequence[str], options: Sequence[str], skip: set[str]) -> int:
    """Resolve ``sources`` and write ``target`` without the packages in ``skip``. Returns how many it pins.

    Raises subprocess.CalledProcessError when they cannot be resolved.
    """
    with tempfile.TemporaryDirectory() as tmp:
        output = Path(tmp) / target.name
        if target.is_file():
            output.write_text("".join(_without_comments(target)))  # uv keeps the versions it finds here
        subprocess.run(
            [
                *(_uv(), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
                *("--generate-hashes", "--no-header", "--annotation-style", "line"),
                *options,
                *("--output-file", str(output), *sources),
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        kept = [text for name, text in blocks(output.read_text()) if name not in skip]
    target.write_text(HEADER.format(sources=" and ".join(sources)) + "".join(kept))
    return len(kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 written, 1 they do not resolve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest version of everything")
    parser.add_argument(
        "--upgrade-package", action="append", default=[], help="take the newest version of one"
    )
    arguments = parser.parse_args(argv)
    upgrade = ["--upgrade"] if arguments.upgrade else []
    for package in arguments.upgrade_package:
        upgrade += ["--upgrade-package", package]
    here = HERE.relative_to(ROOT).as_posix()
    cpu = HERE / "cpu.txt"
    plan = [
        (cpu, ["pyproject.toml", f"{here}/cpu.in"], ["--excludes", f"{here}/cpu-excludes.txt"]),
        (HERE / "dev.txt", ["pyproject.toml"], ["--extra", "dev", "--constraints", str(cpu)]),
        (HERE / "demo.txt", [f"{here}/demo.in"], ["--no-deps"]),
        (HERE / "uv.txt", [f"{here}/uv.in"], ["--no-deps"]),
    ]
    try:
        for target, sources, options in plan:
            skip = names(cpu) if target.name == "dev.txt" else set()
            count = compile_file(target, sources, [*options, *upgrade], skip)
            print(f"{target.relative_to(ROOT)}: {count} packages")
    except subprocess.CalledProcessError as error:
        print(f"requirements: uv exited {error.returncode}; that file is unchanged", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
