"""Keys of blocks for every rank of an engine, the same on the scheduler's and the worker's side."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from sealmesh.inference.kv_blocks import BlockLayout, make_deriver_cache
from sealmesh.inference.kv_plan import RequestScope


class KeySpace:
    """Derives keys of blocks. Thread safe.

    Args:
        layouts: Layout of each rank that holds KV state, in rank order.
        secret: Key of the tenants' keys; empty until blocks are encrypted per tenant.
    """

    def __init__(self, layouts: Sequence[BlockLayout], secret: bytes = b"") -> None:
        self._layouts = tuple(layouts)
        self._deriver = make_deriver_cache(secret)
        self._digests: dict[tuple[int, bytes], bytes] = {}
        self._lock = threading.Lock()

    @property
    def ranks(self) -> int:
        """Number of ranks; a block is present when it is for all of them."""
        return len(self._layouts)

    def layout_digest(self, rank: int, lora_digest: bytes = b"") -> bytes:
        """Digest of the layout of a rank with that adapter."""
        with self._lock:
            known = self._digests.get((rank, lora_digest))
            if known is None:
                known = replace(self._layouts[rank], lora_digest=lora_digest).digest()
                self._digests[rank, lora_digest] = known
            return known

    def keys(self, rank: int, scope: RequestScope, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Keys of a rank's blocks, 32 bytes each."""
        digest = self.layout_digest(rank, scope.lora_digest)
        deriver = self._deriver(digest, scope.namespace, scope.cache_salt)
        return [deriver.key(block_hash) for block_hash in block_hashes]

    def keys_of_all_ranks(self, scope: RequestScope, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Keys block by block, within a block rank by rank: a leading run of `n` keys is a leading run of
        `n // ranks` blocks that every rank can load."""
        per_rank = [self.keys(rank, scope, block_hashes) for rank in range(self.ranks)]
        return [key for block in zip(*per_rank, strict=True) for key in block]
