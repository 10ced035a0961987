"""Lint the contracts and compare them with the last release (buf, offline).

    python protos/lint.py                    # buf lint, then buf breaking against protos/baseline.binpb
    python protos/lint.py --write-baseline   # at a release: make the current contracts the baseline

buf would fetch google/api/*.proto from its own registry. protoc builds the image instead, with those
files taken from the installed googleapis-common-protos, and buf only ever sees descriptors.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Run as a script, this file has its own folder first on the path.
from generate import HERE, SOURCES, include_flags, run_protoc
from google.protobuf.descriptor_pb2 import FileDescriptorSet

BASELINE = HERE / "baseline.binpb"
CONFIG = HERE / "buf.yaml"


def build_image(target: Path, *, source_info: bool) -> None:
    """Write a self-contained ``FileDescriptorSet`` of our files and all that they import.

    ``source_info`` keeps comments and line numbers, which lint needs and a baseline does not.
    Raises RuntimeError when protoc fails.
    """
    run_protoc(
        [
            *include_flags(),
            "--include_imports",
            *(["--include_source_info"] if source_info else []),
            f"--descriptor_set_out={target}",
            *sorted(str(path) for path in SOURCES.rglob("*.proto")),
        ]
    )


def write_baseline(target: Path) -> int:
    """Make the current contracts the released ones. Returns the number of our files in it."""
    build_image(target, source_info=False)
    image = FileDescriptorSet.FromString(target.read_bytes())
    return sum(file.name.startswith("sealmesh/") for file in image.file)


def buf_command() -> str:
    """The buf of this environment, else the one on the PATH. Raises RuntimeError when there is none."""
    beside = Path(sys.executable).parent / "buf"
    found = str(beside) if beside.is_file() else shutil.which("buf")
    if found is None:
        raise RuntimeError(
            "buf is not installed: run `make bootstrap-dev` (it comes from the package buf-bin)"
        )
    return found


def run_buf(arguments: list[str]) -> int:
    """Run buf on our files only and let it print. Returns its exit code; 0 is clean."""
    command = [buf_command(), *arguments, "--config", str(CONFIG), "--path", "sealmesh", "--timeout", "60s"]
    return subprocess.run(command, check=False, cwd=HERE).returncode


def check(baseline: Path) -> list[str]:
    """Lint, then compare with the baseline. Returns the names of what failed. Raises RuntimeError."""
    if not baseline.is_file():
        raise RuntimeError(f"{baseline} is missing: run `python protos/lint.py --write-baseline`")
    with tempfile.TemporaryDirectory() as tmp:
        image = Path(tmp) / "image.binpb"
        build_image(image, source_info=True)
        failed = ["lint"] if run_buf(["lint", str(image)]) else []
        if run_buf(["breaking", str(image), "--against", str(baseline.resolve())]):
            failed.append("breaking")
    return failed


def main() -> int:
    """Entry point. Exit codes: 0 clean, 1 findings or an error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write-baseline", action="store_true", help="replace protos/baseline.binpb; compare nothing"
    )
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="compare with this image")
    arguments = parser.parse_args()
    try:
        if arguments.write_baseline:
            files = write_baseline(arguments.baseline)
            print(f"{arguments.baseline.name}: {files} files, {arguments.baseline.stat().st_size} bytes")
            return 0
        failed = check(arguments.baseline)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if "breaking" in failed:
        print("keep the old field or RPC, or make a new version of the package", file=sys.stderr)
    if failed:
        print(f"buf {' and '.join(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
