"""The kvstore as a process, over mTLS."""

import os
import signal
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealmesh.protos.kvstore.v1 import kvstore_pb2 as pb
from sealmesh.protos.kvstore.v1 import kvstore_pb2_grpc
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.support.kvstore import KVStoreProcess, key_of, keys_of

MIB = 1 << 20
Stub = kvstore_pb2_grpc.KVStoreServiceStub


@pytest.fixture(scope="module")
def kvstore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStoreProcess]:
    with KVStoreProcess(tmp_path_factory.mktemp("kv"), "--max-value-bytes", str(4 * MIB)) as process:
        yield process


@pytest.fixture(scope="module")
def worker(kvstore: KVStoreProcess) -> Stub:
    return kvstore.stub("worker")


def pieces(
    namespace: str,
    key: bytes,
    value: bytes,
    *,
    size: int | None = None,
    step: int = MIB,
    replace: bool = False,
) -> Iterator[pb.PutBlocksRequest]:
    for start in range(0, max(len(value), 1), step):
        first = start == 0
        yield pb.PutBlocksRequest(
            namespace=namespace if first else "",
            key=key if first else b"",
            size_bytes=(len(value) if size is None else size) if first else 0,
            data=value[start : start + step],
            last=start + step >= len(value),
            replace=replace,
        )


def put(
    stub: Stub, namespace: str, blocks: dict[bytes, bytes], *, step: int = MIB, replace: bool = False
) -> pb.PutBlocksResponse:
    return stub.PutBlocks(
        piece
        for key, value in blocks.items()
        for piece in pieces(namespace, key, value, step=step, replace=replace)
    )


def get(stub: Stub, namespace: str, keys: list[bytes]) -> list[bytes | None]:
    values: list[bytes | None] = []
    current = b""
    size = 0
    for piece in stub.GetBlocks(pb.GetBlocksRequest(namespace=namespace, keys=keys)):
        assert piece.index == len(values)
        assert len(piece.data) <= MIB
        if piece.missing:
            values.append(None)
            continue
        size = piece.size_bytes or size
        current += piece.data
        if piece.last:
            assert len(current) == size
            values.append(current)
            current = b""
    return values


