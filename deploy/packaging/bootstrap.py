"""Set up the environment that `make` works in: `.venv` with pinned packages for this machine's device.

    python3 deploy/packaging/bootstrap.py [--dev] [--venv DIR] [--device cpu|cuda|ascend]

Standard library only. A second run finds a stamp and everything that the first one installed, and ends
at once; anything else (changed pins, an interrupted run, a package removed by hand) is mended.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OLDEST, NEWEST = (3, 11), (3, 14)
OLDEST_GLIBC = (2, 31)
MACHINES = ("x86_64", "aarch64")
ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "deploy/packaging/requirements"
STAMP = "sealmesh-stamp.json"
# Nothing that serves text needs these; CUDA builds of them beside a CPU build of torch break transformers.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
NEEDED_BYTES = 4 << 30
ENGINE_MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.entrypoints.openai.api_server")
# Settings of a user's pip that point it out of the environment.
FOREIGN_SETTINGS = (
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_REQUIRE_HASHES",
    "PYTHONPATH",
    "PYTHONHOME",
)


class BootstrapError(Exception):
    """The environment cannot be set up: one line that says what is wrong, one that says what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class Profile(NamedTuple):
    """What a device needs. File names lie in deploy/packaging/requirements."""

    device: str
    pinned: tuple[str, ...]  # complete and hashed: installed with --require-hashes --no-deps
    torch: str | None  # a file with one pin, whose build may lie outside the registry
    resolved: tuple[str, ...]  # installed with whatever they ask for
    note: str


PROFILES = {
    "cpu": Profile("cpu", ("cpu.txt", "demo.txt"), "torch-cpu.txt", (), ""),
    "cuda": Profile(
        "cuda",
        ("demo.txt",),
        None,
        ("cuda.txt",),
        "this project's tests do not run on CUDA; packages below the engine are resolved now, without hashes",
    ),
    "ascend": Profile(
        "ascend",
        ("demo.txt",),
        None,
        ("ascend.txt",),
        "this project's tests do not run on Ascend; needs CANN; packages below the engine are resolved now",
    ),
}


# ── What this machine is ──────────────────────────────────────────────────────────────────────────


def detect_device(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, str]:
    """The device profile for this machine and why. Raises BootstrapError for an unknown SEALMESH_DEVICE."""
    wanted = environ.get("SEALMESH_DEVICE", "auto").lower()
    if wanted in PROFILES:
        return wanted, f"SEALMESH_DEVICE={wanted}"
    if wanted not in ("", "auto"):
        raise BootstrapError(
            f"SEALMESH_DEVICE={wanted} is not a device", f"use one of auto, {', '.join(PROFILES)}"
        )
    for device, pattern in (
        ("ascend", "dev/davinci[0-9]*"),
        ("cuda", "dev/nvidia[0-9]*"),
        ("cuda", "dev/dxg"),
    ):
        found = next(iter(sorted(root.glob(pattern))), None)
        if found is not None and (
            found.name != "dxg" or shutil.which("nvidia-smi", path=environ.get("PATH"))
        ):
            return device, f"{found} is there"
    return "cpu", "no GPU or NPU found"


def find_python(version: tuple[int, ...], environ: Mapping[str, str]) -> str | None:
    """None when ``version`` will do, else another Python on the PATH that may. Raises BootstrapError."""
    if OLDEST <= version <= NEWEST:
        return None
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        other = shutil.which(f"python3.{minor}", path=environ.get("PATH"))
        # pyenv puts names on the PATH that lead to no Python.
        if other is not None and _succeeds([other, "-c", "import sys"]):
            return other
    raise BootstrapError(
        f"Python {_dotted(version)} will not do: sealmesh runs on {_dotted(OLDEST)} to {_dotted(NEWEST)}",
        "install one of them and name it: make up PYTHON=python3.12",
    )


