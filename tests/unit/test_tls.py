"""Mutual TLS: who is let in, who is believed, and what happens to certificates over time."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from sealmesh.security.tls import (
    ROLES,
    LocalAuthority,
    PeerIdentity,
    RoleAuthorizer,
    TlsFiles,
    channel_credentials,
    server_credentials,
)
from sealmesh.telemetry.runtime.channel import open_channel, open_sync_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.interceptors import Context
from sealmesh.telemetry.runtime.server import ServerSpec, ServiceServer
from sealmesh.telemetry.runtime.settings import ServiceSettings
from sealmesh.telemetry.telemetry import Telemetry

SERVICE = "test.v1.Vault"
Code = grpc.StatusCode
Serve = Callable[[TlsFiles], Awaitable[str]]


@pytest.fixture
def authority(tmp_path: Path) -> LocalAuthority:
    return LocalAuthority(tmp_path / "tls").create()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a vault that tells callers who they are; workers may `Open`, only operators `Rotate`."""
    async with AsyncExitStack() as stack:

        async def who(request: bytes, context: Context) -> bytes:
            return str(PeerIdentity.of(context)).encode()

        def register(server: grpc.aio.Server) -> None:
            names = ("Open", "Rotate", "Unlisted")
            handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(who) for name in names}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

        async def start(files: TlsFiles) -> str:
            settings = ServiceSettings(http_address="", drain_grace_ms=500)
            telemetry = Telemetry.build("vault", settings)
            stack.push_async_callback(telemetry.close)
            spec = ServerSpec(
                settings=settings,
                telemetry=telemetry,
                service_names=[SERVICE],
                register=register,
                authorize=RoleAuthorizer(
                    {SERVICE: ["worker", "operator"], f"/{SERVICE}/Rotate": ["operator"]}
                ),
                credentials=server_credentials(files),
            )
            return (await stack.enter_async_context(ServiceServer(spec))).grpc_address

        yield start


async def call(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    method: str = f"/{SERVICE}/Open",
    expected_role: str | None = "vault",
) -> bytes:
    async with open_channel(address, credentials, expected_role=expected_role) as channel:
        raw: Any = channel
        return bytes(await raw.unary_unary(method)(b"", timeout=5))


async def refused(*args: Any, **kwargs: Any) -> SealmeshError:
    with pytest.raises(grpc.RpcError) as info:
        await call(*args, **kwargs)
    return SealmeshError.from_rpc_error(info.value)


# --- handshakes --------------------------------------------------------------------------------------


async def test_both_sides_know_each_other(authority: LocalAuthority, serve: Serve) -> None:
    address = await serve(authority.issue("vault", "vault"))
    worker = channel_credentials(authority.issue("worker", "worker-0"))
    assert await call(address, worker) == b"worker/worker-0"

    def in_a_thread() -> bytes:
        with open_sync_channel(address, worker, expected_role="vault") as channel:
            raw: Any = channel
            return bytes(raw.unary_unary(f"/{SERVICE}/Open")(b"", timeout=5))

    assert await asyncio.to_thread(in_a_thread) == b"worker/worker-0"


async def test_a_client_without_a_certificate_fails_the_handshake(
    authority: LocalAuthority, serve: Serve
) -> None:
    address = await serve(authority.issue("vault", "vault"))
    only_ca = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    assert (await refused(address, only_ca)).code is Code.UNAVAILABLE
    assert (await refused(address, only_ca, "/grpc.health.v1.Health/Check")).code is Code.UNAVAILABLE
    assert (await refused(address, None)).code is Code.UNAVAILABLE


async def test_a_client_of_another_authority_fails_the_handshake(
    authority: LocalAuthority, serve: Serve, tmp_path: Path
) -> None:
    address = await serve(authority.issue("vault", "vault"))
    other = LocalAuthority(tmp_path / "other").create().issue("worker", "worker-0")
    mixed = TlsFiles(authority.ca, other.certificate, other.key)
    assert (await refused(address, channel_credentials(mixed))).code is Code.UNAVAILABLE


