"""The vault over real mTLS: who gets which key, for how long, and what is written down about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from sealmesh.protos.common.v1 import audit_pb2
from sealmesh.protos.security.v1 import model_vault_pb2 as pb
from sealmesh.protos.security.v1 import model_vault_pb2_grpc
from sealmesh.security.audit.sink import JsonLinesAuditSink
from sealmesh.security.tls import LocalAuthority, PeerIdentity, TlsFiles, channel_credentials
from sealmesh.security.vault.__main__ import build
from sealmesh.security.vault.allow import AllowList
from sealmesh.security.vault.catalog import CatalogEntry
from sealmesh.security.vault.client import VaultClient, open_remote_model
from sealmesh.security.vault.core import Vault
from sealmesh.security.vault.leases import LeaseTable
from sealmesh.security.vault.settings import VaultSettings
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.runtime.channel import open_sync_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import ServiceServer
from sealmesh.telemetry.telemetry import Telemetry
from sealmesh.telemetry.tracing import Tracing

from tests.support.service_process import ServiceProcess
from tests.unit.security.conftest import SAMPLE_FILES, SAMPLE_TENSORS, Lab

HANDLE = "0123456789abcdef" * 2


class RunningVault:
    """A vault on a loopback port with its own event loop, and certificates for its callers."""

    def __init__(self, lab: Lab, base: Path, **changes: object) -> None:
        self.lab = lab
        self.models = base / "models"
        self.models.mkdir()
        self.authority = LocalAuthority(base / "tls").create()
        self.state = base / "state"
        files = self.authority.issue("vault", "local")
        values: dict[str, object] = {
            "grpc_address": "127.0.0.1:0",
            "http_address": "127.0.0.1:0",
            "tls_ca": files.ca,
            "tls_certificate": files.certificate,
            "tls_key": files.key,
            "models_dir": self.models,
            "state_dir": self.state,
            "root_key_file": lab.root_key_file,
            "verifying_key_file": lab.verifying_key_file,
            "allow": {"model": ["worker/worker-0"], "tenant:*": ["worker/worker-0"]},
            "drain_grace_ms": 200,
        }
        self.settings = VaultSettings.model_validate(values | changes)
        self.address = ""

    def add_model(self, name: str = "model", version: int = 1, folder: str | None = None) -> Path:
        target = self.models / (folder or name)
        self.lab.seal_into(self.lab.plain(SAMPLE_FILES), target, name=name, version=version)
        return target

    def client(self, role: str = "worker", name: str = "worker-0") -> VaultClient:
        return VaultClient(self.address, self.authority.issue(role, name), timeout_s=10)

    @contextlib.contextmanager
    def stub(
        self, role: str = "worker", name: str = "worker-0"
    ) -> Iterator[model_vault_pb2_grpc.ModelVaultServiceStub]:
        credentials = channel_credentials(self.authority.issue(role, name))
        with open_sync_channel(self.address, credentials, expected_role="vault") as channel:
            yield model_vault_pb2_grpc.ModelVaultServiceStub(channel)

    def audit(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.state / "audit.jsonl").read_text().splitlines()]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        telemetry = Telemetry("vault", Tracing("vault"), Metrics("vault"), StructuredLogger("vault"))
        spec = build(self.settings, telemetry)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        server = ServiceServer(spec)
        try:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
            self.address = server.grpc_address
            try:
                yield
            finally:
                asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@pytest.fixture(scope="module")
def vault(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVault]:
    made = RunningVault(lab, tmp_path_factory.mktemp("vault"))
    made.add_model()
    with made.running():
        yield made


def reason(action: Callable[[], object]) -> str:
    with pytest.raises(SealmeshError) as caught:
        action()
    return caught.value.reason


# --- the way of a worker -------------------------------------------------------------------------------


def test_a_worker_opens_a_model_and_reads_its_tensors(vault: RunningVault, lab: Lab) -> None:
    with (
        vault.client() as client,
        open_remote_model(client, "model", pinned=[lab.verifying_key]) as model,
    ):
        target = bytearray(len(SAMPLE_TENSORS["embed"][2]))
        model.read_tensor_into("embed", target)
        assert bytes(target) == SAMPLE_TENSORS["embed"][2]
        assert bytes(model.read_file("config.json")) == SAMPLE_FILES["config.json"]


def test_the_released_key_is_the_models_and_never_crosses_in_the_clear(vault: RunningVault, lab: Lab) -> None:
    with vault.client() as client, lab.open(vault.models / "model") as model:
        lease = client.open_model("model")
        key = bytes(client.release_key(lease.lease))
        model.unlock_with(key)
        assert lease.model.manifest_digest == model.manifest.digest
        assert {f.path: (f.size_bytes, f.sm3) for f in lease.files} == {
            f.sealed_path: (f.size_bytes, f.sm3) for f in model.manifest.files
        }
        with vault.stub() as stub:
            for _ in range(2):
                public = bytes(range(1, 33)) if _ else bytes(range(2, 34))
                response = stub.ReleaseKey(
                    pb.ReleaseKeyRequest(lease=lease.lease, recipient_public_key=public)
                )
                assert key not in response.SerializeToString()


def test_a_worker_that_pins_another_signer_refuses_the_model(vault: RunningVault) -> None:
    with (
        vault.client() as client,
        pytest.raises(SealmeshError, match="not a pinned key"),
        open_remote_model(client, "model", pinned=[]),
    ):
        pytest.fail("the model was opened")


def test_shared_storage_may_lie_elsewhere_but_must_hold_the_same_sealing(
    vault: RunningVault, lab: Lab
) -> None:
    copy = lab.copy(vault.models / "model")
    other = lab.seal(lab.plain(SAMPLE_FILES))
    with vault.client() as client:
        with open_remote_model(client, "model", pinned=[lab.verifying_key], model_dir=copy) as model:
            assert model.path == copy
        with (
            pytest.raises(SealmeshError, match="not the one that was signed"),
            open_remote_model(client, "model", pinned=[lab.verifying_key], model_dir=other),
        ):
            pytest.fail("another sealing was opened")


def test_models_appear_and_change_without_a_restart(vault: RunningVault) -> None:
    with vault.client("gateway", "local") as client:
        assert [model.name for model in client.list_models()] == ["model"]
        vault.add_model("later", 1)
        vault.add_model("later", 3, folder="later-3")
        try:
            found = {model.name: model.version for model in client.list_models()}
            assert found == {"later": 3, "model": 1}
        finally:
            shutil.rmtree(vault.models / "later")
            shutil.rmtree(vault.models / "later-3")
        assert [model.name for model in client.list_models()] == ["model"]


def test_ciphertext_is_streamed_from_any_place(vault: RunningVault) -> None:
    content = (vault.models / "model" / "model.safetensors.sealed").read_bytes()
    with vault.client() as client:
        lease = client.open_model("model").lease
        path = "model.safetensors.sealed"
        assert b"".join(client.read_ciphertext(lease, path)) == content
        assert b"".join(client.read_ciphertext(lease, path, offset_bytes=5000)) == content[5000:]
        part = b"".join(client.read_ciphertext(lease, path, offset_bytes=100, length_bytes=9000))
        assert part == content[100:9100]
        assert b"".join(client.read_ciphertext(lease, path, offset_bytes=len(content))) == b""

        def read(file: str, **span: int) -> bytes:
            return b"".join(client.read_ciphertext(lease, file, **span))

        for bad in ("sealmesh.slots", "../state/audit.jsonl", "model.safetensors", ""):
            assert reason(partial(read, bad)) == "INVALID_REQUEST"
        past = (
            {"offset_bytes": len(content) + 1},
            {"length_bytes": len(content) + 1},
            {"offset_bytes": 1 << 63},
        )
        for span in past:
            assert reason(partial(read, path, **span)) == "INVALID_REQUEST"
        assert reason(lambda: list(client.read_ciphertext("0" * 32, path))) == "LEASE_EXPIRED"


# --- who gets nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["gateway", "kvstore", "operator", "vault"])
def test_other_roles_get_no_lease_and_no_key(vault: RunningVault, role: str) -> None:
    with vault.client() as worker:
        lease = worker.open_model("model").lease
    with vault.client(role, "worker-0") as client:
        assert reason(lambda: client.open_model("model")) == "ROLE_DENIED"
        assert reason(lambda: client.release_key(lease)) == "ROLE_DENIED"
        assert reason(lambda: client.release_tenant_key(HANDLE, 1)) == "ROLE_DENIED"
        assert reason(lambda: list(client.read_ciphertext(lease, "config.json.sealed"))) == "ROLE_DENIED"
        assert reason(lambda: client.close_model(lease)) == "ROLE_DENIED"


def test_a_worker_that_is_not_on_the_list_gets_no_key(vault: RunningVault) -> None:
    with vault.client("worker", "worker-1") as client:
        lease = client.open_model("model").lease
        assert reason(lambda: client.release_key(lease)) == "KEY_DENIED"
        assert reason(lambda: client.release_tenant_key(HANDLE, 1)) == "KEY_DENIED"
    last = vault.audit()[-2:]
    assert [(line["outcome"], line["reason"], line["actor"]) for line in last] == [
        ("OUTCOME_DENIED", "KEY_DENIED", "worker/worker-1")
    ] * 2


def test_a_lease_is_of_use_to_its_holder_only(vault: RunningVault) -> None:
    with vault.client() as holder, vault.client("worker", "worker-1") as other:
        lease = holder.open_model("model").lease
        assert reason(lambda: other.release_key(lease)) == "LEASE_EXPIRED"
        assert reason(lambda: other.close_model(lease)) == "LEASE_EXPIRED"
        assert reason(lambda: list(other.read_ciphertext(lease, "config.json.sealed"))) == "LEASE_EXPIRED"
        assert len(holder.release_key(lease)) == 32


def test_unknown_and_closed_leases_are_refused(vault: RunningVault) -> None:
    with vault.client() as client:
        lease = client.open_model("model").lease
        client.close_model(lease)
        for gone in (lease, "0" * 32, ""):
            assert reason(partial(client.release_key, gone)) == "LEASE_EXPIRED"
            assert reason(partial(client.close_model, gone)) == "LEASE_EXPIRED"


def test_a_replayed_release_is_refused(vault: RunningVault) -> None:
    with vault.client() as client:
        lease = client.open_model("model").lease
    subjects = (
        pb.ReleaseKeyRequest(lease=lease),
        pb.ReleaseKeyRequest(tenant=pb.TenantKeySubject(handle=HANDLE, epoch=1)),
    )
    with vault.stub() as stub:
        for number, request in enumerate(subjects):
            request.recipient_public_key = bytes([number + 3]) * 32
            stub.ReleaseKey(request)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ReleaseKey(request)
            error = SealmeshError.from_rpc_error(caught.value)
            assert (error.reason, "used before" in error.message) == ("KEY_DENIED", True)


@pytest.mark.parametrize(
    ("subject", "public_key"),
    [
        (None, bytes(range(32))),
        (pb.TenantKeySubject(handle=HANDLE, epoch=1), b"short"),
        (pb.TenantKeySubject(handle=HANDLE, epoch=1), bytes(32)),
        (pb.TenantKeySubject(handle="../x", epoch=1), bytes(range(32))),
        (pb.TenantKeySubject(handle=HANDLE), bytes(range(32))),
    ],
)
def test_malformed_releases_are_refused(
    vault: RunningVault, subject: pb.TenantKeySubject | None, public_key: bytes
) -> None:
    request = pb.ReleaseKeyRequest(recipient_public_key=public_key, tenant=subject)
    with vault.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ReleaseKey(request)
    assert SealmeshError.from_rpc_error(caught.value).reason == "INVALID_REQUEST"


def test_strangers_do_not_get_through_the_handshake(vault: RunningVault, tmp_path: Path) -> None:
    stranger = LocalAuthority(tmp_path / "mallory").create().issue("worker", "worker-0")
    good = vault.authority.issue("worker", "worker-0")
    for files in (stranger, TlsFiles(good.ca, stranger.certificate, stranger.key)):
        with VaultClient(vault.address, files, timeout_s=5) as client:
            assert reason(client.list_models) == "DEPENDENCY_UNAVAILABLE"


def test_a_server_without_the_vaults_role_is_not_trusted(lab: Lab, tmp_path: Path) -> None:
    fake = RunningVault(lab, tmp_path)
    files = fake.authority.issue("worker", "pretender")
    changes = {"tls_certificate": files.certificate, "tls_key": files.key}
    fake.settings = fake.settings.model_copy(update=changes)
    with fake.running(), fake.client() as client:
        assert reason(client.list_models) == "DEPENDENCY_UNAVAILABLE"


def test_an_absent_vault_is_named(vault: RunningVault) -> None:
    with VaultClient("127.0.0.1:1", vault.authority.issue("worker", "worker-0"), timeout_s=5) as client:
        with pytest.raises(SealmeshError, match=r"the vault at 127\.0\.0\.1:1 does not answer") as caught:
            client.list_models()
        assert caught.value.reason == "DEPENDENCY_UNAVAILABLE"


def test_unknown_and_broken_models(vault: RunningVault) -> None:
    with vault.client() as client:
        assert reason(lambda: client.open_model("nope")) == "MODEL_NOT_FOUND"
        assert reason(lambda: client.open_model("../model")) == "MODEL_NOT_FOUND"
        broken = vault.add_model("broken")
        try:
            with (broken / "config.json.sealed").open("ab") as file:
                file.write(b"x")
            assert reason(lambda: client.open_model("broken")) == "INTEGRITY_FAILURE"
            content = bytearray((broken / "sealmesh.manifest").read_bytes())
            content[100] ^= 1
            (broken / "sealmesh.manifest").write_bytes(content)
            assert reason(lambda: client.open_model("broken")) == "INTEGRITY_FAILURE"
            assert [model.name for model in client.list_models()] == ["model"]
        finally:
            shutil.rmtree(broken)


# --- tenants -------------------------------------------------------------------------------------------


def test_tenant_keys_are_stable_per_handle_and_epoch(vault: RunningVault) -> None:
    with vault.client() as client:
        one, again = client.release_tenant_key(HANDLE, 1), client.release_tenant_key(HANDLE, 1)
        assert one == again
        assert (
            len(
                {
                    bytes(one),
                    bytes(client.release_tenant_key(HANDLE, 2)),
                    bytes(client.release_tenant_key("a" * 32, 1)),
                }
            )
            == 3
        )


# --- audit ---------------------------------------------------------------------------------------------


def test_every_release_is_recorded_without_keys(vault: RunningVault) -> None:
    before = len(vault.audit())
    with vault.client() as client:
        lease = client.open_model("model")
        key = bytes(client.release_key(lease.lease))
        client.release_tenant_key(HANDLE, 1)
    lines = vault.audit()
    assert [int(line["sequence"]) for line in lines] == list(range(1, len(lines) + 1))
    model, tenant = lines[before:]
    assert model["kind"] == tenant["kind"] == "KIND_KEY_RELEASE"
    assert model["outcome"] == tenant["outcome"] == "OUTCOME_OK"
    assert (model["actor"], model["resource"]) == ("worker/worker-0", "models/model")
    assert model["model_version"] == lease.model.manifest_digest.hex()
    assert model["action"] == "sealmesh.security.v1.ModelVaultService/ReleaseKey"
    assert tenant["resource"] == f"tenants/{HANDLE}/epochs/1"
    text = (vault.state / "audit.jsonl").read_bytes()
    assert key.hex().encode() not in text
    assert lease.lease.encode() not in text
    assert stat.S_IMODE((vault.state / "audit.jsonl").stat().st_mode) == 0o600


class _FullDisk:
    def write(self, record: audit_pb2.AuditRecord) -> None:
        raise SealmeshError(grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", "the disk is full")


async def test_a_release_that_cannot_be_recorded_does_not_happen(lab: Lab, tmp_path: Path) -> None:
    settings = RunningVault(lab, tmp_path).settings
    vault = Vault(settings, _FullDisk(), StructuredLogger("vault"))
    lab.seal_into(lab.plain(SAMPLE_FILES), settings.models_dir / "model")
    peer = PeerIdentity("worker", "worker-0")
    await vault.start()
    try:
        lease = await vault.open_model(peer, "model")
        for _ in range(2):
            with pytest.raises(SealmeshError, match="the disk is full"):
                await vault.release_model_key(peer, lease.lease_id, bytes(range(32)), "action")
            with pytest.raises(SealmeshError, match="the disk is full"):
                await vault.release_tenant_key(peer, HANDLE, 1, bytes(range(32)), "action")
    finally:
        await vault.close()


async def test_an_audit_log_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SealmeshError, match="cannot write the audit log"):
        await JsonLinesAuditSink(tmp_path / "file" / "audit.jsonl", "vault").start()


# --- configuration -------------------------------------------------------------------------------------


async def start_with(lab: Lab, base: Path, **changes: object) -> str:
    settings = RunningVault(lab, base, **changes).settings
    vault = Vault(settings, JsonLinesAuditSink(base / "audit", "vault"), StructuredLogger("vault"))
    with pytest.raises(SealmeshError) as caught:
        await vault.start()
    await vault.close()
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verifying_key_file": None}, "verifying_key_file is not set"),
        ({"verifying_key_file": Path("/nonexistent.pub")}, "cannot read verifying key"),
        ({"root_key_file": None}, "exactly one of root_key_file and passphrase_file"),
        ({"root_key_file": Path("/nonexistent.key")}, "cannot read root key file"),
        ({"allow": {"model": ["worker-0"]}}, "'worker-0' for 'model' is no identity"),
        ({"allow": {"model": ["robot/x"]}}, "is no identity"),
        ({"models_dir": Path("/nonexistent-models")}, "cannot read models_dir"),
    ],
)
async def test_wrong_settings_are_one_clear_line(
    lab: Lab, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    found = await start_with(lab, tmp_path, **changes)
    assert message in found
    assert "\n" not in found


def test_a_vault_without_mtls_does_not_start(lab: Lab, tmp_path: Path) -> None:
    settings = RunningVault(lab, tmp_path, tls_ca=None, tls_certificate=None, tls_key=None).settings
    telemetry = Telemetry("vault", Tracing("vault"), Metrics("vault"), StructuredLogger("vault"))
    with pytest.raises(SealmeshError, match="mTLS only"):
        build(settings, telemetry)


def test_a_vault_with_a_passphrase(lab: Lab, tmp_path: Path) -> None:
    phrase = tmp_path / "phrase"
    phrase.write_text("open sesame\n")
    phrase.chmod(0o600)
    vault = RunningVault(lab, tmp_path, root_key_file=None, passphrase_file=phrase)
    lab.seal_into(lab.plain(SAMPLE_FILES), vault.models / "model", slots=[Lab.passphrase("open sesame")])
    lab.seal_into(lab.plain(SAMPLE_FILES), vault.models / "other", name="other")
    vault.settings = vault.settings.model_copy(
        update={"allow": {"model": ["worker/*"], "other": ["worker/*"]}}
    )
    with vault.running(), vault.client() as client:
        with open_remote_model(client, "model", pinned=[lab.verifying_key]) as model:
            assert len(model.tensors()) == len(SAMPLE_TENSORS)
        with (
            pytest.raises(SealmeshError, match="no passphrase slot"),
            open_remote_model(client, "other", pinned=[lab.verifying_key]),
        ):
            pytest.fail("a model of another root was opened")
    assert vault.audit()[-1]["outcome"] == "OUTCOME_FAILED"


def test_the_vault_as_a_process(lab: Lab, tmp_path: Path) -> None:
    vault = RunningVault(lab, tmp_path)
    vault.add_model()
    flags = [
        *("--models-dir", str(vault.models), "--state-dir", str(vault.state)),
        *("--root-key-file", str(lab.root_key_file), "--verifying-key-file", str(lab.verifying_key_file)),
        *("--allow", '{"model": ["worker/*"]}'),
    ]
    with ServiceProcess("sealmesh.security.vault", ("vault", "local"), vault.authority, flags) as process:
        vault.address = process.grpc_address
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert [line.split()[4:6] for line in limits.splitlines() if "core file" in line] == [["0", "0"]]
        with (
            vault.client() as client,
            open_remote_model(client, "model", pinned=[lab.verifying_key]) as model,
        ):
            assert len(model.tensors()) == len(SAMPLE_TENSORS)
            key = bytes(client.release_key(client.open_model("model").lease))
        assert process.stop() == 0
        log = "\n".join(process.log)
    assert "key released" in log
    assert key.hex() not in log
    assert not any(key in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


# --- parts ---------------------------------------------------------------------------------------------


def test_leases_expire_and_are_bounded(lab: Lab, sample: Path) -> None:
    with lab.open(sample) as model:
        entry = CatalogEntry(sample, model.manifest)
    now = 1000.0
    table = LeaseTable(60, 2, lambda: now)
    holder = PeerIdentity("worker", "w")
    first = table.open(holder, entry)
    now += 59
    assert table.get(first.lease_id, holder) is first
    table.open(holder, entry)
    assert reason(lambda: table.open(holder, entry)) == "OVERLOADED"
    now += 1
    assert reason(lambda: table.get(first.lease_id, holder)) == "LEASE_EXPIRED"
    table.open(holder, entry)
    assert reason(lambda: table.open(holder, entry)) == "OVERLOADED"


def test_an_expired_lease_gives_no_key(lab: Lab, tmp_path: Path) -> None:
    vault = RunningVault(lab, tmp_path, lease_lifetime_ms=1000)
    vault.add_model()
    with vault.running(), vault.client() as client:
        info = client.open_model("model")
        assert info.lifetime_s == 1.0
        client.release_key(info.lease)

        def read_until_refused() -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                list(client.read_ciphertext(info.lease, "config.json.sealed"))

        assert reason(read_until_refused) == "LEASE_EXPIRED"
        assert reason(lambda: client.release_key(info.lease)) == "LEASE_EXPIRED"
    assert vault.audit()[-1]["reason"] == "LEASE_EXPIRED"


def test_the_allow_list_denies_by_default() -> None:
    allow = AllowList({"a": ["worker/w1"], "b": ["worker/*"], "tenant:x": ["worker/w1"]})
    w1, w2 = PeerIdentity("worker", "w1"), PeerIdentity("worker", "w2")
    gateway = PeerIdentity("gateway", "w1")
    assert [allow.permits_model("a", peer) for peer in (w1, w2, gateway)] == [True, False, False]
    assert [allow.permits_model("b", peer) for peer in (w1, w2, gateway)] == [True, True, False]
    assert [allow.permits_model("c", peer) for peer in (w1, w2)] == [False, False]
    assert [allow.permits_tenant("x", peer) for peer in (w1, w2)] == [True, False]
    assert not allow.permits_tenant("y", w1)
    assert not AllowList({"tenant:*": ["worker/*"]}).permits_model("tenant:*x", gateway)


def test_the_vault_never_logs_a_key(
    vault: RunningVault, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sealmesh"), "propagate", True)
    # Also of the package's own logger, which an earlier service of this process may have made quieter.
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "sealmesh"), vault.client() as client:
        key = bytes(client.release_key(client.open_model("model").lease))
    assert "key released" in caplog.text
    assert key.hex() not in caplog.text
    assert repr(key)[2:-1] not in caplog.text
