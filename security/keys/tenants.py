"""KV-cache keys of tenants: random, one per handle and epoch, kept wrapped in the vault's state folder.

root → vault key (one slot file, so that a passphrase is stretched once per start) → tenant keys.
Deleting a tenant key makes everything under it unreadable.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from sealmesh.security.errors import configuration_invalid, integrity_failure, invalid_request
from sealmesh.security.files import atomic_write, sync_folder
from sealmesh.security.keys.slots import (
    DATA_KEY_BYTES,
    MAX_FILE_BYTES,
    MODEL_ID_BYTES,
    SlotFile,
    key_commitment,
    make_slot,
)
from sealmesh.security.keys.sources import KeySource
from sealmesh.security.memory import Region, wipe
from sealmesh.security.sm4.engine import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Sm4GcmEngine, TagMismatchError
from sealmesh.security.sm4.sm3 import DIGEST_BYTES, hkdf_sm3

TENANT_KEY_BYTES = 32
_MAGIC = b"SMSHTKEY"
_SALT_BYTES = 16
_HANDLE = re.compile(r"[0-9a-f]{32}")
_FILE_BYTES = len(_MAGIC) + _SALT_BYTES + TENANT_KEY_BYTES + TAG_BYTES


class TenantKeyStore:
    """The tenant keys of one vault. Methods are blocking and safe to call from several threads.

    Args:
        state_dir: the vault's state folder.
        engine: SM4 engine.
    """

    def __init__(self, state_dir: Path, engine: Sm4GcmEngine) -> None:
        self._folder = state_dir / "tenants"
        self._vault_key_path = state_dir / "vault-key.slots"
        self._engine = engine
        self._vault_key: bytearray | None = None

    def open(self, source: KeySource) -> None:
        """Opens the vault key, making it on first use.

        Raises KEY_SLOT_MISMATCH when the root is not the one that made it, CONFIGURATION_INVALID when the
        folder cannot be used.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._vault_key_path.exists():
                self._create(source)
            encoded = self._vault_key_path.read_bytes()
        except OSError as exc:
            raise configuration_invalid(
                f"cannot use the vault's state folder {self._folder.parent}: {exc}"
            ) from exc
        identity, commitment, slots = (
            encoded[:MODEL_ID_BYTES],
            encoded[MODEL_ID_BYTES:][:DIGEST_BYTES],
            encoded[MODEL_ID_BYTES + DIGEST_BYTES :],
        )
        what = str(self._vault_key_path)
        self._vault_key = SlotFile.decode(slots, what).unlock(
            source, model_id=identity, commitment=commitment, engine=self._engine, what=what
        )

    def _create(self, source: KeySource) -> None:
        vault_key = bytearray(secrets.token_bytes(DATA_KEY_BYTES))
        identity = secrets.token_bytes(MODEL_ID_BYTES)
        try:
            slot = make_slot(
                source, model_id=identity, data_key=vault_key, engine=self._engine, label=source.kind.label
            )
            slots = SlotFile.build(identity, [slot], vault_key).encode()
            assert len(slots) <= MAX_FILE_BYTES
            content = identity + key_commitment(vault_key, identity) + slots
            atomic_write(self._vault_key_path, content, mode=0o600, replace=False)
        except FileExistsError:
            # Another process was faster: its key is the one that counts.
            return
        finally:
            wipe(vault_key)

    def key(self, handle: str, epoch: int) -> bytearray:
        """The key of a tenant (32 bytes, caller wipes), made on first use.

        Raises INVALID_REQUEST for a handle that is not 32 hex digits or an epoch out of range,
        INTEGRITY_FAILURE for a damaged or moved file.
        """
        path = self._path(handle, epoch)
        if not path.exists():
            self._make(path, handle, epoch)
        return self._unwrap(path, handle, epoch)

    def erase(self, handle: str, epoch: int) -> bool:
        """Deletes a tenant's key for good; True when there was one."""
        path = self._path(handle, epoch)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_folder(self._folder)
        return True

    def close(self) -> None:
        """Wipes the vault key."""
        if self._vault_key is not None:
            wipe(self._vault_key)
            self._vault_key = None

    def _path(self, handle: str, epoch: int) -> Path:
        if not _HANDLE.fullmatch(handle):
            raise invalid_request("a tenant handle is 32 lower-case hex digits")
        if not 1 <= epoch < 1 << 63:
            raise invalid_request("a tenant epoch starts at 1")
        return self._folder / f"{handle}-{epoch}.key"

    def _wrapping_key(self, salt: bytes, handle: str, epoch: int) -> bytearray:
        if self._vault_key is None:
            raise RuntimeError("the tenant key store is not open")
        info = b"sealmesh v1 tenant" + bytes.fromhex(handle) + epoch.to_bytes(8, "little")
        return hkdf_sm3(self._vault_key, salt=salt, info=info, length_bytes=KEY_BYTES)

    def _make(self, path: Path, handle: str, epoch: int) -> None:
        salt = secrets.token_bytes(_SALT_BYTES)
        wrapping_key = self._wrapping_key(salt, handle, epoch)
        key = bytearray(secrets.token_bytes(TENANT_KEY_BYTES))
        cipher = self._engine.new_cipher(wrapping_key)
        try:
            # The random salt makes the wrapping key new each time, so the nonce may be constant.
            tag = cipher.seal_into(bytes(NONCE_BYTES), _MAGIC + salt, Region.of(key))
            atomic_write(path, _MAGIC + salt + key + tag, mode=0o600, replace=False)
        except FileExistsError:
            # Another caller was faster: its key is the one that counts.
            return
        finally:
            cipher.close()
            wipe(wrapping_key)
            wipe(key)

    def _unwrap(self, path: Path, handle: str, epoch: int) -> bytearray:
        content = path.read_bytes()
        if len(content) != _FILE_BYTES or not content.startswith(_MAGIC):
            raise integrity_failure(
                "a tenant key file is damaged; restore it, or erase the tenant", file=path
            )
        salt = content[len(_MAGIC) :][:_SALT_BYTES]
        body = content[len(_MAGIC) + _SALT_BYTES :]
        wrapping_key = self._wrapping_key(salt, handle, epoch)
        key = bytearray(body[:TENANT_KEY_BYTES])
        cipher = self._engine.new_cipher(wrapping_key)
        try:
            cipher.open_into(bytes(NONCE_BYTES), _MAGIC + salt, Region.of(key), body[TENANT_KEY_BYTES:])
        except TagMismatchError:
            raise integrity_failure(
                "a tenant key file does not verify: changed, renamed, or of another vault", file=path
            ) from None
        finally:
            cipher.close()
            wipe(wrapping_key)
        return key
