"""`sealmesh config`: what every service is told, and where each value comes from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from sealmesh.deploy.local.state import StateFolder

app = typer.Typer(no_args_is_help=True, help="Settings of the mesh.")

SHOW_EPILOG = """
Examples:\n
  sealmesh config show worker\n
  sealmesh config show --json | jq .gateway.http_address.value\n
"""


@app.command("show", epilog=SHOW_EPILOG)
def show(
    section: Annotated[
        str | None, typer.Argument(help="mesh, vault, kvstore, worker or gateway. Default: all.")
    ] = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the effective settings with their origin; secrets are masked.

    They are those of the last `sealmesh up`, with the environment of this shell on top.
    """
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    shown = _effective(find_state(state_dir))
    if section is not None:
        if section not in shown:
            raise CommandError(
                f"there is no section {section!r}; sections are {', '.join(shown)}", Exit.USAGE
            )
        shown = {section: shown[section]}
    if as_json:
        terminal.json(shown)
        return
    for name, fields in shown.items():
        terminal.out.print(f"[bold]{escape(f'[{name}]')}[/]")
        table = plain_table("Setting", "Value", "From")
        for field, entry in fields.items():
            table.add_row(field, escape(str(entry["value"])), str(entry["origin"]))
        terminal.out.print(table)


@app.command("path")
def path(state_dir: StateOption = None) -> None:
    """Print where the state folder is."""
    from sealmesh.deploy.local.state import find_state

    print(find_state(state_dir).root)


def _effective(state: StateFolder) -> dict[str, dict[str, dict[str, object]]]:
    from sealmesh.deploy.local.mesh_config import MeshSettings, configuration_error, settings_class
    from sealmesh.telemetry.runtime.settings import SECTIONS, effective, resolve_settings

    if not state.mesh_config.exists():
        raise configuration_error(f"{state.mesh_config} is not there yet: run `sealmesh up` once")
    shown: dict[str, dict[str, dict[str, object]]] = {}
    for section in SECTIONS:
        model = MeshSettings if section == "mesh" else settings_class(section)
        resolved = resolve_settings(model, section, config=state.mesh_config, environ=os.environ)
        values = effective(resolved.settings)
        shown[section] = {
            name: {"value": value, "origin": resolved.origins[name]} for name, value in values.items()
        }
    return shown
