"""Blocks as opaque bytes, whatever the tensors look like."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.inference.kv_tensors import Array, BlockTensors, flatten_tensors

BLOCKS = 6


def layouts() -> dict[str, list[tuple[str, Array]]]:
    rng = np.random.default_rng(1)

    def fresh(*shape: int) -> Array:
        return rng.integers(0, 2**31, shape, np.int32)

    packed = fresh(BLOCKS, 2, 3, 8, 4)
    return {
        "contiguous": [(f"layer{i}", fresh(BLOCKS, 3, 8, 4)) for i in range(3)],
        # One allocation for all layers: a layer is a strided view of it.
        "packed": [("layer0", packed[:, 0]), ("layer1", packed[:, 1])],
        "transposed": [("layer0", fresh(BLOCKS, 4, 8).swapaxes(1, 2))],
        "block axis last in memory": [("layer0", fresh(4, 8, BLOCKS).transpose(2, 0, 1))],
        # The kernel's block is half the engine's.
        "two rows a block": [("layer0", fresh(2 * BLOCKS, 8, 4))],
        # Ascend: (k, v) of one layer; MLA: (nope, rope).
        "pairs": [("layer0.0", fresh(BLOCKS, 8, 16)), ("layer0.1", fresh(BLOCKS, 8, 4))],
        "odd sizes": [("layer0", rng.integers(0, 255, (BLOCKS, 3), np.uint8)), ("layer1", fresh(BLOCKS, 5))],
    }


@pytest.mark.parametrize("name", layouts())
def test_a_block_moves_whole_and_touches_no_other(name: str) -> None:
    tensors = layouts()[name]
    before = [array.copy() for _, array in tensors]
    blocks = BlockTensors(tensors, BLOCKS)
    payload = np.empty(blocks.payload_bytes, np.uint8)

    blocks.copy_out(2, payload)
    blocks.copy_in(4, payload)

    for (_, array), old in zip(tensors, before, strict=True):
        rows = array.shape[0] // BLOCKS
        expected = old.copy()
        expected[4 * rows : 5 * rows] = old[2 * rows : 3 * rows]
        np.testing.assert_array_equal(array, expected)
    assert blocks.payload_bytes == sum(array[:1].nbytes * (len(array) // BLOCKS) for _, array in tensors)


@given(source=st.integers(0, BLOCKS - 1), target=st.integers(0, BLOCKS - 1))
def test_out_and_in_again_changes_nothing(source: int, target: int) -> None:
    tensors = layouts()["packed"]
    blocks = BlockTensors(tensors, BLOCKS)
    first, second = (np.empty(blocks.payload_bytes, np.uint8) for _ in range(2))
    blocks.copy_out(source, first)
    blocks.copy_in(target, first)
    blocks.copy_out(target, second)
    np.testing.assert_array_equal(first, second)


def test_every_layout_has_its_own_digest_and_the_cache_size_has_none() -> None:
    digests = {BlockTensors(tensors, BLOCKS).physical_digest(b"l") for tensors in layouts().values()}
    assert len(digests) == len(layouts())
    small = BlockTensors([("layer0", np.zeros((4, 8), np.int32))], 4)
    large = BlockTensors([("layer0", np.zeros((9, 8), np.int32))], 9)
    assert small.physical_digest(b"l") == large.physical_digest(b"l")
    assert small.physical_digest(b"l") != small.physical_digest(b"m")


def test_tensors_that_do_not_divide_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="layer0 has 7 rows"):
        BlockTensors([("layer0", np.zeros((7, 4), np.int32))], BLOCKS)
    with pytest.raises(ValueError, match="no KV tensors"):
        BlockTensors([], BLOCKS)


def test_tuples_are_flattened_and_shared_tensors_are_taken_once() -> None:
    k, v, shared = object(), object(), object()
    assert flatten_tensors({"a": (k, v), "b": shared, "c": shared}) == [
        ("a.0", k),
        ("a.1", v),
        ("b", shared),
    ]
