"""What inner services may learn of a tenant, and the secret that it is derived from.

Inner services see HMAC-SM3 (GB/T 32905, RFC 2104) of the tenant's name and epoch under the gateway's secret:
opaque, stable within an epoch, equal over all gateways that share the secret. Each purpose has its own
label, and every part is length-prefixed, so no two inputs can meet.
"""

from __future__ import annotations

import secrets
import struct
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import hashes, hmac
from sealmesh.gateway.access.keys import write_private
from sealmesh.protos.common.v1 import types_pb2

SECRET_BYTES: Final = 32


class SecretFileError(ValueError):
    """The gateway's secret cannot be used; the message says why and holds none of it."""


def create_secret_file(path: Path) -> None:
    """Write a new random secret (64 hex characters, mode 0600) unless ``path`` is there already."""
    if not path.exists():
        write_private(path, (secrets.token_hex(SECRET_BYTES) + "\n").encode())


def read_secret_file(path: Path) -> bytes:
    """The 32-byte secret; raises SecretFileError."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
        secret = bytes.fromhex(text)
    except OSError as error:
        raise SecretFileError(f"{path}: {error.strerror}; `sealmesh up` makes it") from None
    except ValueError:
        raise SecretFileError(f"{path}: must hold {2 * SECRET_BYTES} hex characters") from None
    if len(secret) != SECRET_BYTES:
        raise SecretFileError(f"{path}: must hold {2 * SECRET_BYTES} hex characters")
    if mode & 0o077:
        raise SecretFileError(
            f"{path}: others may read or write it (mode {mode & 0o777:o}); run chmod 600 on it"
        )
    return secret


class TenantDeriver:
    """Derives per-tenant values from the gateway's secret. Results are kept, so a request costs a look-up."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise SecretFileError(f"the gateway's secret must have at least {SECRET_BYTES} bytes")
        self._secret = secret
        self._contexts: dict[tuple[str, int], types_pb2.TenantContext] = {}
        self._pii_keys: dict[tuple[str, int], bytes] = {}

    def context(self, tenant: str, epoch: int) -> types_pb2.TenantContext:
        """What every inner request of this tenant carries. Do not change the message: it is shared."""
        found = self._contexts.get((tenant, epoch))
        if found is None:
            found = self._contexts[(tenant, epoch)] = types_pb2.TenantContext(
                handle=self._derive("tenant-handle", tenant, epoch)[:16].hex(),
                epoch=epoch,
                cache_salt=self._derive("cache-salt", tenant, epoch)[:16].hex(),
            )
        return found

    def pii_key(self, tenant: str, epoch: int) -> bytes:
        """32 bytes that key the placeholders of a tenant's epoch; never leaves the gateway."""
        found = self._pii_keys.get((tenant, epoch))
        if found is None:
            found = self._pii_keys[(tenant, epoch)] = self._derive("pii-placeholder", tenant, epoch)
        return found

    def _derive(self, purpose: str, tenant: str, epoch: int) -> bytes:
        mac = hmac.HMAC(self._secret, hashes.SM3())
        for part in (f"sealmesh/gateway/{purpose}/v1".encode(), tenant.encode()):
            mac.update(struct.pack(">I", len(part)) + part)
        mac.update(struct.pack(">Q", epoch))
        return mac.finalize()