def test_blocks_of_every_size_come_back(worker: Stub) -> None:
    sizes = [1, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB, 4 * MIB]
    blocks = {key_of(n): os.urandom(size) for n, size in enumerate(sizes)}

    answer = put(worker, "sizes/1", blocks)

    assert (answer.stored_count, answer.existing_count, answer.refused_count) == (len(sizes), 0, 0)
    asked = [*blocks, key_of(99)]
    assert get(worker, "sizes/1", asked) == [*blocks.values(), None]
    assert get(worker, "sizes/2", asked) == [None] * len(asked)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=4),
    step=st.sampled_from([1000, 65536, MIB - 1, MIB]),
)
def test_any_cut_into_pieces_gives_the_same_blocks(worker: Stub, sizes: list[int], step: int) -> None:
    namespace = f"{uuid.uuid4().hex}/1"
    step = max(step, max(sizes) // 200)
    blocks = {key_of(n): bytes([n + 1]) * size for n, size in enumerate(sizes)}
    assert put(worker, namespace, blocks, step=step).stored_count == len(sizes)
    assert get(worker, namespace, list(blocks)) == list(blocks.values())


def test_lookup_counts_the_leading_run(worker: Stub) -> None:
    put(worker, "lookup/1", {key_of(n): b"v" for n in (0, 1, 3)})

    def count(numbers: list[int]) -> int:
        request = pb.LookupPrefixRequest(namespace="lookup/1", keys=keys_of(numbers))
        return worker.LookupPrefix(request).present_count

    assert [count(n) for n in ([0, 1, 2, 3], [3], [2], [])] == [2, 1, 0, 0]


def test_existing_blocks_are_kept_and_replaced_on_demand(worker: Stub) -> None:
    assert put(worker, "keep/1", {key_of(1): b"one"}).stored_count == 1
    assert put(worker, "keep/1", {key_of(1): b"two"}).existing_count == 1
    assert get(worker, "keep/1", [key_of(1)]) == [b"one"]
    assert put(worker, "keep/1", {key_of(1): b"two"}, replace=True).stored_count == 1
    assert get(worker, "keep/1", [key_of(1)]) == [b"two"]


def test_an_over_large_block_is_refused_and_those_behind_it_are_kept(worker: Stub) -> None:
    answer = put(worker, "large/1", {key_of(1): bytes(4 * MIB + 1), key_of(2): b"small"})
    assert (answer.stored_count, answer.refused_count) == (1, 1)
    assert get(worker, "large/1", keys_of([1, 2])) == [None, b"small"]


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        (
            [pb.PutBlocksRequest(namespace="a", key=key_of(1), size_bytes=1, data=b"x", last=True)],
            "namespace",
        ),
        ([pb.PutBlocksRequest(namespace="a/1", key=b"k", size_bytes=1, data=b"x", last=True)], "keys"),
        ([pb.PutBlocksRequest(namespace="a/1", key=key_of(1), data=b"x", last=True)], "size_bytes"),
        (list(pieces("a/1", key_of(1), b"x" * 10, size=9)), "size_bytes"),
        (list(pieces("a/1", key_of(1), b"x" * 10, size=11)), "size_bytes"),
        (list(pieces("a/1", key_of(1), b"x" * 20, step=10))[:1], "data"),
        (list(pieces("a/1", key_of(1), b"x" * (MIB + 1), step=2 * MIB)), "data"),
        (
            [pb.PutBlocksRequest(namespace="a/1", key=key_of(1), parent_key=b"p", size_bytes=1, data=b"x")],
            "parent_key",
        ),
    ],
)
def test_malformed_streams_are_told_which_field(
    worker: Stub, requests: list[pb.PutBlocksRequest], field: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        worker.PutBlocks(iter(requests))
    error = SealmeshError.from_rpc_error(caught.value)
    assert (error.code, error.reason, error.field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        field,
    )
    assert get(worker, "a/1", [key_of(1)]) == [None]


@pytest.mark.parametrize(
    ("role", "method", "request_"),
    [
        ("gateway", "LookupPrefix", pb.LookupPrefixRequest(namespace="a/1")),
        ("vault", "LookupPrefix", pb.LookupPrefixRequest(namespace="a/1")),
        ("worker", "DeleteTenant", pb.DeleteTenantRequest(namespace="a/1")),
        ("vault", "GetStats", pb.GetStatsRequest()),
    ],
)
def test_the_wrong_role_is_refused(kvstore: KVStoreProcess, role: str, method: str, request_: object) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(kvstore.stub(role), method)(request_)
    assert SealmeshError.from_rpc_error(caught.value).reason == "ROLE_DENIED"


def test_without_a_certificate_nobody_gets_in(kvstore: KVStoreProcess) -> None:
    ca = kvstore.tls().ca.read_bytes()
    options = [("grpc.ssl_target_name_override", "kvstore.sealmesh.internal")]
    with grpc.secure_channel(kvstore.grpc_address, grpc.ssl_channel_credentials(ca), options) as channel:
        stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetStats(pb.GetStatsRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_checkpoints_are_not_served_yet(kvstore: KVStoreProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(kvstore.stub("operator").CreateCheckpoint(pb.CreateCheckpointRequest(checkpoint="c")))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_tenant_is_deleted_and_no_other(kvstore: KVStoreProcess, worker: Stub) -> None:
    for tenant in ("gone/1", "stays/1"):
        put(worker, tenant, {key_of(n): b"v" for n in range(5)})
    answer = kvstore.stub("operator").DeleteTenant(pb.DeleteTenantRequest(namespace="gone/1"))
    assert answer.deleted_count == 5
    assert get(worker, "gone/1", [key_of(1)]) == [None]
    assert get(worker, "stays/1", [key_of(1)]) == [b"v"]


def test_statistics_and_metrics(kvstore: KVStoreProcess, worker: Stub) -> None:
    put(worker, "stats/1", {key_of(1): b"v" * 100})
    before = worker.GetStats(pb.GetStatsRequest())
    worker.LookupPrefix(pb.LookupPrefixRequest(namespace="stats/1", keys=keys_of([1, 2])))
    after = worker.GetStats(pb.GetStatsRequest())
    assert after.hit_count - before.hit_count == 1
    assert after.miss_count - before.miss_count == 1
    assert after.block_count > 0
    assert after.capacity_bytes == 1 << 30
    assert after.backend.startswith("redis ")
    with urllib.request.urlopen(f"http://{kvstore.http_address}/metrics") as response:
        text = response.read().decode()
    assert 'sealmesh_kvstore_lookup_keys_total{result="hit"}' in text
    assert 'sealmesh_kvstore_redis_seconds_count{operation="EXISTS"}' in text
    assert "sealmesh_kvstore_redis_up 1.0" in text
    assert "stats/1" not in text


# --- when things die


@pytest.fixture
def own(tmp_path: Path) -> Iterator[KVStoreProcess]:
    with KVStoreProcess(tmp_path) as process:
        yield process


def ready(process: KVStoreProcess) -> bool:
    try:
        with urllib.request.urlopen(f"http://{process.http_address}/readyz"):
            return True
    except urllib.error.HTTPError:
        return False


def test_a_killed_redis_comes_back_and_readiness_follows(own: KVStoreProcess) -> None:
    stub = own.stub()
    put(stub, "a/1", {key_of(1): b"v"})
    own.redis.suspend()
    own.wait_for("not ready")
    assert not ready(own)
    with pytest.raises(grpc.RpcError) as caught:
        stub.LookupPrefix(pb.LookupPrefixRequest(namespace="a/1", keys=[key_of(1)]), timeout=5)
    assert SealmeshError.from_rpc_error(caught.value).reason in (
        "DEPENDENCY_UNAVAILABLE",
        "DEADLINE_EXCEEDED",
    )
    own.redis.kill()
    own.wait_for("the embedded Redis is back")
    own.wait_for("ready")
    assert ready(own)
    request = pb.LookupPrefixRequest(namespace="a/1", keys=[key_of(1)])
    assert stub.LookupPrefix(request).present_count == 1


def test_a_killed_service_leaves_no_redis_and_loses_no_data(own: KVStoreProcess) -> None:
    put(own.stub(), "a/1", {key_of(1): b"v"})
    redis = own.redis
    own.send(signal.SIGKILL)
    own.start()
    assert not redis.is_running() or redis.status() == psutil.STATUS_ZOMBIE
    assert get(own.stub(), "a/1", [key_of(1)]) == [b"v"]


def test_an_orderly_stop_leaves_nothing(own: KVStoreProcess) -> None:
    redis = own.redis
    assert own.stop() == 0
    assert not psutil.pid_exists(redis.pid)


def test_a_configured_redis_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = KVStoreProcess(tmp_path, "--redis-url", f"redis://:secret@127.0.0.1:{port}/0")
    process.start(wait_ready=False)
    assert process.wait_exit() != 0
    errors = [line for line in process.log if '"error"' in line]
    assert len(errors) == 1
    assert f"redis://127.0.0.1:{port}/0 cannot be used" in errors[0]
    assert not any("secret" in line or "Traceback" in line for line in process.log)
