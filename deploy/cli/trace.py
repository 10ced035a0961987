"""`sealmesh trace`: the traces of recent requests, as waterfalls in the terminal."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from pathlib import Path

    from sealmesh.telemetry.trace_store import Trace, TraceStore

app = typer.Typer(no_args_is_help=True, help="Traces of recent requests.")

_FRONT = "gateway"
_MANY = 100_000

LAST_EPILOG = """
Examples:\n
  sealmesh chat Hi && sealmesh trace last\n
  sealmesh trace last --json | jq '.spans[].name'\n
"""


@app.command("last", epilog=LAST_EPILOG)
def last(state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """Draw the trace of the newest request."""
    found = _requests(_store(state_dir), 1)
    if not found:
        raise CommandError(
            "there is no trace yet: send a request first (with an OTLP endpoint set, look there)"
        )
    _show(found[0], as_json=as_json)


@app.command("list")
def list_traces(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 20,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what services do by themselves: probes, loading.")
    ] = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """List recent traces, newest first."""
    terminal = Terminal()
    store = _store(state_dir)
    traces = store.newest(count) if everything else _requests(store, count)
    rows = [
        {
            "trace_id": trace.trace_id,
            "started": datetime.fromtimestamp(trace.start_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "duration_ms": round((trace.end_ns - trace.start_ns) / 1e6, 3),
            "root": trace.spans[0].name,
            "services": sorted({span.service for span in trace.spans}),
            "spans": len(trace.spans),
            "error": any(span.status == "error" for span in trace.spans),
        }
        for trace in traces
    ]
    if as_json:
        terminal.json(rows)
        return
    table = plain_table("Trace", "Started", "ms", "Request", "Services", "Spans", "")
    for row in rows:
        services = row["services"]
        listed = ", ".join(services) if isinstance(services, list) else ""
        cells = (row["trace_id"], row["started"], row["duration_ms"], row["root"], listed, row["spans"])
        table.add_row(*map(str, cells), "[red]error[/]" if row["error"] else "")
    terminal.out.print(table)


@app.command("show")
def show(
    trace_id: Annotated[str, typer.Argument(help="Trace id or its first characters.")],
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw one trace."""
    trace = _store(state_dir).get(trace_id)
    if trace is None:
        raise CommandError(f"{trace_id!r} names no trace, or more than one; `sealmesh trace list` shows them")
    _show(trace, as_json=as_json)


def _requests(store: TraceStore, count: int) -> list[Trace]:
    """The newest traces of callers' requests: those that begin at the gateway."""
    traces = store.newest(_MANY)
    return [trace for trace in traces if trace.spans[0].service == _FRONT][:count]


def _store(state_dir: Path | None) -> TraceStore:
    from sealmesh.deploy.local.state import find_state
    from sealmesh.telemetry.trace_store import TraceStore

    return TraceStore(find_state(state_dir).traces)


def _show(trace: Trace, *, as_json: bool) -> None:
    from sealmesh.telemetry.waterfall import waterfall

    terminal = Terminal()
    if as_json:
        spans = [dataclasses.asdict(span) for span in trace.spans]
        terminal.json({"trace_id": trace.trace_id, "spans": spans})
    else:
        terminal.out.print(waterfall(trace))
