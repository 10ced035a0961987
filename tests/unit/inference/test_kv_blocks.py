"""Keys, layouts and headers: what differs is never found, what is damaged is never used."""

import dataclasses
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.inference.kv_blocks import (
    HEADER_BYTES,
    BlockLayout,
    BlockMismatchError,
    KeyDeriver,
    encode_parts,
    open_value,
    sm3,
    write_header,
)

LAYOUT = BlockLayout(
    model_digest=bytes(32),
    engine_layout="vllm-0.32.0/cpu-x86_64-AVX2/FullAttentionSpec/LBHNC",
    dtype="float32",
    compute_dtype="float32",
    block_tokens=32,
    hash_scheme="sha256_cbor:fixed",
)
KEY = bytes(range(32))
PHYSICAL = sm3(b"physical")


def sealed(payload: bytes, key: bytes = KEY, physical: bytes = PHYSICAL) -> bytearray:
    value = bytearray(HEADER_BYTES) + payload
    write_header(memoryview(value), key, physical)
    return value


def test_sm3_is_the_standard_function() -> None:
    # GB/T 32905-2016, example 1.
    assert sm3(b"abc").hex() == "66c7f0f462eeedd9d1f2d46bdc10e4e24167c4875cf2f7a2297da02b8f4ba8e0"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BlockLayout)])
def test_every_field_of_a_layout_changes_its_digest(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = value + 1 if isinstance(value, int) else value + (b"x" if isinstance(value, bytes) else "x")
    changes: dict[str, Any] = {field: other}
    assert dataclasses.replace(LAYOUT, **changes).digest() != LAYOUT.digest()


@given(st.lists(st.binary(max_size=6), max_size=5), st.lists(st.binary(max_size=6), max_size=5))
def test_two_lists_of_parts_never_share_an_encoding(left: list[bytes], right: list[bytes]) -> None:
    assert (encode_parts(left) == encode_parts(right)) == (left == right)


@given(
    st.tuples(st.binary(min_size=1), st.binary(), st.text(), st.text(), st.binary()),
    st.tuples(st.binary(min_size=1), st.binary(), st.text(), st.text(), st.binary()),
)
def test_a_key_depends_on_everything(
    left: tuple[bytes, bytes, str, str, bytes], right: tuple[bytes, bytes, str, str, bytes]
) -> None:
    def key(facts: tuple[bytes, bytes, str, str, bytes]) -> bytes:
        secret, layout, namespace, salt, block = facts
        # HMAC pads short keys with zeros, so trailing zeros of a secret do not count.
        return KeyDeriver(sm3(secret), layout, namespace, salt).key(block)

    assert len(key(left)) == 32
    assert (key(left) == key(right)) == (left == right)


@pytest.mark.parametrize("changed", range(4))
def test_namespace_salt_and_layout_do_not_run_into_each_other(changed: int) -> None:
    variants = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    keys = {KeyDeriver(b"", b"d", namespace, salt).key(b"h") for namespace, salt in variants}
    assert len(keys) == len(variants)


@given(payload=st.binary(min_size=1, max_size=300))
def test_a_value_opens_as_it_was(payload: bytes) -> None:
    value = sealed(payload)
    assert bytes(open_value(memoryview(value), KEY, PHYSICAL, len(payload))) == payload


@given(data=st.data(), payload=st.binary(min_size=1, max_size=100))
def test_any_flipped_bit_is_a_mismatch(data: st.DataObject, payload: bytes) -> None:
    value = sealed(payload)
    bit = data.draw(st.integers(0, len(value) * 8 - 1))
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockMismatchError):
        open_value(memoryview(value), KEY, PHYSICAL, len(payload))


@given(data=st.data(), payload=st.binary(min_size=1, max_size=100))
def test_any_other_length_is_a_mismatch(data: st.DataObject, payload: bytes) -> None:
    value = bytes(sealed(payload)) + bytes(20)
    length = data.draw(st.integers(0, len(value)).filter(lambda n: n != HEADER_BYTES + len(payload)))
    with pytest.raises(BlockMismatchError) as caught:
        open_value(memoryview(value)[:length], KEY, PHYSICAL, len(payload))
    assert caught.value.reason == "length"


@given(garbage=st.binary(min_size=HEADER_BYTES + 8, max_size=HEADER_BYTES + 8))
def test_garbage_is_a_mismatch(garbage: bytes) -> None:
    with pytest.raises(BlockMismatchError):
        open_value(memoryview(garbage), KEY, PHYSICAL, 8)


def test_a_value_of_another_key_or_layout_is_a_mismatch() -> None:
    value = memoryview(sealed(b"payload"))
    with pytest.raises(BlockMismatchError) as caught:
        open_value(value, sm3(b"other key"), PHYSICAL, 7)
    assert caught.value.reason == "tag"
    with pytest.raises(BlockMismatchError) as caught:
        open_value(value, KEY, sm3(b"other layout"), 7)
    assert caught.value.reason == "layout"


def test_a_payload_swapped_with_its_checksum_is_a_mismatch() -> None:
    value = sealed(b"payload")
    value[HEADER_BYTES:] = b"PAYLOAD"
    value[56:60] = zlib.crc32(b"PAYLOAD").to_bytes(4, "little")
    with pytest.raises(BlockMismatchError) as caught:
        open_value(memoryview(value), KEY, PHYSICAL, 7)
    assert caught.value.reason == "tag"
