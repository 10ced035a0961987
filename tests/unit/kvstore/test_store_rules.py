"""Namespaces and keys that may reach Redis."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.kvstore.store import MAX_KEYS, check_keys, check_namespace
from sealmesh.telemetry.runtime.errors import SealmeshError


@given(handle=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), epoch=st.integers(0, 2**64 - 1))
def test_handles_with_an_epoch_pass(handle: str, epoch: int) -> None:
    check_namespace(f"{handle}/{epoch}")


@given(st.text(alphabet="aZ9-_/*?[]{}\\:\n\r\0 é", max_size=40))
def test_nothing_else_gets_through(namespace: str) -> None:
    allowed = string.ascii_letters + string.digits + "-_"
    handle, _, epoch = namespace.partition("/")
    if (
        handle
        and len(handle) <= 64
        and len(epoch) <= 20
        and set(handle) <= set(allowed)
        and epoch
        and set(epoch) <= set(string.digits)
    ):
        check_namespace(namespace)
        return
    with pytest.raises(SealmeshError) as caught:
        check_namespace(namespace)
    assert caught.value.field == "namespace"


@pytest.mark.parametrize("namespace", ["", "a", "a/", "/1", "a/1/2", "a/-1", "a/1\n", "*/1", "a/" + "1" * 21])
def test_malformed_namespaces(namespace: str) -> None:
    with pytest.raises(SealmeshError, match="handle/epoch"):
        check_namespace(namespace)


@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_keys_have_one_size(size: int) -> None:
    with pytest.raises(SealmeshError, match=f"key 1 has {size} bytes"):
        check_keys([bytes(32), bytes(size)])


def test_keys_are_counted_before_they_are_read() -> None:
    check_keys([bytes(32)] * MAX_KEYS)
    with pytest.raises(SealmeshError, match="at most 65536"):
        check_keys([b""] * (MAX_KEYS + 1))
