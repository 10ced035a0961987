"""`sealmesh keys`: API keys of callers, and key slots of sealed models."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption
from sealmesh.deploy.cli.sealing import (
    AnySignerOption,
    KeyFileOption,
    ModelArgument,
    PassphraseFileOption,
    PassphraseOption,
    VerifyingKeyOption,
    ask_passphrase,
    key_sources,
    pinned_keys,
)

if TYPE_CHECKING:
    from sealmesh.security.keys.signing import VerifyingKey
    from sealmesh.security.keys.sources import KeySource
    from sealmesh.security.sealed.manifest import Manifest

app = typer.Typer(no_args_is_help=True, help="API keys of callers and key slots of sealed models.")
api_key = typer.Typer(no_args_is_help=True, help="API keys of callers.")
slots = typer.Typer(no_args_is_help=True, help="Key slots of a sealed model: what opens it.")
app.add_typer(api_key, name="api-key")
app.add_typer(slots, name="slots")

CREATE_EPILOG = """
Examples:\n
  sealmesh keys api-key create --tenant acme --days 90\n
"""
ADD_EPILOG = """
Examples:\n
  sealmesh keys slots add /srv/models/qwen --new-passphrase\n
  sealmesh keys slots add /srv/models/qwen --new-key-file backup.key\n
"""


@api_key.command("create", epilog=CREATE_EPILOG)
def api_key_create(
    tenant: Annotated[str, typer.Option(help="Tenant that owns the key: a-z, 0-9 and -.")] = "demo",
    role: Annotated[str, typer.Option(help="user, app, operator, system, security or audit.")] = "app",
    days: Annotated[int | None, typer.Option(min=1, help="Days until it expires. Default: never.")] = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key and print it, once: only its digest is kept. A running mesh reads it at once."""
    from sealmesh.deploy.local.state import find_state
    from sealmesh.gateway.access.keys import KeyFileError, add_api_key

    terminal = Terminal()
    state = find_state(state_dir)
    expires = None if days is None else datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    try:
        secret = add_api_key(state.access_keys, tenant, role, expires=expires)
    except KeyFileError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    if as_json:
        terminal.json({"key": secret, "tenant": tenant, "role": role, "expires": expires})
    else:
        terminal.out.print(escape(secret))