def check_platform(system: str, machine: str, libc: tuple[str, str], device: str) -> None:
    """Raise BootstrapError where the engine has no packages. ``libc``: as `platform.libc_ver()` says."""
    if system != "Linux" or machine not in MACHINES:
        where = "use WSL 2" if system == "Windows" else "use a Linux machine, virtual machine or container"
        raise BootstrapError(
            f"the {device} engine has no packages for {system} {machine}, only for Linux x86_64 and aarch64",
            where,
        )
    name, release = libc
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if name != "glibc" or numbers < OLDEST_GLIBC:
        raise BootstrapError(
            f"the engine's packages need glibc {_dotted(OLDEST_GLIBC)} or newer, and this is"
            f" {' '.join(libc).strip() or 'another C library'}",
            "use Debian 11, Ubuntu 20.04, RHEL 9 or newer, or a container of one",
        )


def check_modules() -> None:
    """Raise BootstrapError when this Python cannot make an environment with pip in it."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise BootstrapError(
                f"{sys.executable} has no module {module}",
                f"Debian and Ubuntu: apt-get install python{_dotted(sys.version_info[:2])}-venv",
            )


def check_disk(folder: Path, needed: int) -> None:
    """Raise BootstrapError when ``folder``'s disk has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BootstrapError(
            f"{folder} has {free / 2**30:.1f} GiB free and the environment needs {needed / 2**30:.1f}",
            "free some space, or clone the repository to a larger disk",
        )


def _dotted(version: tuple[int, ...]) -> str:
    return f"{version[0]}.{version[1]}"


# ── What is there already ─────────────────────────────────────────────────────────────────────────


def digest(profile: Profile, dev: bool) -> str:
    """SHA-256 over everything that decides what the environment holds."""
    sources = [PINS / name for name in (*profile.pinned, *profile.resolved)]
    sources += [PINS / profile.torch] if profile.torch else []
    sources += [PINS / "dev.txt"] if dev else []
    sources += [ROOT / "pyproject.toml", *sorted(Path(__file__).resolve().parent.glob("*.py"))]
    sources += sorted((ROOT / "security/native").glob("*"))  # compiled when sealmesh is installed
    state = hashlib.sha256(f"{profile.device} {dev} {ROOT}".encode())
    for source in sources:
        if source.is_file():
            state.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return state.hexdigest()


def site_packages(venv: Path) -> Path | None:
    """The folder of the environment's packages, or None when there is none."""
    return next(iter(sorted(venv.glob("lib/python3*/site-packages"))), None)


def installed(venv: Path) -> set[str]:
    """Names of the .dist-info folders of the environment's completely installed packages."""
    packages = site_packages(venv)
    if packages is None:
        return set()
    return {info.name for info in packages.glob("*.dist-info") if (info / "RECORD").is_file()}


def is_current(venv: Path, wanted: str, dev: bool) -> bool:
    """Whether a complete run with the same pins left this, nothing is gone and nothing unwanted came."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
        # An environment with the development tools serves a run that needs none.
        known = stamp["digests"].get("dev" if dev else "run") == wanted
        expected = set(stamp["installed"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    present = installed(venv)
    return (
        known
        and os.access(venv / "bin/python", os.X_OK)
        and expected <= present
        and not any(name.startswith(tuple(f"{unwanted}-" for unwanted in UNWANTED)) for name in present)
    )


def write_stamp(venv: Path, digests: Mapping[str, str]) -> None:
    """Note that the environment is complete."""
    content = {"digests": dict(digests), "installed": sorted(installed(venv))}
    partial = venv / f"{STAMP}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(venv / STAMP)


def sweep(venv: Path) -> list[str]:
    """Remove what an interrupted pip left behind, so that pip installs it anew. Returns what was removed."""
    packages = site_packages(venv)
    if packages is None:
        return []
    leftovers = [path for path in packages.iterdir() if path.name.startswith("~")]
    leftovers += [info for info in packages.glob("*.dist-info") if not (info / "RECORD").is_file()]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return sorted(path.name for path in leftovers)


# ── Running pip, visibly ──────────────────────────────────────────────────────────────────────────


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip: the user's own registry settings, nothing that leads out of the venv."""
    child = {name: value for name, value in environ.items() if name not in FOREIGN_SETTINGS}
    return {**child, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}