async def test_a_client_refuses_a_server_of_another_role_or_authority(
    authority: LocalAuthority, serve: Serve, tmp_path: Path
) -> None:
    worker = channel_credentials(authority.issue("worker", "worker-0"))
    impostor = await serve(authority.issue("worker", "worker-1"))
    assert (await refused(impostor, worker)).code is Code.UNAVAILABLE
    stranger = await serve(LocalAuthority(tmp_path / "other").create().issue("vault", "vault"))
    assert (await refused(stranger, worker)).code is Code.UNAVAILABLE


async def test_an_expired_client_fails_the_handshake(authority: LocalAuthority, serve: Serve) -> None:
    address = await serve(authority.issue("vault", "vault"))
    expired = LocalAuthority(authority.ca.parent, leaf_days=0).issue("worker", "late")
    assert (await refused(address, channel_credentials(expired))).code is Code.UNAVAILABLE


async def test_the_wrong_role_is_denied(authority: LocalAuthority, serve: Serve) -> None:
    address = await serve(authority.issue("vault", "vault"))
    gateway = channel_credentials(authority.issue("gateway", "gateway"))
    worker = channel_credentials(authority.issue("worker", "worker-0"))
    operator = channel_credentials(authority.issue("operator", "cli"))
    denied = await refused(address, gateway)
    assert (denied.code, denied.reason) == (Code.PERMISSION_DENIED, "ROLE_DENIED")
    assert "role gateway" in denied.message
    assert (await refused(address, worker, f"/{SERVICE}/Rotate")).reason == "ROLE_DENIED"
    assert await call(address, operator, f"/{SERVICE}/Rotate") == b"operator/cli"
    assert await call(address, worker, f"/{SERVICE}/Unlisted") == b"worker/worker-0"
    assert await call(address, gateway, "/grpc.health.v1.Health/Check") == b"\x08\x01"


async def test_what_is_not_listed_nobody_may_call() -> None:
    authorize = RoleAuthorizer({"other.v1.Service": ROLES})
    context: Any = _Peer([b"spiffe://sealmesh/operator/cli"])
    await authorize(context, "/other.v1.Service/Anything")
    with pytest.raises(SealmeshError, match="role operator may not call"):
        await authorize(context, f"/{SERVICE}/Open")
    with pytest.raises(SealmeshError, match="may not call"):
        await authorize(context, "/other.v1.Service.More/Anything")


def test_an_unknown_role_in_a_table_is_a_defect() -> None:
    with pytest.raises(ValueError, match="unknown roles"):
        RoleAuthorizer({SERVICE: ["wroker"]})


class _Peer:
    """What a context tells of a peer's certificate."""

    def __init__(self, names: list[bytes]) -> None:
        self._names = names

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": self._names} if self._names else {}


@pytest.mark.parametrize(
    "names",
    [
        [],
        [b"localhost", b"worker.sealmesh.internal"],
        [b"spiffe://sealmesh/admin/x"],
        [b"spiffe://sealmesh/worker"],
        [b"spiffe://sealmesh/worker/"],
        [b"spiffe://other/worker/w"],
        [b"spiffe://sealmesh/worker/w/../../vault"],
        [b"spiffe://sealmesh/worker/w\n"],
        [b"xspiffe://sealmesh/worker/w"],
        [b"spiffe://sealmesh/worker/a", b"spiffe://sealmesh/vault/b"],
        [b"\xff\xfe"],
    ],
)
def test_certificates_without_exactly_one_identity_are_refused(names: list[bytes]) -> None:
    peer: Any = _Peer(names)
    with pytest.raises(SealmeshError) as info:
        PeerIdentity.of(peer)
    assert (info.value.code, info.value.reason) == (Code.UNAUTHENTICATED, "CREDENTIAL_INVALID")


# --- the authority -----------------------------------------------------------------------------------


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_certificates_say_what_was_agreed(authority: LocalAuthority) -> None:
    leaf, ca = certificate(authority.issue("kvstore", "kv-1").certificate), certificate(authority.ca)
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://sealmesh/kvstore/kv-1"]
    assert names.get_values_for_type(x509.DNSName) == ["kvstore.sealmesh.internal", "localhost"]
    assert "127.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    for one in (leaf, ca):
        key = one.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    now = datetime.now(UTC)
    assert timedelta(days=89) < leaf.not_valid_after_utc - now <= timedelta(days=90)
    assert timedelta(days=3649) < ca.not_valid_after_utc - now <= timedelta(days=3650)