@api_key.command("list")
def api_key_list(state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """List the API keys, without their secrets."""
    from sealmesh.deploy.local.state import find_state
    from sealmesh.gateway.access.keys import KeyFileError, read_key_file

    terminal = Terminal()
    state = find_state(state_dir)
    if not state.access_keys.exists():
        raise CommandError(
            f"{state.access_keys} is not there: `sealmesh up` or `keys api-key create` makes it"
        )
    try:
        keys = read_key_file(state.access_keys).keys.values()
    except KeyFileError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    if as_json:
        fields = ("prefix", "tenant", "role", "created", "expires")
        terminal.json([{field: getattr(key, field) for field in fields} for key in keys])
        return
    table = plain_table("Key", "Tenant", "Role", "Made", "Expires")
    for key in keys:
        table.add_row(f"{key.prefix}…", key.tenant, key.role, _time(key.created), _time(key.expires))
    terminal.out.print(table)


@slots.command("list")
def slots_list(folder: ModelArgument, as_json: JsonOption = False) -> None:
    """List the key slots of a sealed model; needs no key."""
    from sealmesh.security.sealed.keyring import list_slots

    terminal = Terminal()
    found = list_slots(folder)
    if as_json:
        terminal.json(
            [
                {
                    "slot_id": slot.slot_id.hex(),
                    "kind": slot.kind_name,
                    "label": slot.label,
                    "created": datetime.fromtimestamp(slot.created_s, UTC),
                }
                for slot in found
            ]
        )
        return
    table = plain_table("Key slot", "Kind", "Label", "Made")
    for slot in found:
        made = _time(datetime.fromtimestamp(slot.created_s, UTC))
        table.add_row(slot.slot_id.hex()[:16], slot.kind_name, escape(slot.label), made)
    terminal.out.print(table)


@slots.command("add", epilog=ADD_EPILOG)
def slots_add(
    folder: ModelArgument,
    new_passphrase: Annotated[
        bool, typer.Option("--new-passphrase", help="Ask for the new passphrase.")
    ] = False,
    new_passphrase_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File (mode 0600) with the new passphrase.")
    ] = None,
    new_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Root key file that shall open the model as well.")
    ] = None,
    label: Annotated[str, typer.Option(help="Text that tells the slot from others.")] = "",
    key_file: KeyFileOption = None,
    passphrase: PassphraseOption = False,
    passphrase_file: PassphraseFileOption = None,
    verifying_key: VerifyingKeyOption = None,
    any_signer: AnySignerOption = False,
    state_dir: StateOption = None,
) -> None:
    """Let another passphrase or key file open a sealed model as well.

    The model itself is not touched: only its slot file is rewritten.
    """
    from sealmesh.deploy.local.state import find_state
    from sealmesh.security.keys.sources import KeyFileSource, PassphraseSource
    from sealmesh.security.sealed.keyring import add_slot
    from sealmesh.security.sm4.select import select_engine

    terminal = Terminal()
    state = find_state(state_dir)
    if [new_passphrase, new_passphrase_file is not None, new_key_file is not None].count(True) != 1:
        raise CommandError(
            "give one of --new-passphrase, --new-passphrase-file and --new-key-file", Exit.USAGE
        )
    manifest = _manifest(folder, None if any_signer else pinned_keys(state, verifying_key))
    with key_sources(state, key_file, passphrase, passphrase_file) as openers:
        added: KeySource
        if new_key_file is not None:
            added = KeyFileSource.from_file(new_key_file)
        elif new_passphrase_file is not None:
            added = PassphraseSource.from_file(new_passphrase_file)
        else:
            added = PassphraseSource(ask_passphrase(confirm=True))
        try:
            slot = add_slot(
                folder, manifest, openers[0], added, select_engine(), label=label or added.kind.label
            )
        finally:
            added.close()
    terminal.out.print(slot.slot_id.hex())


@slots.command("remove")
def slots_remove(
    folder: ModelArgument,
    slot: Annotated[str, typer.Argument(help="Slot id, or its first characters, as `slots list` shows it.")],
    key_file: KeyFileOption = None,
    passphrase: PassphraseOption = False,
    passphrase_file: PassphraseFileOption = None,
    verifying_key: VerifyingKeyOption = None,
    any_signer: AnySignerOption = False,
    state_dir: StateOption = None,
) -> None:
    """Remove a key slot. Who kept a copy of the old slot file can still use it: seal anew to lock out."""
    from sealmesh.deploy.local.state import find_state
    from sealmesh.security.sealed.keyring import list_slots, remove_slot
    from sealmesh.security.sm4.select import select_engine

    terminal = Terminal()
    state = find_state(state_dir)
    manifest = _manifest(folder, None if any_signer else pinned_keys(state, verifying_key))
    found = [known.slot_id for known in list_slots(folder) if known.slot_id.hex().startswith(slot.lower())]
    if not slot or len(found) != 1:
        raise CommandError(
            f"{slot!r} names {len(found)} slots of {folder}; `keys slots list` shows them", Exit.USAGE
        )
    with key_sources(state, key_file, passphrase, passphrase_file) as openers:
        remove_slot(folder, manifest, openers[0], found[0], select_engine())
    terminal.note(f"Removed slot {found[0].hex()}.")


def _manifest(folder: Path, pinned: Collection[VerifyingKey] | None) -> Manifest:
    from sealmesh.security.files import Folder
    from sealmesh.security.sealed.keyring import read_manifest_bytes
    from sealmesh.security.sealed.manifest import Manifest

    with Folder(folder) as opened:
        return Manifest.decode(read_manifest_bytes(opened), f"manifest of {folder}", pinned)


def _time(moment: datetime | None) -> str:
    return "never" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%SZ")