class Progress:
    """Stage lines with timings; on a terminal the current line shows what goes on."""

    def __init__(self, stream: TextIO, stages: int) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._stages = stages
        self._stage = 0
        self._began = self._said = time.monotonic()

    def start(self, what: str) -> None:
        """Begin the next stage."""
        self._stage += 1
        self._began = self._said = time.monotonic()
        print(f"[{self._stage}/{self._stages}] {what}", file=self._stream, flush=True)

    def show(self, what: str) -> None:
        """What the stage is at; off a terminal only every ten seconds."""
        now = time.monotonic()
        line = f"      {what} · {now - self._began:.0f} s"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=self._stream, flush=True)
        elif now - self._said >= 10:
            self._said = now
            print(line, file=self._stream, flush=True)

    def say(self, what: str) -> None:
        """A line that stays."""
        self._clear()
        print(f"      {what}", file=self._stream, flush=True)

    def done(self, what: str = "done") -> None:
        """End the stage."""
        self._clear()
        seconds = time.monotonic() - self._began
        print(f"      {what} ({seconds:.1f} s)", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


class PipFailedError(Exception):
    """pip exited with an error; ``output`` is the end of what it said."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


def run_pip(venv: Path, arguments: Sequence[str], progress: Progress, total: int) -> None:
    """Run the environment's pip and show how far it is of ``total`` packages. Raises PipFailedError."""
    command = [str(venv / "bin/python"), "-m", "pip", "--no-color", *arguments]
    seen, current, tail = 0, "starting", [""]
    already = len(installed(venv))
    installing = False
    pip = subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with pip, selectors.DefaultSelector() as selector:
        assert pip.stdout is not None
        selector.register(pip.stdout, selectors.EVENT_READ)
        pending = b""
        while True:
            if selector.select(timeout=0.5):
                chunk = os.read(pip.stdout.fileno(), 65536)
                if not chunk:
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in (raw.decode(errors="replace").rstrip() for raw in lines):
                    tail = [*tail[-30:], line]
                    started = re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line)
                    fetched = re.match(r"\s+Downloading ([\w.]+)-.*\((.*)\)", line)
                    if started:
                        seen, current = seen + 1, started[1]
                    elif fetched:
                        current = f"{fetched[1]} ({fetched[2]})"
                    installing = installing or line.startswith("Installing collected packages")
            if installing:
                fresh = max(0, len(installed(venv)) - already)
                progress.show(f"installing {min(fresh, total)} of {total}")
            else:
                progress.show(f"fetching {min(seen, total)} of {total}: {current}")
        code = pip.wait()
    if code:
        raise PipFailedError("\n".join([*tail, pending.decode(errors="replace")]).strip())


def explain(failure: str) -> BootstrapError:
    """What pip's last words mean, and what to do."""
    if "No space left on device" in failure:
        return BootstrapError("the disk is full", "free some space and run the same command again")
    if "DO NOT MATCH THE HASHES" in failure:
        return BootstrapError(
            "a downloaded package is not the one that was pinned",
            "empty pip's cache (pip cache purge) and try again; if it stays, do not trust that package index",
        )
    if re.search(
        r"NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|Network is unreachable", failure
    ):
        return BootstrapError(
            "the package index cannot be reached",
            "check the network and pip's settings (pip config list), then run the same command again",
        )
    missing = re.search(r"No matching distribution found for (\S+)", failure)
    if missing and "from versions: none" in failure:
        return BootstrapError(
            f"the package index has no {missing[1]} at all, or cannot be reached",
            "check the network and pip's settings (pip config list), then run the same command again",
        )
    if missing:
        return BootstrapError(
            f"the package index has no {missing[1]} for this Python and machine",
            f"check pip's index (pip config list) and this Python ({platform.python_version()})",
        )
    return BootstrapError("pip failed; its last words are above", "mend that and run the same command again")


# ── The stages ────────────────────────────────────────────────────────────────────────────────────


