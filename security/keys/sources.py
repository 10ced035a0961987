"""Where a key-encryption key comes from: the seam behind which passphrase, key file, HSM, TPM and KMS sit.

A source makes, for each slot, a 32-byte secret and the public parameters from which only the holder of
the root can make it again. A passphrase stretches it, a key file derives it; a hardware module or KMS
wraps a random secret and keeps the wrapped form in the parameters.
"""

from __future__ import annotations

import secrets
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from sealmesh.security.binary import Cursor, Packer
from sealmesh.security.errors import configuration_invalid, integrity_failure
from sealmesh.security.files import atomic_write, read_private_file
from sealmesh.security.memory import Secret, wipe
from sealmesh.security.sm4.sm3 import hkdf_sm3

SECRET_BYTES = 32
_SALT_BYTES = 16
_KEY_ID_BYTES = 8


class SlotKind(IntEnum):
    """Kinds of key slots; the numbers are part of the format."""

    PASSPHRASE = 1
    KEY_FILE = 2

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


class KeySource(Protocol):
    """A root of keys. Objects hold secrets: `close` wipes them."""

    @property
    def kind(self) -> SlotKind: ...

    def create(self) -> tuple[bytes, bytearray]:
        """Parameters of a new slot (at most 1,024 bytes, public) and its secret (32 bytes, caller wipes)."""
        ...

    def recover(self, parameters: bytes) -> bytearray | None:
        """The secret of a slot (32 bytes, caller wipes), or None when the slot is plainly of another root.

        A wrong root may also give a wrong secret: the slot's check value tells. Raises INTEGRITY_FAILURE
        for parameters that do not parse or ask for absurd work.
        """
        ...

    def close(self) -> None:
        """Wipes what the source holds. May be called twice."""
        ...


class PassphraseSource:
    """A passphrase, stretched by scrypt (RFC 7914).

    Args:
        passphrase: text or UTF-8 bytes; copied.
        log2_n: cost of new slots; 17 takes 128 MiB and a third of a second. Existing slots carry theirs.
    """

    _R = 8
    _P = 1
    # 128·N·r bytes; what a slot may ask for before anything about it is authenticated.
    _MAX_MEMORY_BYTES = 512 << 20
    _MAX_P = 4

    def __init__(self, passphrase: str | Secret, *, log2_n: int = 17) -> None:
        encoded = passphrase.encode("utf-8") if isinstance(passphrase, str) else passphrase
        if not encoded:
            raise configuration_invalid("the passphrase is empty")
        self._passphrase = bytearray(encoded)
        self._log2_n = log2_n

    @classmethod
    def from_file(cls, path: Path) -> PassphraseSource:
        """The first line of a private (0600) file, without its line end."""
        content = read_private_file(path, "passphrase file")
        try:
            line = bytearray(content.split(b"\n", 1)[0].rstrip(b"\r"))
            if not line:
                raise configuration_invalid(f"passphrase file {path} is empty")
            try:
                return cls(line)
            finally:
                wipe(line)
        finally:
            wipe(content)

    @property
    def kind(self) -> SlotKind:
        return SlotKind.PASSPHRASE

    def create(self) -> tuple[bytes, bytearray]:
        salt = secrets.token_bytes(_SALT_BYTES)
        parameters = Packer().raw(salt).u8(self._log2_n).u32(self._R).u32(self._P).bytes()
        return parameters, self._stretch(salt, self._log2_n, self._R, self._P)

    def recover(self, parameters: bytes) -> bytearray | None:
        cursor = Cursor(parameters, "passphrase slot")
        salt, log2_n, r, p = cursor.take(_SALT_BYTES), cursor.u8(), cursor.u32(), cursor.u32()
        cursor.end()
        if (
            not (1 <= log2_n < 32 and r >= 1 and 1 <= p <= self._MAX_P)
            or (128 * r << log2_n) > self._MAX_MEMORY_BYTES
        ):
            raise integrity_failure("passphrase slot asks for an absurd amount of work (scrypt parameters)")
        return self._stretch(salt, log2_n, r, p)

    def _stretch(self, salt: bytes, log2_n: int, r: int, p: int) -> bytearray:
        secret = bytearray(SECRET_BYTES)
        Scrypt(salt, SECRET_BYTES, 1 << log2_n, r, p).derive_into(self._passphrase, secret)
        return secret

    def close(self) -> None:
        wipe(self._passphrase)


