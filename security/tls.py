"""Mutual TLS between services: a local authority, certificates that carry a role, and who may call what.

A certificate names its role twice: as the URI `spiffe://sealmesh/<role>/<name>` (SPIFFE ID), which servers
authorise by, and as the DNS name `<role>.sealmesh.internal`, which clients verify, wherever the server
runs. Keys are ECDSA P-256; profiles follow RFC 5280.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, Self, TypeAlias

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from opentelemetry import trace
from sealmesh.telemetry.attributes import Attribute, set_attributes
from sealmesh.telemetry.runtime.channel import role_host
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.interceptors import Context
from sealmesh.telemetry.runtime.settings import ServiceSettings

__all__ = [
    "ROLES",
    "LocalAuthority",
    "PeerIdentity",
    "RoleAuthorizer",
    "TlsFiles",
    "channel_credentials",
    "server_credentials",
]

ROLES: Final = ("gateway", "worker", "vault", "kvstore", "operator")

_TRUST_DOMAIN: Final = "sealmesh"
_SPIFFE_ID: Final = re.compile(rf"spiffe://{_TRUST_DOMAIN}/([a-z]+)/([a-z0-9][a-z0-9.-]{{0,62}})")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
_CLOCK_SKEW: Final = timedelta(minutes=5)
_CA_LIFETIME: Final = timedelta(days=3650)

PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one service: the authority it trusts, its certificate and its private key."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> Self | None:
        """The files that the settings name, None when they name none (plain text)."""
        if settings.tls_ca is None or settings.tls_certificate is None or settings.tls_key is None:
            return None
        return cls(settings.tls_ca, settings.tls_certificate, settings.tls_key)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server that refuses clients without a certificate of the authority.

    Raises:
        SealmeshError: CONFIGURATION_INVALID when a file cannot be read.
    """
    return grpc.ssl_server_credentials(
        [(_read(files.key), _read(files.certificate))],
        root_certificates=_read(files.ca),
        require_client_auth=True,
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a client; with `expected_role` of `open_channel` the server's role is verified.

    Raises:
        SealmeshError: CONFIGURATION_INVALID when a file cannot be read.
    """
    return grpc.ssl_channel_credentials(_read(files.ca), _read(files.key), _read(files.certificate))


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who is at the other end of a connection, as its certificate says."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @classmethod
    def of(cls, context: Context) -> Self:
        """The peer of a call.

        Raises:
            SealmeshError: UNAUTHENTICATED, CREDENTIAL_INVALID when the connection carries no certificate
                with exactly one sealmesh identity.
        """
        names = context.auth_context().get("x509_subject_alternative_name", ())
        identities = [
            match for name in names if (match := _SPIFFE_ID.fullmatch(name.decode("utf-8", "replace")))
        ]
        if len(identities) != 1 or identities[0][1] not in ROLES:
            raise SealmeshError(
                grpc.StatusCode.UNAUTHENTICATED,
                "CREDENTIAL_INVALID",
                "the client's certificate carries no sealmesh role; issue one with the mesh's authority",
            )
        return cls(identities[0][1], identities[0][2])


class RoleAuthorizer:
    """Lets roles call methods; what is not listed nobody may call.

    Args:
        allowed: roles by full method (`/package.Service/Method`) or service (`package.Service`); a method's
            own entry replaces its service's.
    """

    def __init__(self, allowed: Mapping[str, Collection[str]]) -> None:
        self._allowed = {key.lstrip("/"): frozenset(roles) for key, roles in allowed.items()}
        unknown = {role for roles in self._allowed.values() for role in roles} - set(ROLES)
        if unknown:
            raise ValueError(f"unknown roles {sorted(unknown)}; known are {', '.join(ROLES)}")

    async def __call__(self, context: Context, full_method: str) -> None:
        """Returns when the peer may call the method.

        Raises:
            SealmeshError: UNAUTHENTICATED without an identity, PERMISSION_DENIED with the wrong role.
        """
        peer = PeerIdentity.of(context)
        set_attributes(trace.get_current_span(), {Attribute.PEER_ROLE: peer.role})
        method = full_method.lstrip("/")
        roles = self._allowed.get(method, self._allowed.get(method.rpartition("/")[0], frozenset()))
        if peer.role not in roles:
            raise SealmeshError(
                grpc.StatusCode.PERMISSION_DENIED,
                "ROLE_DENIED",
                f"role {peer.role} may not call {method}",
                metadata={"role": peer.role},
            )


class LocalAuthority:
    """A certificate authority in a folder, for a mesh on one machine.

    Its key never leaves the folder. `create` and `issue` keep what is still good and replace what has
    expired, is about to (less than a third of its life left), or does not belong to the authority.

    Args:
        directory: where `ca.pem`, `ca.key` and `<role>-<name>.{pem,key}` lie; made 0700 when missing.
        leaf_days: life of a service's certificate in days.
    """

    def __init__(self, directory: Path, *, leaf_days: int = 90) -> None:
        self._dir = directory
        self._leaf_lifetime = timedelta(days=leaf_days)

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self._dir / "ca.pem"

    def create(self) -> Self:
        """Makes the authority unless it is there and good.

        Raises:
            SealmeshError: CONFIGURATION_INVALID when its files are unreadable or do not match.
        """
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.ca.exists() and self._ca_key.exists():
            certificate, key = self._authority()
            if certificate.public_key() != key.public_key():
                raise _broken(self._ca_key, "does not belong to ca.pem; remove both to make a new authority")
            if not _stale(certificate):
                return self
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sealmesh local authority")])
        certificate = (
            _builder(name, name, key.public_key(), _CA_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        # The key first: a certificate without its key would look complete after a crash.
        _write(self._ca_key, _key_pem(key), 0o600)
        _write(self.ca, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return self

    def issue(self, role: str, name: str) -> TlsFiles:
        """The files of a service, made unless they are there and good.

        Raises:
            ValueError: for an unknown role or a name other than lower-case letters, digits, dots and
                dashes (at most 63).
            SealmeshError: CONFIGURATION_INVALID when the authority's files are missing or unreadable.
        """
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; known are {', '.join(ROLES)}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no service name: use lower-case letters, digits, dots and dashes")
        stem = f"{role}-{name}"
        files = TlsFiles(self.ca, self._dir / f"{stem}.pem", self._dir / f"{stem}.key")
        authority, authority_key = self._authority()
        if _good(files, authority):
            return files
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role}/{name}"[:64])])
        certificate = (
            _builder(subject, authority.subject, key.public_key(), self._leaf_lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        x509.UniformResourceIdentifier(f"spiffe://{_TRUST_DOMAIN}/{role}/{name}"),
                        x509.DNSName(role_host(role)),
                        x509.DNSName("localhost"),
                        x509.IPAddress(IPv4Address("127.0.0.1")),
                        x509.IPAddress(IPv6Address("::1")),
                    ]
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        _write(files.key, _key_pem(key), 0o600)
        _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return files

    @property
    def _ca_key(self) -> Path:
        return self._dir / "ca.key"

    def _authority(self) -> tuple[x509.Certificate, PrivateKey]:
        return _load_certificate(self.ca), _load_key(self._ca_key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _stale(certificate: x509.Certificate) -> bool:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return end - datetime.now(UTC) < (end - start) / 3


def _good(files: TlsFiles, authority: x509.Certificate) -> bool:
    """Whether a service's files are whole, match, are of this authority and fresh."""
    if not files.certificate.exists() or not files.key.exists():
        return False
    try:
        certificate, key = _load_certificate(files.certificate), _load_key(files.key)
        certificate.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001  # unreadable, foreign or forged alike: it is replaced
        return False
    return certificate.public_key() == key.public_key() and not _stale(certificate)


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError:
        raise _broken(path, "is not a PEM certificate") from None


def _load_key(path: Path) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError):
        raise _broken(path, "is not a PEM private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _broken(path, "is not an elliptic-curve key")
    return key


def _key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise _broken(path, f"cannot be read: {exc.strerror}") from None


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file in one step; it never exists half written or with wider permissions."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def _broken(path: Path, what: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", f"{path} {what}")