def make_venv(venv: Path, progress: Progress) -> None:
    """Make the environment, or keep a working one. Raises BootstrapError."""
    progress.start(f"environment in {venv.name}")
    if venv.exists() and not (venv / "pyvenv.cfg").is_file() and any(venv.iterdir()):
        raise BootstrapError(f"{venv} is not a virtual environment", "move it away, or remove it")
    python = venv / "bin/python"
    usable = f"import sys, pip; sys.exit(not ({OLDEST} <= sys.version_info[:2] <= {NEWEST}))"
    if python.exists() and _succeeds([str(python), "-c", usable]):
        progress.done("kept")
        return
    if venv.exists():
        progress.say("broken or of another Python: making it anew")
        shutil.rmtree(venv)
    check_modules()
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        last = (made.stdout + made.stderr).strip().splitlines()[-1:]
        raise BootstrapError(f"python -m venv failed: {' '.join(last)}", "see the message above")
    progress.done(f"made with Python {platform.python_version()}")


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install_pinned(venv: Path, files: Sequence[str], progress: Progress) -> None:
    """Install hashed pin files as they are, without asking for anything more. Raises PipFailedError."""
    arguments = ["install", "--require-hashes", "--no-deps", "--no-compile", "--progress-bar", "off"]
    total = 0
    for name in files:
        arguments += ["-r", str(PINS / name)]
        total += len(re.findall(r"^[\w.-]+==", (PINS / name).read_text(), re.MULTILINE))
    progress.start(f"packages: {total} pinned by hash")
    run_pip(venv, arguments, progress, total)
    progress.done()


def read_pin(name: str) -> str:
    """The one requirement of a pin file."""
    lines = (line.strip() for line in (PINS / name).read_text().splitlines())
    return next(line for line in lines if line and not line.startswith("#"))


def install_torch(venv: Path, pin: str, progress: Progress) -> None:
    """Install the CPU build of torch: by pip where its settings know one, else by uv.

    Raises BootstrapError and PipFailedError.
    """
    progress.start(pin)
    try:
        run_pip(venv, ["install", "--no-deps", "--no-compile", "--progress-bar", "off", pin], progress, 1)
    except PipFailedError as failure:
        if "No matching distribution found" not in failure.output:
            raise
        progress.say("pip's index has no such build: uv takes it from PyTorch's own index")
        with tempfile.TemporaryDirectory(prefix="sealmesh-uv-") as tmp:
            uv = shutil.which("uv") or _fetch_uv(venv, Path(tmp), progress)
            plain = pin.partition("+")[0]
            command = [uv, "pip", "install", "--python", str(venv / "bin/python"), "--no-deps"]
            command += ["--torch-backend=cpu", plain]
            if subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode:
                raise BootstrapError(
                    f"{pin} was found neither by pip nor in PyTorch's own index",
                    "check the network; or download that wheel and set PIP_FIND_LINKS to its folder",
                ) from failure
    progress.done()


def _fetch_uv(venv: Path, folder: Path, progress: Progress) -> str:
    arguments = ["install", "--require-hashes", "--no-deps", "--progress-bar", "off"]
    run_pip(venv, [*arguments, "--target", str(folder), "-r", str(PINS / "uv.txt")], progress, 1)
    return str(folder / "bin/uv")


def install_resolved(venv: Path, files: Sequence[str], progress: Progress) -> None:
    """Install an accelerator's engine with whatever it asks for. Raises PipFailedError."""
    progress.start(f"engine: {', '.join(files)} and what they ask for (several GB)")
    arguments = ["install", "--progress-bar", "off"]
    for name in files:
        arguments += ["-r", str(PINS / name)]
    run_pip(venv, [*arguments, "hatchling", "editables"], progress, 200)
    progress.done()


def install_sealmesh(venv: Path, complete: bool, progress: Progress) -> None:
    """Install this checkout, editable. ``complete``: all that it needs is there. Raises PipFailedError."""
    progress.start("sealmesh itself, editable")
    offline = ["--no-deps", "--no-index"] if complete else []
    run_pip(venv, ["install", "--no-build-isolation", *offline, "--editable", str(ROOT)], progress, 1)
    progress.done()


def check_engine(venv: Path, progress: Progress) -> None:
    """Import the engine once, which leaves compiled modules for its first start. Raises BootstrapError."""
    progress.start("first import of the engine")
    environment = child_environment(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(venv / "bin/python"), "-c", f"import {', '.join(ENGINE_MODULES)}"]
    done = subprocess.run(command, cwd=venv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"\n{done.stderr.strip()[-4000:]}\n", file=sys.stderr)
        raise BootstrapError(
            "the engine is installed and cannot be imported", "see above, then: .venv/bin/sealmesh doctor"
        )
    progress.done()


