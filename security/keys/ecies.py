"""Keys in transit: wrapped to a one-time public key, as `WrappedKey` in model_vault.proto documents.

X25519 (RFC 7748) with a fresh sender key, HKDF-SM3 (RFC 5869), SM4-GCM. mTLS protects the wire already;
the wrapping keeps keys out of whatever sees the message in the clear: proxies that end TLS, logs, dumps.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from sealmesh.security.errors import integrity_failure, invalid_request
from sealmesh.security.memory import Region, Secret, wipe
from sealmesh.security.sm4.engine import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Sm4GcmEngine, TagMismatchError
from sealmesh.security.sm4.sm3 import hkdf_sm3

PUBLIC_KEY_BYTES = 32
_INFO = b"sealmesh v1 wrapped key"


@dataclass(frozen=True)
class Wrapped:
    """A key under a one-time key pair of the sender."""

    sender_public_key: bytes
    ciphertext: bytes  # with the tag at its end


def lease_subject(lease: str) -> bytes:
    """Associated data of a model's key: which lease it was released for."""
    return b"lease\x00" + lease.encode()


def tenant_subject(handle: str, epoch: int) -> bytes:
    """Associated data of a tenant's key: whose it is."""
    return b"tenant\x00" + handle.encode() + b"\x00" + epoch.to_bytes(8, "little")


def _wrapping_key(shared: Secret, sender: bytes, recipient: bytes) -> bytearray:
    return hkdf_sm3(shared, salt=sender + recipient, info=_INFO, length_bytes=KEY_BYTES)


def wrap_key(key: Secret, recipient_public_key: bytes, subject: bytes, engine: Sm4GcmEngine) -> Wrapped:
    """Encrypts a key to a recipient. Raises INVALID_REQUEST for a public key that is none."""
    sender = X25519PrivateKey.generate()
    sender_public = sender.public_key().public_bytes_raw()
    try:
        shared = sender.exchange(X25519PublicKey.from_public_bytes(recipient_public_key))
    except ValueError as exc:
        # Wrong length, or a low-order point that would make the shared secret zero.
        raise invalid_request("recipient_public_key is not a usable X25519 public key") from exc
    wrapping_key = _wrapping_key(shared, sender_public, recipient_public_key)
    cipher = engine.new_cipher(wrapping_key)
    sealed = bytearray(key)
    try:
        # The wrapping key is used once, so the nonce may be constant.
        tag = cipher.seal_into(bytes(NONCE_BYTES), subject, Region.of(sealed))
    finally:
        cipher.close()
        wipe(wrapping_key)
    return Wrapped(sender_public, bytes(sealed) + tag)


class OneTimeKey:
    """A recipient's key pair for exactly one wrapped key."""

    def __init__(self) -> None:
        self._private_key: X25519PrivateKey | None = X25519PrivateKey.generate()
        self.public_key = self._private_key.public_key().public_bytes_raw()

    def unwrap(self, wrapped: Wrapped, subject: bytes, engine: Sm4GcmEngine) -> bytearray:
        """The key, for the caller to wipe. Raises INTEGRITY_FAILURE when it does not verify."""
        private_key, self._private_key = self._private_key, None
        if private_key is None:
            raise RuntimeError("a one-time key was used twice")
        if len(wrapped.ciphertext) < TAG_BYTES:
            raise integrity_failure("the released key is too short")
        try:
            shared = private_key.exchange(X25519PublicKey.from_public_bytes(wrapped.sender_public_key))
        except ValueError as exc:
            raise integrity_failure("the released key names an unusable sender key") from exc
        wrapping_key = _wrapping_key(shared, wrapped.sender_public_key, self.public_key)
        key = bytearray(wrapped.ciphertext[:-TAG_BYTES])
        cipher = engine.new_cipher(wrapping_key)
        try:
            cipher.open_into(bytes(NONCE_BYTES), subject, Region.of(key), wrapped.ciphertext[-TAG_BYTES:])
        except TagMismatchError:
            raise integrity_failure("the released key does not verify: it is not for this subject") from None
        finally:
            cipher.close()
            wipe(wrapping_key)
        return key
