"""Whole blocks in and out of the engine's KV tensors, as opaque bytes.

Nothing here knows what a block holds: the CPU build keeps K transposed, other builds keep (k, v) pairs
or latent vectors. A block of a layer is `tensor[block]`, whatever its strides; its bytes in logical
order are stored, and the strides are part of the layout digest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from sealmesh.inference.kv_blocks import encode_parts, sm3

Array: TypeAlias = npt.NDArray[np.generic]
Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Part:
    """One tensor: `view[first:first + rows]` of a block starts at `offset` of the payload."""

    view: Array
    rows: int
    offset: int
    size_bytes: int


class BlockTensors:
    """All KV tensors of this rank, addressed by block.

    Args:
        tensors: (name, array) in layer order; axis 0 counts blocks, or parts of blocks where the kernel's
            block is smaller than the engine's. Arrays share memory with the engine.
        num_blocks: Blocks that the engine allocated.

    Raises:
        ValueError: A tensor does not divide into that many blocks.
    """

    def __init__(self, tensors: Iterable[tuple[str, Array]], num_blocks: int) -> None:
        self._parts: list[_Part] = []
        offset = 0
        facts: list[bytes] = []
        for name, view in tensors:
            rows, rest = divmod(view.shape[0], num_blocks)
            if rows == 0 or rest:
                raise ValueError(
                    f"KV tensor of {name} has {view.shape[0]} rows, no multiple of {num_blocks} blocks"
                )
            size = rows * view.itemsize * int(np.prod(view.shape[1:], dtype=np.int64))
            self._parts.append(_Part(view, rows, offset, size))
            offset += size
            # Axis 0's own length stays out: it is the size of the cache, not the shape of a block.
            facts += [name.encode(), repr((rows, view.shape[1:], view.strides, view.dtype.str)).encode()]
        if not self._parts:
            raise ValueError("the engine has no KV tensors")
        self.num_blocks = num_blocks
        #: Bytes of one block over all layers.
        self.payload_bytes = offset
        self._facts = encode_parts(facts)

    def physical_digest(self, layout_digest: bytes) -> bytes:
        """Digest of the layout and of every tensor's name, shape, strides and element type; 32 bytes."""
        return sm3(encode_parts([layout_digest, self._facts]))

    def copy_out(self, block: int, payload: Bytes) -> None:
        """Copies a block into `payload` (payload_bytes long). Large copies run without the GIL."""
        for part in self._parts:
            source = part.view[block * part.rows : (block + 1) * part.rows]
            target = payload[part.offset : part.offset + part.size_bytes]
            np.copyto(target.view(source.dtype).reshape(source.shape), source)

    def copy_in(self, block: int, payload: Bytes) -> None:
        """Copies `payload` into a block. Large copies run without the GIL."""
        for part in self._parts:
            target = part.view[block * part.rows : (block + 1) * part.rows]
            source = payload[part.offset : part.offset + part.size_bytes]
            np.copyto(target, source.view(target.dtype).reshape(target.shape))


def flatten_tensors(caches: Mapping[str, object]) -> list[tuple[str, object]]:
    """Layer name and tensor pairs; a layer with a tuple of tensors gives one pair for each.

    Layers that share one tensor (cross-layer KV sharing) give it once.
    """
    pairs: list[tuple[str, object]] = []
    seen: set[int] = set()
    for name, cache in caches.items():
        several = isinstance(cache, tuple | list)
        for position, tensor in enumerate(cache if isinstance(cache, tuple | list) else (cache,)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                pairs.append((f"{name}.{position}" if several else name, tensor))
    return pairs
