"""`sealmesh bench`: figures of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from sealmesh.deploy.cli.console import Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption

app = typer.Typer(no_args_is_help=True, help="Measure this machine.")

MESH_EPILOG = """
Examples:\n
  sealmesh bench mesh --quick\n
  sealmesh bench mesh --json > mesh.json\n
"""


@app.callback()
def _group() -> None:
    """Measure this machine."""


@app.command("mesh", epilog=MESH_EPILOG)
def mesh(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: rough figures.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Plain model folder. Default: the demo model.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=2560, help="Longest context in tokens.")] = 4096,
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="KV cache of each engine in GiB.")] = 1,
    engine_arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="vLLM option for both sides (repeatable).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.FIELD=VALUE", help="Setting of the mesh (repeatable); reported with it."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a whole mesh with vLLM's own server, both started here.

    throughput_over_bare_engine: tokens/s of 16 chats, mesh over bare engine, paired rounds.
    ttft_cold_over_restart_hit: time to first token of 1,900 tokens, new over
    known before a restart of the mesh.
    gateway_added_p50_ms: median of what the gateway adds to a request.

    Exit codes: 0 measured, 1 a part could not be measured: it has no figure, only the reason.
    """
    from sealmesh.deploy.bench.mesh import BenchModel, BenchPlan, bench_mesh
    from sealmesh.deploy.bench.rigs import BenchError

    terminal = Terminal()
    chosen = BenchModel(
        None if model is None else model.resolve(),
        max_model_len,
        kv_cache_gib,
        tuple(engine_arg or ()),
        tuple(settings or ()),
    )
    with terminal.progress(), terminal.step("Measuring") as step:
        try:
            report = bench_mesh(BenchPlan.quick() if quick else BenchPlan(), chosen, step.update)
        except BenchError as error:
            raise CommandError(f"not measured: {error}") from error
    details, failed = report["details"], report["failed"]
    if as_json:
        terminal.json(report)
    elif isinstance(details, dict):
        table = plain_table("Figure", "Value", "95 % interval", "What")
        for name, entry in details.items():
            low, high = entry["confidence_95"]
            table.add_row(name, str(entry["value"]), f"{low} to {high}", str(entry["unit"]))
        terminal.out.print(table)
    if isinstance(failed, dict) and failed:
        for name, reason in failed.items():
            terminal.error(f"{name} was not measured: {reason}")
        raise typer.Exit(Exit.FAILED)
