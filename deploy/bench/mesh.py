"""`sealmesh bench mesh`: the whole mesh against the bare engine, with everything real and started here."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sealmesh.deploy.bench.gateway_latency import measure_gateway
from sealmesh.deploy.bench.machine import describe_machine
from sealmesh.deploy.bench.rigs import BareServer, BenchError, EngineOptions, MeshRig, running
from sealmesh.deploy.bench.throughput import measure_throughput
from sealmesh.deploy.bench.ttft import measure_ttft
from sealmesh.deploy.local.first_run import StepProgress, convert_in_child, plain_folder
from sealmesh.deploy.local.mesh_config import DEMO_MODEL_NAME
from sealmesh.deploy.local.state import StateFolder

_PLAIN_BYTES = 1 << 30


@dataclass(frozen=True)
class BenchPlan:
    """How much is measured."""

    rounds: int = 8
    """Paired rounds of 16 chats."""
    prompts: int = 8
    """Long prompts before and after the restart."""
    pairs: int = 200
    """Paired single requests."""

    @classmethod
    def quick(cls) -> BenchPlan:
        return cls(rounds=3, prompts=5, pairs=40)


@dataclass(frozen=True)
class BenchModel:
    """A plain model folder; None means the demo model."""

    folder: Path | None = None
    max_model_len: int = 4096
    kv_cache_gib: int = 1
    engine_args: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Further `section.field=value` settings of the mesh; they are part of the report."""


class _Silent:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def update(self, detail: str = "", fraction: float | None = None) -> None:
        self._tell(f"demo model: {detail}")


def bench_mesh(plan: BenchPlan, model: BenchModel, tell: Callable[[str], None]) -> dict[str, object]:
    """Runs all three benchmarks; returns what `--json` prints.

    A benchmark that cannot be measured has no figure but its reason under "failed". Raises BenchError when
    the rigs do not start, SealmeshError when the model cannot be made.
    """
    machine = describe_machine()
    with plain_folder(_PLAIN_BYTES) as parent, tempfile.TemporaryDirectory(prefix="sealmesh-bench-") as work:
        folder = model.folder
        if folder is None:
            folder = parent / DEMO_MODEL_NAME
            progress: StepProgress = _Silent(tell)
            convert_in_child(folder, progress)
        options = EngineOptions(
            folder.name,
            folder,
            model.max_model_len,
            model.kv_cache_gib,
            model.engine_args,
            model.settings,
        )
        measured, failed = asyncio.run(_measure(plan, options, Path(work), tell))
    return {
        "benchmark": "mesh",
        "machine": machine,
        "model": {"name": options.model_name, "max_model_len": model.max_model_len},
        "settings": [*model.settings, *model.engine_args],
        "results": {name: result["value"] for name, result in measured.items()},
        "failed": failed,
        "details": measured,
    }


async def _measure(
    plan: BenchPlan, options: EngineOptions, work: Path, tell: Callable[[str], None]
) -> tuple[dict[str, dict[str, object]], dict[str, str]]:
    mesh = MeshRig(StateFolder(work / "state"), options)
    bare = BareServer(options, work / "vllm.log")
    measured: dict[str, dict[str, object]] = {}
    failed: dict[str, str] = {}

    async def attempt(name: str, benchmark: Awaitable[dict[str, object]]) -> None:
        try:
            measured[name] = await benchmark
        except BenchError as error:
            failed[name] = str(error)

    tell("starting the mesh and the bare engine")
    async with running([mesh, bare]):
        await attempt(
            "throughput_over_bare_engine",
            measure_throughput(mesh.endpoint, bare.endpoint, rounds=plan.rounds, tell=tell),
        )
        await bare.stop()
        await attempt("gateway_added_p50_ms", measure_gateway(mesh, pairs=plan.pairs, tell=tell))
        await attempt("ttft_cold_over_restart_hit", measure_ttft(mesh, prompts=plan.prompts, tell=tell))
    return measured, failed
