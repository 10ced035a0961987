"""`sealmesh seal`, `inspect`, `verify` and `unseal`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from sealmesh.deploy.cli.console import Step, Terminal, human_bytes, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from sealmesh.deploy.local.state import StateFolder
    from sealmesh.security.keys.signing import VerifyingKey
    from sealmesh.security.keys.sources import KeySource

SEAL_EPILOG = """
Examples:\n
  sealmesh seal ~/models/qwen --out /srv/models/qwen\n
  sealmesh seal DIR --out OUT --passphrase --key-file root.key   (two slots)\n
"""
INSPECT_EPILOG = """
Examples:\n
  sealmesh inspect /srv/models/qwen\n
  sealmesh inspect /srv/models/qwen --json | jq .slots\n
"""
VERIFY_EPILOG = """
Examples:\n
  sealmesh verify /srv/models/qwen            signature and ciphertext, no key\n
  sealmesh verify /srv/models/qwen --tags     every chunk, with the root key\n
"""
UNSEAL_EPILOG = """
Examples:\n
  sealmesh unseal /srv/models/qwen --out /secure/qwen --yes\n
"""

KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Root key file. Default: the state folder's, unless a passphrase is given."
    ),
]
PassphraseOption = Annotated[bool, typer.Option("--passphrase", help="Ask for a passphrase.")]
PassphraseFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File (mode 0600) whose first line is the passphrase.")
]
VerifyingKeyOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Public key that must have signed the model. Default: the state folder's."
    ),
]
AnySignerOption = Annotated[
    bool, typer.Option("--any-signer", help="Accept a model whoever has signed it; the key is shown.")
]
ModelArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Sealed model folder.")]


def seal(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Plain model folder; it is only read.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Sealed folder to make.")],
    name: Annotated[
        str | None, typer.Option(help="Served name. Default: the name of the sealed folder.")
    ] = None,
    version: Annotated[int, typer.Option(min=1, help="Version number; raise it when you seal anew.")] = 1,
    key_file: KeyFileOption = None,
    passphrase: PassphraseOption = False,
    passphrase_file: PassphraseFileOption = None,
    signing_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key that signs. Default: the state folder's.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Seal *.py files of the model too.")
    ] = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Encrypt a model folder with SM4 and sign it.

    Exit codes: 0 sealed, 1 failed, 2 wrong usage, 3 refused.
    """
    from sealmesh.deploy.local.first_run import prepare_sealing_keys
    from sealmesh.deploy.local.state import find_state
    from sealmesh.security.keys.signing import load_signer
    from sealmesh.security.sealed.writer import seal_folder

    terminal = Terminal()
    state = find_state(state_dir)
    own_root = key_file is None and not passphrase and passphrase_file is None
    if own_root or signing_key is None:
        new = not state.root_key.exists() or not state.signing_key.exists()
        state.create()
        prepare_sealing_keys(state)
        if new:
            terminal.note(f"New keys in {state.keys}: without them the model cannot be opened; keep a copy.")
    with (
        key_sources(state, key_file, passphrase, passphrase_file, confirm=True) as sources,
        terminal.progress(),
        terminal.step(f"Sealing {folder}") as step,
    ):
        report = seal_folder(
            folder,
            out,
            slots=sources,
            signer=load_signer(signing_key or state.signing_key),
            name=name or out.resolve().name,
            version=version,
            overwrite=overwrite,
            allow_code=allow_code,
            progress=_bar(step),
        )
    for skipped in report.skipped:
        terminal.warn(f"left out: {skipped.path} ({skipped.reason})")
    if as_json:
        terminal.json(plain(report))
        return
    terminal.out.print(
        f"{escape(str(report.folder))}: {escape(report.name)} version {report.version}, "
        f"{report.file_count} files, {report.tensor_count} tensors, {human_bytes(report.ciphertext_bytes)}\n"
        f"manifest SM3 {report.manifest_digest.hex()}\nsigned by key {report.signer_key_id}"
    )