def test_keys_are_for_their_owner_only_and_nothing_is_left_over(authority: LocalAuthority) -> None:
    files = authority.issue("vault", "vault")
    folder = authority.ca.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for key in (files.key, folder / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert {p.name for p in folder.iterdir()} == {"ca.pem", "ca.key", "vault-vault.pem", "vault-vault.key"}


def test_what_is_good_is_kept(authority: LocalAuthority) -> None:
    files = authority.issue("vault", "vault")
    before = [path.read_bytes() for path in (authority.ca, files.certificate, files.key)]
    again = LocalAuthority(authority.ca.parent).create()
    assert again.issue("vault", "vault") == files
    assert [path.read_bytes() for path in (authority.ca, files.certificate, files.key)] == before


def test_what_has_expired_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    short = LocalAuthority(folder, leaf_days=0).create().issue("vault", "vault")
    old = certificate(short.certificate).serial_number
    renewed = LocalAuthority(folder).create().issue("vault", "vault")
    assert certificate(renewed.certificate).serial_number != old


def test_a_leaf_near_its_end_is_replaced(authority: LocalAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    from sealmesh.security import tls

    files = authority.issue("vault", "vault")
    first = certificate(files.certificate).serial_number

    class Later(datetime):
        ahead = timedelta(0)

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + cls.ahead

    monkeypatch.setattr(tls, "datetime", Later)
    Later.ahead = timedelta(days=55)
    assert certificate(authority.issue("vault", "vault").certificate).serial_number == first
    Later.ahead = timedelta(days=65)
    assert certificate(authority.issue("vault", "vault").certificate).serial_number != first


def test_a_leaf_that_is_broken_or_not_of_this_authority_is_replaced(
    authority: LocalAuthority, tmp_path: Path
) -> None:
    files = authority.issue("vault", "vault")
    ca = certificate(authority.ca)
    other = LocalAuthority(tmp_path / "other").create().issue("vault", "vault")
    foreign_key, own_key = other.key.read_bytes(), files.key.read_bytes()
    for spoil in (
        lambda: files.certificate.write_text("junk"),
        lambda: files.certificate.write_bytes(other.certificate.read_bytes()),
        lambda: files.key.write_bytes(foreign_key),
        files.key.unlink,
    ):
        spoil()
        authority.issue("vault", "vault")
        leaf = certificate(files.certificate)
        leaf.verify_directly_issued_by(ca)
        assert files.key.read_bytes() not in (foreign_key, own_key)
        assert stat.S_IMODE(files.key.stat().st_mode) == 0o600


def test_a_key_that_is_not_the_authoritys_is_said(authority: LocalAuthority, tmp_path: Path) -> None:
    other = LocalAuthority(tmp_path / "other").create()
    (authority.ca.parent / "ca.key").write_bytes((other.ca.parent / "ca.key").read_bytes())
    with pytest.raises(SealmeshError, match=r"ca\.key does not belong to ca\.pem"):
        LocalAuthority(authority.ca.parent).create()


@pytest.mark.parametrize(
    ("role", "name"),
    [("admin", "x"), ("worker", ""), ("worker", "../x"), ("worker", "A"), ("worker", "a" * 64), ("", "x")],
)
def test_only_known_roles_and_plain_names_are_issued(authority: LocalAuthority, role: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown role|no service name"):
        authority.issue(role, name)


def test_unreadable_files_are_one_clear_line(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "x.pem", tmp_path / "x.key")
    for make in (server_credentials, channel_credentials):
        with pytest.raises(SealmeshError, match="cannot be read: No such file") as info:
            make(files)
        assert info.value.reason == "CONFIGURATION_INVALID"


def test_settings_name_all_files_or_none(authority: LocalAuthority) -> None:
    files = authority.issue("vault", "vault")
    settings = ServiceSettings(tls_ca=files.ca, tls_certificate=files.certificate, tls_key=files.key)
    assert TlsFiles.from_settings(settings) == files
    assert TlsFiles.from_settings(ServiceSettings()) is None
    with pytest.raises(ValueError, match="mTLS needs all three"):
        ServiceSettings(tls_ca=files.ca)
