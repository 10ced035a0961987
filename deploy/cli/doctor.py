"""`sealmesh doctor`: whether this machine can run a mesh, and what to do where it cannot."""

from __future__ import annotations

import sys

import typer
from rich.markup import escape
from rich.table import Table
from sealmesh.deploy.cli.console import Terminal
from sealmesh.deploy.cli.exits import Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

EPILOG = """
Examples:\n
  sealmesh doctor\n
  sealmesh doctor --json | jq -r '.checks[] | select(.status != "ok")'\n
"""
_MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def doctor(state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """Check device, engine build, versions, SM4 engine, Redis, ports, memory and disk.

    Exit codes: 0 all is well (or only warnings), 1 something stops a mesh from running.
    """
    from sealmesh.deploy.local.doctor import run_checks
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    report = run_checks(find_state(state_dir))
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for check in report.checks:
            hint = f"\n[bold]→ {escape(check.hint)}[/]" if check.hint else ""
            table.add_row(_MARKS[check.status], check.name, f"{escape(check.detail)}{hint}")
        terminal.out.print(table)
        problems = sum(check.status == "fail" for check in report.checks)
        warnings = sum(check.status == "warn" for check in report.checks)
        terminal.out.print(f"\n{len(report.checks)} checks: {problems} problems, {warnings} warnings")
    if report.status == "fail":
        raise typer.Exit(Exit.FAILED)
