"""Signatures over manifests: who sealed a model. The suite number leaves room for SM2-with-SM3."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sealmesh.security.errors import configuration_invalid
from sealmesh.security.files import atomic_write, read_private_file
from sealmesh.security.memory import wipe
from sealmesh.security.sm4.sm3 import sm3

_KEY_ID_BYTES = 8


class SignatureSuite(IntEnum):
    """How a manifest is signed; the numbers are part of the format. 2 is kept for SM2-with-SM3."""

    ED25519 = 1


@dataclass(frozen=True)
class VerifyingKey:
    """A public key that signatures are checked with."""

    suite: SignatureSuite
    public_key: bytes

    @property
    def key_id(self) -> str:
        """16 hex digits that name the key."""
        return sm3(bytes([self.suite]), self.public_key)[:_KEY_ID_BYTES].hex()

    def verifies(self, message: bytes, signature: bytes) -> bool:
        """Whether the signature is this key's over the message."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(signature, message)
        except (InvalidSignature, ValueError):
            # ValueError: not a point of the curve, so nothing verifies under it.
            return False
        return True

    def write(self, path: Path) -> None:
        """Writes the key as SubjectPublicKeyInfo PEM, readable by all."""
        public = Ed25519PublicKey.from_public_bytes(self.public_key)
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        atomic_write(path, pem, mode=0o644)


class Signer(Protocol):
    """Signs manifests."""

    @property
    def verifying_key(self) -> VerifyingKey: ...

    def sign(self, message: bytes) -> bytes: ...


class Ed25519Signer:
    """Signs with an Ed25519 key (RFC 8032)."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key

    @property
    def verifying_key(self) -> VerifyingKey:
        return VerifyingKey(SignatureSuite.ED25519, self._private_key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)


def create_signing_key(private_path: Path, public_path: Path) -> VerifyingKey:
    """Makes a key pair: PKCS#8 PEM (0600) and SubjectPublicKeyInfo PEM (0644).

    Raises CONFIGURATION_INVALID when the private key exists: models signed by it would be orphaned.
    """
    key = Ed25519PrivateKey.generate()
    pem = bytearray(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    try:
        private_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(private_path, pem, mode=0o600, replace=False)
    except FileExistsError as exc:
        raise configuration_invalid(f"signing key {private_path} exists; it is never overwritten") from exc
    finally:
        wipe(pem)
    verifying_key = Ed25519Signer(key).verifying_key
    verifying_key.write(public_path)
    return verifying_key


def load_signer(path: Path) -> Ed25519Signer:
    """Loads a private key (PKCS#8 PEM, 0600); raises CONFIGURATION_INVALID when it cannot be used."""
    pem = read_private_file(path, "signing key")
    try:
        key = serialization.load_pem_private_key(bytes(pem), None)
    except (ValueError, TypeError) as exc:
        raise configuration_invalid(f"signing key {path} is not an unencrypted PEM private key") from exc
    finally:
        wipe(pem)
    if not isinstance(key, Ed25519PrivateKey):
        raise configuration_invalid(f"signing key {path} is not an Ed25519 key")
    return Ed25519Signer(key)


def load_verifying_key(path: Path) -> VerifyingKey:
    """Loads a public key (SubjectPublicKeyInfo PEM); raises CONFIGURATION_INVALID when it cannot be used."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as exc:
        raise configuration_invalid(f"cannot read verifying key {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise configuration_invalid(f"verifying key {path} is not a PEM public key") from exc
    if not isinstance(key, Ed25519PublicKey):
        raise configuration_invalid(f"verifying key {path} is not an Ed25519 key")
    return VerifyingKey(SignatureSuite.ED25519, key.public_bytes_raw())
