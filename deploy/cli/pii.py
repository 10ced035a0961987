"""`sealmesh pii`: the privacy filter on text of your own, with no server."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from sealmesh.deploy.local.state import StateFolder

app = typer.Typer(no_args_is_help=True, help="The privacy filter on text of your own.")

DETECT_EPILOG = """
Examples:\n
  sealmesh pii detect "身份证11010519491231002X"\n
  sealmesh pii detect - < letter.txt --json\n
"""
MASK_EPILOG = """
Examples:\n
  sealmesh pii mask "Mail ann@example.com"\n
"""

TextArgument = Annotated[str, typer.Argument(help="Text, or - for standard input.")]
_KEY_BYTES = 32


@app.command("detect", epilog=DETECT_EPILOG)
def detect_command(text: TextArgument, as_json: JsonOption = False) -> None:
    """Find personal data. Ranges count characters (code points) from 0; the end is exclusive."""
    from sealmesh.gateway.pii import detect

    terminal = Terminal()
    text = _text(text)
    spans = detect(text)
    if as_json:
        terminal.json(
            [{"type": span.type, "start": span.start, "end": span.end, "score": span.score} for span in spans]
        )
        return
    table = plain_table("Type", "From", "To", "Score", "Text")
    for span in spans:
        found = escape(text[span.start : span.end])
        table.add_row(span.type, str(span.start), str(span.end), f"{span.score:.2f}", found)
    terminal.out.print(table)


@app.command("mask", epilog=MASK_EPILOG)
def mask_command(
    text: TextArgument,
    tenant: Annotated[str, typer.Option(help="Tenant whose placeholders are used.")] = "demo",
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a text as a model would see it.

    With a state folder the placeholders are those of its tenant, else of a key made for this run.
    """
    from sealmesh.deploy.local.state import find_state
    from sealmesh.gateway.pii import mask

    terminal = Terminal()
    text = _text(text)
    masked = mask(text, _tenant_key(find_state(state_dir), tenant)).text
    if as_json:
        terminal.json({"text": masked})
    else:
        sys.stdout.write(masked + "\n")


def _text(argument: str) -> str:
    text = sys.stdin.read() if argument == "-" else argument
    if not text:
        raise CommandError("the text is empty", Exit.USAGE)
    return text


def _tenant_key(state: StateFolder, tenant: str) -> bytes:
    from sealmesh.gateway.access.tenants import SecretFileError, TenantDeriver, read_secret_file

    if not state.gateway_secret.exists():
        return secrets.token_bytes(_KEY_BYTES)
    try:
        return TenantDeriver(read_secret_file(state.gateway_secret)).pii_key(tenant, 1)
    except SecretFileError as error:
        raise CommandError(str(error), Exit.USAGE) from error
