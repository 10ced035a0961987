"""`SealmeshKVConnector`: vLLM's KV connector over kvstore, for CPU, CUDA and Ascend builds.

Configure vLLM with::

    KVTransferConfig(kv_connector="SealmeshKVConnector",
                     kv_connector_module_path="sealmesh.inference.kv_connector",
                     kv_role="kv_both", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={...})   # keys: inference/kv_config.py

and `prefix_caching_hash_algo="sha256_cbor"`. vLLM makes two of these: one beside the scheduler, which
plans, and one in each worker, which moves blocks. This class only translates between vLLM and the two
halves in `kv_scheduler` and `kv_worker`.
"""

import logging
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sealmesh.inference.kv_adapter import (
    check_hashing,
    engine_version,
    hash_block_tokens,
    hash_scheme,
    scheduled_requests,
)
from sealmesh.inference.kv_blocks import BlockLayout, encode_parts, sm3
from sealmesh.inference.kv_client import KVStoreClient
from sealmesh.inference.kv_config import KVConnectorConfig
from sealmesh.inference.kv_counters import Count, KVCounters
from sealmesh.inference.kv_keys import KeySpace
from sealmesh.inference.kv_plan import StepPlan
from sealmesh.inference.kv_scheduler import KVScheduler
from sealmesh.inference.kv_stats import KVPromMetrics, KVStats
from sealmesh.inference.kv_tensors import Array, BlockTensors, flatten_tensors
from sealmesh.inference.kv_trace import KVTrace
from sealmesh.inference.kv_worker import KVWorker
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.tracing import Tracing
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("sealmesh.worker.kv")


