"""The connector's settings and what it takes from a request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealmesh.inference.kv_config import KVConnectorConfig
from sealmesh.inference.kv_plan import LOCAL_NAMESPACE, parse_tenant

GOOD: dict[str, object] = {"kvstore_address": "127.0.0.1:9102", "model_digest": "ab" * 32}


def test_defaults() -> None:
    config = KVConnectorConfig.parse(GOOD)
    assert config.digest == b"\xab" * 32
    assert config.client_options().tls is None
    assert config.client_options().lookup_deadline_s == 0.05
    assert config.save


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_digest": ""}, "model_digest is missing"),
        ({"model_digest": "abcd"}, "32 bytes as hex"),
        ({"model_digest": "zz" * 32}, "32 bytes as hex"),
        ({"kvstore_address": ""}, "kvstore_address is missing"),
        ({"lookup_deadline": 5}, "unknown key lookup_deadline"),
        ({"lookup_deadline_ms": "50"}, "lookup_deadline_ms must be int, not str"),
        ({"lookup_deadline_ms": True}, "lookup_deadline_ms must be int, not bool"),
        ({"lookup_deadline_ms": 0}, "lookup_deadline_ms must be positive"),
        ({"save": 1}, "save must be bool"),
        ({"tls_ca": "ca.pem"}, "together"),
        ({"digest": b""}, "unknown key digest"),
    ],
)
def test_mistakes_are_one_clear_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        KVConnectorConfig.parse({**GOOD, **change})
    assert "\n" not in str(caught.value)


def test_a_request_without_a_tenant_is_local() -> None:
    assert parse_tenant(None) == (LOCAL_NAMESPACE, "")
    assert parse_tenant({"do_remote_prefill": True}) == (LOCAL_NAMESPACE, "")


def test_a_tenant_becomes_a_namespace() -> None:
    entry = {"handle": "0123abcd", "epoch": 7, "traceparent": "00-1-2-01"}
    assert parse_tenant({"sealmesh": entry}) == ("0123abcd/7", "00-1-2-01")


@pytest.mark.parametrize(
    "entry",
    [
        "handle",
        {},
        {"handle": "", "epoch": 1},
        {"handle": "a/b", "epoch": 1},
        {"handle": "local", "epoch": 1},
        {"handle": "a*", "epoch": 1},
        {"handle": "a" * 65, "epoch": 1},
        {"handle": "a", "epoch": "1"},
        {"handle": "a", "epoch": -1},
        {"handle": "a", "epoch": True},
        {"handle": "a", "epoch": 2**63},
        {"handle": "a"},
    ],
)
def test_a_malformed_tenant_gets_no_namespace_at_all(entry: Any) -> None:
    assert parse_tenant({"sealmesh": entry}) is None


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_whatever_a_caller_sends_cannot_name_the_local_namespace(entry: Any) -> None:
    tenant = parse_tenant({"sealmesh": entry})
    assert entry is None or tenant is None or tenant[0] != LOCAL_NAMESPACE