def inspect(
    folder: ModelArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a sealed model says about itself; needs no key.

    Exit codes: 0 shown, 1 not a sealed model, 3 its signature or index does not hold.
    """
    from sealmesh.deploy.local.state import find_state
    from sealmesh.security.sealed.describe import describe

    terminal = Terminal()
    model = describe(folder)
    known = _is_known_signer(find_state(state_dir), model.signer_key_id)
    if as_json:
        document = plain(model)
        document["signer_known"] = known
        if not tensors:
            document.pop("tensors")
        terminal.json(document)
        return
    out = terminal.out
    out.print(f"[bold]{escape(model.name)}[/] version {model.version}, sealed {_time(model.created_s)}")
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in model.dtypes.items())
    out.print(f"{model.parameter_count:,} parameters ({dtypes}), {human_bytes(model.sealed_bytes)}")
    out.print(f"model id {model.model_id}\nmanifest SM3 {model.manifest_digest}")
    whose = "the key of this state folder" if known else "a key that this state folder does not know"
    out.print(f"signed ({model.signature_suite}) by {model.signer_key_id}, {whose}\n")
    table = plain_table("File", "Kind", "Size", "Tensors", "Chunks")
    for file in model.files:
        cells = (
            file.path,
            file.kind,
            human_bytes(file.plaintext_bytes),
            file.tensor_count or "",
            file.chunk_count,
        )
        table.add_row(*(escape(str(cell)) for cell in cells))
    out.print(table)
    slots = plain_table("Key slot", "Kind", "Label", "Made")
    for slot in model.slots:
        slots.add_row(slot.slot_id[:16], slot.kind, escape(slot.label), _time(slot.created_s))
    out.print(slots)
    if tensors:
        listing = plain_table("Tensor", "Type", "Shape", "File")
        for tensor in model.tensors:
            listing.add_row(
                escape(tensor.name), tensor.dtype, escape(str(list(tensor.shape))), escape(tensor.file)
            )
        out.print(listing)


def verify(
    folder: ModelArgument,
    tags: Annotated[
        bool, typer.Option("--tags", help="Decrypt and check every chunk; needs the key.")
    ] = False,
    key_file: KeyFileOption = None,
    passphrase: PassphraseOption = False,
    passphrase_file: PassphraseFileOption = None,
    verifying_key: VerifyingKeyOption = None,
    any_signer: AnySignerOption = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check signature, sizes, indexes and the digest of every file.

    Exit codes: 0 everything holds, 1 failed, 3 something was changed or the key does not open it.
    """
    from sealmesh.deploy.local.state import find_state
    from sealmesh.security.sealed.verify import verify_folder

    terminal = Terminal()
    state = find_state(state_dir)
    pinned = None if any_signer else pinned_keys(state, verifying_key)
    with_key = tags or key_file is not None or passphrase or passphrase_file is not None
    with (
        key_sources(state, key_file, passphrase, passphrase_file, wanted=with_key) as sources,
        terminal.progress(),
    ):
        step = terminal.start_step(f"Verifying {folder}")
        try:
            report = verify_folder(
                folder, pinned=pinned, source=sources[0] if sources else None, progress=_bar(step)
            )
        finally:
            step.remove()
    if as_json:
        terminal.json({**plain(report), "ok": report.ok})
    else:
        checked = "signature, sizes, indexes, digests" + (" and every chunk" if report.tags_checked else "")
        if report.ok:
            terminal.out.print(f"{escape(report.name)} version {report.version} holds: {checked}")
        if not report.signer_pinned:
            terminal.warn(f"signed by {report.signer_key_id}, which was not compared with a known key")
        for problem in report.problems:
            terminal.error(problem)
    if not report.ok:
        raise typer.Exit(Exit.REFUSED)


def unseal(
    folder: ModelArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the model in the clear.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    key_file: KeyFileOption = None,
    passphrase: PassphraseOption = False,
    passphrase_file: PassphraseFileOption = None,
    verifying_key: VerifyingKeyOption = None,
    any_signer: AnySignerOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")] = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a sealed model back in the clear (serving never needs this).

    Exit codes: 0 written, 1 failed or not confirmed, 2 wrong usage, 3 refused (integrity, key).
    """
    from sealmesh.deploy.local.state import find_state
    from sealmesh.security.sealed.reader import open_sealed
    from sealmesh.security.sealed.unseal import unseal_folder

    terminal = Terminal()
    state = find_state(state_dir)
    terminal.warn(f"the weights will lie in the clear in {out}; anyone who can read that folder has them")
    if not yes and not typer.confirm("Go on?", err=True):
        raise CommandError("nothing was written")
    pinned = None if any_signer else pinned_keys(state, verifying_key)
    with (
        key_sources(state, key_file, passphrase, passphrase_file) as sources,
        open_sealed(folder, pinned=pinned) as model,
    ):
        model.unlock(sources[0])
        with terminal.progress(), terminal.step(f"Unsealing {folder}") as step:
            report = unseal_folder(model, out, overwrite=overwrite, progress=_bar(step))
    if as_json:
        terminal.json(plain(report))
    else:
        size = human_bytes(report.plaintext_bytes)
        terminal.out.print(f"{escape(str(report.folder))}: {report.file_count} files, {size} in the clear")


@contextmanager
def key_sources(
    state: StateFolder,
    key_file: Path | None,
    passphrase: bool,
    passphrase_file: Path | None,
    *,
    confirm: bool = False,
    wanted: bool = True,
) -> Iterator[list[KeySource]]:
    """The roots that the options name, wiped at the end; by default the state folder's root key."""
    from sealmesh.security.keys.sources import KeyFileSource, PassphraseSource

    sources: list[KeySource] = []
    try:
        if passphrase:
            sources.append(PassphraseSource(ask_passphrase(confirm=confirm)))
        if passphrase_file is not None:
            sources.append(PassphraseSource.from_file(passphrase_file))
        if key_file is not None or (wanted and not sources):
            sources.append(KeyFileSource.from_file(key_file or state.root_key))
        yield sources
    finally:
        for source in sources:
            source.close()


def ask_passphrase(*, confirm: bool) -> str:
    """Asks on the terminal without echo; a new one twice."""
    text: str = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    return text


def pinned_keys(state: StateFolder, verifying_key: Path | None) -> Collection[VerifyingKey]:
    from sealmesh.security.keys.signing import load_verifying_key

    path = verifying_key or state.verifying_key
    if verifying_key is None and not path.exists():
        raise CommandError(
            f"no verifying key: {path} is not there; name one with --verifying-key, or --any-signer",
            Exit.USAGE,
        )
    return [load_verifying_key(path)]


def _is_known_signer(state: StateFolder, key_id: str) -> bool:
    from sealmesh.security.keys.signing import load_verifying_key

    return state.verifying_key.exists() and load_verifying_key(state.verifying_key).key_id == key_id


def _bar(step: Step) -> Callable[[int, int], None]:
    """Turns (done, total) bytes into a bar."""

    def progress(done: int, total: int) -> None:
        step.update(f"{human_bytes(done)} of {human_bytes(total)}", done / total if total else 1.0)

    return progress


def plain(value: object) -> dict[str, object]:
    """A dataclass as JSON values: bytes as hex, paths as text."""
    converted = _plain(value)
    if not isinstance(converted, dict):
        raise TypeError(f"{type(value).__name__} is not a dataclass")
    return converted


def _plain(value: object) -> object:
    match value:
        case bytes():
            return value.hex()
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