def remove_unwanted(venv: Path, progress: Progress) -> None:
    """Uninstall the packages that break transformers beside a CPU build of torch. Raises PipFailedError."""
    found = [name for name in UNWANTED if any(info.startswith(f"{name}-") for info in installed(venv))]
    if found:
        progress.say(f"removing {', '.join(found)}: not needed, and they break the engine's imports")
        run_pip(venv, ["uninstall", "--yes", *found], progress, len(found))


def set_up(venv: Path, profile: Profile, dev: bool, progress: Progress) -> None:
    """Make or mend the environment. Raises BootstrapError and PipFailedError."""
    (venv / STAMP).unlink(missing_ok=True)
    make_venv(venv, progress)
    for name in sweep(venv):
        progress.say(f"removed {name}, left by an interrupted installation")
    install_pinned(venv, [*profile.pinned, *(["dev.txt"] if dev else [])], progress)
    if profile.torch:
        install_torch(venv, read_pin(profile.torch), progress)
    if profile.resolved:
        install_resolved(venv, profile.resolved, progress)
    if profile.device == "cpu":
        remove_unwanted(venv, progress)
    install_sealmesh(venv, not profile.resolved, progress)
    check_engine(venv, progress)
    digests = {"run": digest(profile, dev=False)}
    if dev:
        digests["dev"] = digest(profile, dev=True)
    write_stamp(venv, digests)


@contextlib.contextmanager
def only_one(venv: Path) -> Iterator[None]:
    """Hold the lock on ``venv``; another run waits."""
    import fcntl  # not on Windows, which check_platform has refused by now

    with (venv.parent / f"{venv.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("bootstrap: another run is at work here; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(argv: Sequence[str]) -> int:
    """The whole of it. Raises BootstrapError and PipFailedError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dev", action="store_true", help="the test and lint tools too")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: .venv)")
    parser.add_argument("--device", choices=["auto", *PROFILES], help="default: what is found")
    arguments = parser.parse_args(argv)
    environ = {**os.environ, **({"SEALMESH_DEVICE": arguments.device} if arguments.device else {})}
    other = find_python(sys.version_info[:2], environ)
    if other is not None:
        print(f"bootstrap: Python {platform.python_version()} will not do; using {other}", flush=True)
        os.execv(other, [other, __file__, *argv])
    device, why = detect_device(environ)
    profile = PROFILES[device]
    check_platform(platform.system(), platform.machine(), platform.libc_ver(), device)
    venv = Path(os.path.abspath(arguments.venv))  # noqa: PTH100  a link stays what it is
    wanted = digest(profile, arguments.dev)
    if is_current(venv, wanted, arguments.dev):
        return 0
    venv.parent.mkdir(parents=True, exist_ok=True)
    with only_one(venv):
        if is_current(venv, wanted, arguments.dev):
            return 0
        fresh = not any(info.startswith(("vllm", "torch-")) for info in installed(venv))
        check_disk(venv.parent, NEEDED_BYTES if fresh else NEEDED_BYTES // 4)
        print(f"Setting sealmesh up for device {device} ({why})", flush=True)
        if profile.note:
            print(f"Note: {profile.note}", flush=True)
        # An environment that has the development tools keeps them up to date.
        dev = arguments.dev or any(info.startswith("pytest-") for info in installed(venv))
        began = time.monotonic()
        set_up(venv, profile, dev, Progress(sys.stdout, 4 + bool(profile.torch) + bool(profile.resolved)))
        print(f"Environment ready in {time.monotonic() - began:.0f} s: {venv}", flush=True)
    return 0


def main() -> int:
    """Entry point. Exit codes: 0 ready, 1 not, 130 interrupted."""
    try:
        return run(sys.argv[1:])
    except PipFailedError as failure:
        print(f"\n{failure.output}\n", file=sys.stderr)
        error = explain(failure.output)
    except BootstrapError as problem:
        error = problem
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    print(f"bootstrap: {error}\n           → {error.remedy}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