@dataclass
class KVMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types for strict use
    """One step's plan on its way from the scheduler to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


class SealmeshKVConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """See the module.

    Raises:
        ValueError: The configuration is wrong or cannot give reproducible block hashes; one line.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = KVConnectorConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        check_hashing(vllm_config.cache_config.prefix_caching_hash_algo)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError(
                "the KV connector needs kv_load_failure_policy=recompute: with vLLM's default "
                "a store that dies would fail requests"
            )
        self._scheduler: KVScheduler | None = None
        self._worker: KVWorker | None = None
        self._counters = KVCounters()
        self._num_blocks = int(kv_cache_config.num_blocks)
        if len(kv_cache_config.kv_cache_groups) != 1:
            _log.warning(
                "this model has %d KV cache groups; its blocks are not stored",
                len(kv_cache_config.kv_cache_groups),
            )
            return
        block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        keys = KeySpace(_layouts(config, vllm_config, kv_cache_config, block_tokens))
        self._telemetry = Telemetry(
            "worker",
            Tracing(
                "worker",
                otlp_endpoint=config.otlp_endpoint,
                trace_dir=Path(config.trace_dir) if config.trace_dir else None,
            ),
            Metrics("worker"),
            StructuredLogger("worker"),
        )
        client = KVStoreClient(config.client_options(), self._telemetry, on_breaker=self._on_breaker)
        trace = KVTrace(self._telemetry.tracing)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = KVScheduler(
                keys,
                client,
                trace,
                self._counters,
                block_tokens=block_tokens,
                hashes_per_block=block_tokens // hash_block_tokens(kv_cache_config, block_tokens),
                lookup_deadline_s=config.lookup_deadline_ms / 1e3,
                save=config.save,
            )
        else:
            self._worker = KVWorker(
                keys,
                _own_rank(vllm_config),
                client,
                trace,
                self._counters,
                save_queue_bytes=config.save_queue_bytes,
            )

    # --- both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """Saves are best effort: a dropped one is a later miss."""
        return False

    def shutdown(self) -> None:
        """Flushes saves for a moment and ends every thread."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None or self._scheduler is not None:
            self._telemetry.tracing.close()

    def get_kv_connector_stats(self) -> KVStats | None:
        """Counters since the last call."""
        taken = self._counters.take()
        return KVStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStats | None:
        """Statistics from what travelled between processes."""
        return KVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KVPromMetrics:
        """Prometheus counters in the engine's registry."""
        return KVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """The scheduler is complete: connect."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._scheduler is not None:
            self._scheduler.start()

    def on_new_request(self, request: "Request") -> None:
        """Takes a request up and starts its lookup."""
        if self._scheduler is not None:
            adapter = request.lora_request
            self._scheduler.track(
                request,
                transfer_params=request.kv_transfer_params,
                cache_salt=request.cache_salt or "",
                lora_digest=_lora_digest(adapter) if adapter is not None else b"",
                opaque=bool(request.mm_features) or getattr(request, "prompt_embeds", None) is not None,
            )

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded, always asynchronously; (None, False) while the lookup is under way."""
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched_tokens(request.request_id, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plans the load into the blocks that were allocated."""
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVMetadata:
        """The plan of this step."""
        if self._scheduler is None:
            return KVMetadata()
        return KVMetadata(self._scheduler.take_plan(scheduled_requests(scheduler_output)))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Learns which blocks were not loaded."""
        if self._scheduler is not None and connector_output.invalid_block_ids:
            self._scheduler.loads_failed(connector_output.invalid_block_ids)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plans to save what the last tokens filled; the engine may free the blocks at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id, block_ids)
        return False, None

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the engine's KV tensors; they stay valid as long as the engine."""
        if self._worker is not None:
            tensors = flatten_tensors(kv_caches)
            views = [(name, _as_array(tensor)) for name, tensor in tensors]
            self._worker.start(BlockTensors(views, self._num_blocks))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Runs before the forward pass: the last moment for blocks that it may overwrite."""
        if self._worker is not None and isinstance(kv_connector_metadata, KVMetadata):
            self._worker.save(kv_connector_metadata.plan.early_saves)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Starts this step's loads in the background."""
        plan = self._plan()
        if self._worker is not None and plan is not None:
            self._worker.start_loads(plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Snapshots the blocks that this step filled."""
        plan = self._plan()
        if self._worker is not None and plan is not None:
            self._worker.save(plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads ended."""
        if self._worker is None:
            return None, None
        return None, self._worker.take_finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute after all."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def _plan(self) -> StepPlan | None:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, KVMetadata) else None

    def _on_breaker(self, opened: bool) -> None:
        if opened:
            self._counters.add(Count.BREAKER_OPENED)
            _log.warning("the KV store does not answer in time; blocks are computed until it does")
        else:
            _log.info("the KV store answers")


def _layouts(
    config: KVConnectorConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", block_tokens: int
) -> list[BlockLayout]:
    """The layout of every rank; equal on the scheduler's and the workers' side."""
    parallel = vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    dtype = str(getattr(spec, "dtype", vllm_config.cache_config.cache_dtype)).removeprefix("torch.")
    engine = "/".join(
        (
            f"vllm-{engine_version()}",
            _instruction_set(vllm_config),
            type(spec).__name__,
            str(getattr(kv_cache_config, "kv_cache_layout", None) or "default"),
        )
    )
    return [
        BlockLayout(
            model_digest=config.digest,
            engine_layout=engine,
            dtype=dtype,
            compute_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            hash_scheme=hash_scheme(vllm_config.cache_config.prefix_caching_hash_algo),
            tensor_parallel_rank=tensor_rank,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_rank=pipeline_rank,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
        )
        for pipeline_rank in range(parallel.pipeline_parallel_size)
        for tensor_rank in range(parallel.tensor_parallel_size)
    ]


def _instruction_set(vllm_config: "VllmConfig") -> str:
    # The CPU kernels pack K differently for each instruction set.
    device = str(vllm_config.device_config.device_type)
    if device != "cpu":
        return device
    return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"


def _own_rank(vllm_config: "VllmConfig") -> int:
    """Position of this worker in `_layouts`: pipeline stage first, then tensor rank."""
    parallel = vllm_config.parallel_config
    world = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
    return int(parallel.rank) % int(world)


def _lora_digest(adapter: Any) -> bytes:
    return sm3(encode_parts([str(adapter.lora_name).encode(), str(adapter.lora_path).encode()]))


def _as_array(tensor: Any) -> Array:
    """A view of a CPU tensor as integers of its element size: numpy knows neither bfloat16 nor float8.

    Raises:
        ValueError: The tensor is on a device, or its elements have a size that no integer has.
    """
    if tensor.device.type != "cpu":
        raise ValueError(
            f"KV blocks on {tensor.device.type} cannot be stored by this release: "
            "start the worker without kvstore_address"
        )
    kinds: Iterable[torch.dtype] = (torch.uint8, torch.int16, torch.int32, torch.int64)
    for kind in kinds:
        if kind.itemsize == tensor.element_size():
            array: Array = tensor.view(kind).numpy()
            return array
    raise ValueError(f"KV blocks of {tensor.dtype} cannot be stored")