class KeyFileSource:
    """A 32-byte root key; slots made with it carry an id of the key, so a wrong file is named at once."""

    def __init__(self, root_key: Secret) -> None:
        if len(root_key) != SECRET_BYTES:
            raise configuration_invalid(f"a root key has {SECRET_BYTES} bytes, not {len(root_key)}")
        self._root = bytearray(root_key)

    @classmethod
    def from_file(cls, path: Path) -> KeyFileSource:
        """Loads a root key file (0600)."""
        root = load_root_key(path)
        try:
            return cls(root)
        finally:
            wipe(root)

    @property
    def kind(self) -> SlotKind:
        return SlotKind.KEY_FILE

    @property
    def key_id(self) -> bytes:
        """8 bytes that name the key without telling anything about it."""
        return bytes(hkdf_sm3(self._root, salt=b"", info=b"sealmesh v1 root id", length_bytes=_KEY_ID_BYTES))

    def create(self) -> tuple[bytes, bytearray]:
        salt = secrets.token_bytes(_SALT_BYTES)
        return self.key_id + salt, self._derive(salt)

    def recover(self, parameters: bytes) -> bytearray | None:
        cursor = Cursor(parameters, "key-file slot")
        key_id, salt = cursor.take(_KEY_ID_BYTES), cursor.take(_SALT_BYTES)
        cursor.end()
        return self._derive(salt) if key_id == self.key_id else None

    def _derive(self, salt: bytes) -> bytearray:
        return hkdf_sm3(self._root, salt=salt, info=b"sealmesh v1 root slot", length_bytes=SECRET_BYTES)

    def close(self) -> None:
        wipe(self._root)


_ROOT_PREFIX = b"SEALMESH-ROOT-KEY-1 "


def create_root_key(path: Path) -> None:
    """Makes a root key file: one line, prefix and 64 hex digits, mode 0600.

    Raises CONFIGURATION_INVALID when the file exists: overwriting a root key would lose every model.
    """
    secret = bytearray(secrets.token_bytes(SECRET_BYTES))
    line = bytearray(_ROOT_PREFIX + secret.hex().encode() + b"\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(path, line, mode=0o600, replace=False)
    except FileExistsError as exc:
        raise configuration_invalid(f"root key file {path} exists; it is never overwritten") from exc
    finally:
        wipe(secret)
        wipe(line)


def load_root_key(path: Path) -> bytearray:
    """The 32 bytes of a root key file, for the caller to wipe.

    Raises CONFIGURATION_INVALID when the file is missing, open to others or not a root key file.
    """
    content = read_private_file(path, "root key file", 4096)
    try:
        digits = bytes(content).removeprefix(_ROOT_PREFIX).strip()
        if not content.startswith(_ROOT_PREFIX) or len(digits) != 2 * SECRET_BYTES:
            raise configuration_invalid(
                f"{path} is not a root key file; `sealmesh up` makes one, or restore yours from its backup"
            )
        try:
            return bytearray.fromhex(digits.decode("ascii"))
        except (ValueError, UnicodeDecodeError):
            raise configuration_invalid(
                f"root key file {path} is damaged; restore it from its backup"
            ) from None
    finally:
        wipe(content)


def source_from_files(root_key_file: Path | None, passphrase_file: Path | None) -> KeySource:
    """The source that settings name; raises CONFIGURATION_INVALID unless exactly one file is given."""
    if (root_key_file is None) == (passphrase_file is None):
        raise configuration_invalid("set exactly one of root_key_file and passphrase_file")
    if root_key_file is not None:
        return KeyFileSource.from_file(root_key_file)
    assert passphrase_file is not None
    return PassphraseSource.from_file(passphrase_file)
