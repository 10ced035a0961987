"""SM3 (GB/T 32905-2016) digests, HMAC-SM3 and HKDF-SM3 (RFC 2104 and RFC 5869 with SM3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.constant_time import bytes_eq
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sealmesh.security.memory import Secret
from sealmesh.security.sm4.engine import EngineUnavailableError
from sealmesh.security.sm4.libgcrypt import LibGcrypt, LibGcryptSm3

DIGEST_BYTES = 32


class Sm3(Protocol):
    """A running SM3 digest."""

    def update(self, data: bytes | bytearray | memoryview) -> None: ...

    def digest(self) -> bytes:
        """32 bytes; ends the digest."""
        ...


class OpenSslSm3:
    """SM3 by the `cryptography` package."""

    def __init__(self) -> None:
        self._hash = hashes.Hash(hashes.SM3())

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.finalize()


def bulk_sm3() -> Callable[[], Sm3]:
    """The factory of the fastest SM3 here for large data: libgcrypt, else `cryptography`."""
    try:
        library = LibGcrypt()
    except EngineUnavailableError:
        # Not a failure: the fallback gives the same digests, and `select_engine` reports the library.
        return OpenSslSm3
    return lambda: LibGcryptSm3(library)


def sm3(*parts: bytes | bytearray | memoryview) -> bytes:
    """SM3 over the concatenation of the parts; 32 bytes."""
    digest = OpenSslSm3()
    for part in parts:
        digest.update(part)
    return digest.digest()


def hmac_sm3(key: Secret, *parts: bytes | bytearray | memoryview) -> bytes:
    """HMAC-SM3 over the concatenation of the parts; 32 bytes."""
    mac = HMAC(bytes(key), hashes.SM3())
    for part in parts:
        mac.update(part)
    return mac.finalize()


def hkdf_sm3(secret: Secret, *, salt: bytes, info: bytes, length_bytes: int) -> bytearray:
    """HKDF-SM3 (extract and expand); the result is the caller's to wipe."""
    derived = bytearray(length_bytes)
    HKDF(hashes.SM3(), length_bytes, salt, info).derive_into(secret, derived)
    return derived


def equal(left: bytes | bytearray, right: bytes | bytearray) -> bool:
    """Comparison in constant time."""
    return bytes_eq(bytes(left), bytes(right))
