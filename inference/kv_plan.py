"""What the scheduler's side of the connector tells the worker's side, each step. Plain picklable data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Namespace of requests that came without a tenant.
LOCAL_NAMESPACE = "local/1"
_HANDLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Handles of the gateway are hex; these are ours.
_RESERVED = ("local", "probe")
_MAX_EPOCH = 1 << 63
_MAX_TRACEPARENT = 128


@dataclass(frozen=True)
class RequestScope:
    """Whose blocks a request may use, and under which trace they move."""

    namespace: str
    cache_salt: str
    lora_digest: bytes
    traceparent: str


@dataclass(frozen=True)
class BlockRef:
    """A block of the engine and the chained hash of the tokens in and before it."""

    block_id: int
    block_hash: bytes


@dataclass
class LoadPlan:
    """Blocks to fetch before a request can run, in chain order."""

    request_id: str
    scope: RequestScope
    blocks: list[BlockRef]


@dataclass
class SavePlan:
    """Blocks to store, in chain order; `parent` is the hash of the block before the first."""

    scope: RequestScope
    parent: bytes
    blocks: list[BlockRef]


@dataclass
class StepPlan:
    """Work of one engine step. `early_saves` hold blocks that this step may overwrite."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    early_saves: list[SavePlan] = field(default_factory=list)


def parse_tenant(params: Mapping[str, object] | None) -> tuple[str, str] | None:
    """(namespace, traceparent) of a request's `kv_transfer_params`.

    Without a "sealmesh" entry the request is local. A malformed entry gives None: such a request must not
    touch any tenant's blocks.
    """
    entry = (params or {}).get("sealmesh")
    if entry is None:
        return LOCAL_NAMESPACE, ""
    if not isinstance(entry, Mapping):
        return None
    handle, epoch = entry.get("handle"), entry.get("epoch")
    traceparent = entry.get("traceparent", "")
    if not (isinstance(handle, str) and _HANDLE.fullmatch(handle)) or handle in _RESERVED:
        return None
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < _MAX_EPOCH:
        return None
    if not isinstance(traceparent, str) or len(traceparent) > _MAX_TRACEPARENT:
        traceparent = ""
    return f"{handle}/{epoch}", traceparent
