"""`sealmesh bench mesh`: the whole mesh against the bare engine, with everything real and started here."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sealmesh.deploy.bench.gateway_latency import measure_gateway
from sealmesh.deploy.bench.machine import describe_machine
from sealmesh.deploy.bench.rigs import BareServer, EngineOptions, MeshRig, running
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


class _Silent:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def update(self, detail: str = "", fraction: float | None = None) -> None:
        self._tell(f"demo model: {detail}")


def bench_mesh(plan: BenchPlan, model: BenchModel, tell: Callable[[str], None]) -> dict[str, object]:
    """Runs all three benchmarks; returns what `--json` prints.

    Raises BenchError when a part cannot be measured: there is no partial or made-up result. SealmeshError
    when the model cannot be made.
    """
    machine = describe_machine()
    with plain_folder(_PLAIN_BYTES) as parent, tempfile.TemporaryDirectory(prefix="sealmesh-bench-") as work:
        folder = model.folder
        if folder is None:
            folder = parent / DEMO_MODEL_NAME
            progress: StepProgress = _Silent(tell)
            convert_in_child(folder, progress)
        options = EngineOptions(
            folder.name, folder, model.max_model_len, model.kv_cache_gib, model.engine_args
        )
        results = asyncio.run(_measure(plan, options, Path(work), tell))
    return {
        "benchmark": "mesh",
        "machine": machine,
        "model": {"name": options.model_name, "max_model_len": model.max_model_len},
        "results": {name: result["value"] for name, result in results.items()},
        "details": results,
    }


async def _measure(
    plan: BenchPlan, options: EngineOptions, work: Path, tell: Callable[[str], None]
) -> dict[str, dict[str, object]]:
    mesh = MeshRig(StateFolder(work / "state"), options)
    bare = BareServer(options, work / "vllm.log")
    tell("starting the mesh and the bare engine")
    async with running([mesh, bare]):
        throughput = await measure_throughput(mesh.endpoint, bare.endpoint, rounds=plan.rounds, tell=tell)
        await bare.stop()
        gateway = await measure_gateway(mesh, pairs=plan.pairs, tell=tell)
        ttft = await measure_ttft(mesh, prompts=plan.prompts, tell=tell)
    return {
        "throughput_over_bare_engine": throughput,
        "ttft_cold_over_restart_hit": ttft,
        "gateway_added_p50_ms": gateway,
    }
