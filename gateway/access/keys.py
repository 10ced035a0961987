"""API keys: how they look, how they are kept, and how a presented one is checked.

A key is ``sk-sealmesh-`` + 8 characters that name it + 43 characters of secret (256 bits from the system's
generator). The file holds SHA-256 of the whole key. A plain hash is enough for a secret of that entropy:
guessing it offline is as hard as guessing the secret.

The file is TOML::

    version = 1
    [[tenant]]                      # optional; a tenant that is not listed has epoch 1
    name = "acme"
    epoch = 1
    [[key]]
    prefix = "sk-sealmesh-k3v9q2zt"
    sha256 = "…64 hex characters…"
    tenant = "acme"
    role = "app"
    created = 2026-11-05T10:00:00Z
    expires = 2027-11-05T10:00:00Z  # optional
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import string
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

KEY_PREFIX: Final = "sk-sealmesh-"
_NAME_ALPHABET: Final = string.ascii_lowercase + string.digits
_SECRET_ALPHABET: Final = string.ascii_letters + string.digits
_NAME_CHARACTERS: Final = 8
_SECRET_CHARACTERS: Final = 43
_SHOWN_CHARACTERS: Final = len(KEY_PREFIX) + _NAME_CHARACTERS
_TENANT_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
ROLES: Final = frozenset({"user", "app", "operator", "system", "security", "audit"})


class KeyFileError(ValueError):
    """The key file cannot be used; the message says where and why, and holds no key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of one key.

    Attributes:
        prefix: the part that may be shown, ``sk-sealmesh-`` and 8 characters; unique in a file.
        sha256: hex digest of the whole key.
        tenant: name of the tenant it belongs to.
        role: one of ROLES.
        created: when it was made (UTC).
        expires: from when on it is refused (UTC), or None.
    """

    prefix: str
    sha256: str
    tenant: str
    role: str
    created: datetime
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeySet:
    """The contents of a key file: keys by shown prefix, and the epochs of tenants (1 when not listed)."""

    keys: Mapping[str, ApiKey]
    epochs: Mapping[str, int]

    def find(self, presented: str, now: datetime) -> ApiKey | None:
        """The key that was presented, or None when it is unknown or has expired.

        The digest is compared in constant time; only the shown prefix decides how a look-up goes.
        """
        candidate = self.keys.get(presented[:_SHOWN_CHARACTERS])
        digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).hexdigest()
        # An unknown prefix costs the same comparison as a known one.
        matches = hmac.compare_digest(digest, candidate.sha256 if candidate else "0" * 64)
        if candidate is None or not matches or (candidate.expires is not None and candidate.expires <= now):
            return None
        return candidate

    def epoch(self, tenant: str) -> int:
        """Epoch of a tenant, 1 or more."""
        return self.epochs.get(tenant, 1)


def new_api_key(
    tenant: str, role: str = "app", *, now: datetime | None = None, expires: datetime | None = None
) -> tuple[str, ApiKey]:
    """Make a key: the secret to hand to its owner once, and the record to keep.

    Raises:
        KeyFileError: the tenant's name or the role is not valid.
    """
    _check_names("new key", tenant, role)
    name = "".join(secrets.choice(_NAME_ALPHABET) for _ in range(_NAME_CHARACTERS))
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(_SECRET_CHARACTERS))
    key = f"{KEY_PREFIX}{name}{secret}"
    created = (now or datetime.now(UTC)).replace(microsecond=0)
    return key, ApiKey(
        prefix=key[:_SHOWN_CHARACTERS],
        sha256=hashlib.sha256(key.encode()).hexdigest(),
        tenant=tenant,
        role=role,
        created=created,
        expires=expires,
    )


def read_key_file(path: Path) -> KeySet:
    """Read a key file.

    Raises:
        KeyFileError: missing, unreadable, writable for others, or not of the documented form.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}; create a key with `sealmesh up`") from None
    if mode & 0o022:
        raise KeyFileError(f"{path}: others may write it (mode {mode & 0o777:o}); run chmod 600 on it")
    return parse_key_file(raw, str(path))


def parse_key_file(raw: bytes, source: str = "key file") -> KeySet:
    """Parse the contents of a key file; raises KeyFileError."""
    try:
        document = tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KeyFileError(f"{source}: not valid TOML: {error}") from None
    unknown = set(document) - {"version", "tenant", "key"}
    if document.get("version") != 1 or unknown:
        what = f"unknown setting {sorted(unknown)[0]!r}" if unknown else "version must be 1"
        raise KeyFileError(f"{source}: {what}")
    epochs: dict[str, int] = {}
    for position, entry in enumerate(_tables(document, "tenant", source)):
        where = f"{source}: tenant {position}"
        _only(entry, {"name", "epoch"}, where)
        name, epoch = entry.get("name"), entry.get("epoch", 1)
        if not isinstance(name, str) or not _TENANT_NAME.fullmatch(name) or name in epochs:
            raise KeyFileError(f"{where}: name must be unique and of a-z, 0-9 and -, at most 63 characters")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 1 <= epoch < 2**63:
            raise KeyFileError(f"{where}: epoch must be 1 or more")
        epochs[name] = epoch
    keys: dict[str, ApiKey] = {}
    for position, entry in enumerate(_tables(document, "key", source)):
        key = _parse_key(entry, f"{source}: key {position}")
        if key.prefix in keys:
            raise KeyFileError(f"{source}: key {position}: prefix {key.prefix} is there twice")
        keys[key.prefix] = key
    return KeySet(keys, epochs)


def write_key_file(path: Path, key_set: KeySet) -> None:
    """Write a key file in one step (never half-written), mode 0600, folders as needed with 0700."""
    lines = ["# API keys of the gateway: digests only. Read again when it changes.", "version = 1"]
    for name, epoch in sorted(key_set.epochs.items()):
        lines += ["", "[[tenant]]", f"name = {json.dumps(name)}", f"epoch = {epoch}"]
    for key in key_set.keys.values():
        lines += [
            "",
            "[[key]]",
            f"prefix = {json.dumps(key.prefix)}",
            f"sha256 = {json.dumps(key.sha256)}",
            f"tenant = {json.dumps(key.tenant)}",
            f"role = {json.dumps(key.role)}",
            f"created = {_timestamp(key.created)}",
        ]
        if key.expires is not None:
            lines.append(f"expires = {_timestamp(key.expires)}")
    write_private(path, ("\n".join(lines) + "\n").encode())


def add_api_key(path: Path, tenant: str, role: str = "app", *, expires: datetime | None = None) -> str:
    """Add a new key to the file at ``path`` (made if it is not there) and return its secret.

    Raises:
        KeyFileError: the file that is there cannot be used, or a name is not valid.
    """
    key_set = read_key_file(path) if path.exists() else KeySet({}, {})
    secret, key = new_api_key(tenant, role, expires=expires)
    write_key_file(path, KeySet({**key_set.keys, key.prefix: key}, key_set.epochs))
    return secret


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` atomically with mode 0600."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:  # mkstemp makes it 0600
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _tables(document: Mapping[str, object], name: str, source: str) -> Iterable[Mapping[str, object]]:
    tables = document.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise KeyFileError(f"{source}: {name} must be written as [[{name}]]")
    return tables


def _only(entry: Mapping[str, object], known: set[str], where: str) -> None:
    if unknown := set(entry) - known:
        raise KeyFileError(f"{where}: unknown setting {sorted(unknown)[0]!r}")


def _parse_key(entry: Mapping[str, object], where: str) -> ApiKey:
    _only(entry, {"prefix", "sha256", "tenant", "role", "created", "expires"}, where)
    prefix, digest = entry.get("prefix"), entry.get("sha256")
    tenant, role = entry.get("tenant"), entry.get("role")
    created, expires = entry.get("created"), entry.get("expires")
    if not isinstance(prefix, str) or not prefix.startswith(KEY_PREFIX) or len(prefix) != _SHOWN_CHARACTERS:
        raise KeyFileError(f"{where}: prefix must be {KEY_PREFIX} and {_NAME_CHARACTERS} characters")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise KeyFileError(f"{where}: sha256 must be 64 lower-case hex characters")
    if not isinstance(tenant, str) or not isinstance(role, str):
        raise KeyFileError(f"{where}: tenant and role must be given")
    _check_names(where, tenant, role)
    if not _has_zone(created) or not (expires is None or _has_zone(expires)):
        raise KeyFileError(f"{where}: created and expires must be times with a zone, as 2026-11-05T10:00:00Z")
    assert isinstance(created, datetime)
    assert expires is None or isinstance(expires, datetime)
    return ApiKey(prefix, digest, tenant, role, created, expires)


def _check_names(where: str, tenant: str, role: str) -> None:
    if not _TENANT_NAME.fullmatch(tenant):
        raise KeyFileError(f"{where}: tenant must be of a-z, 0-9 and -, at most 63 characters")
    if role not in ROLES:
        raise KeyFileError(f"{where}: role must be one of {', '.join(sorted(ROLES))}")


def _has_zone(value: object) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


def _timestamp(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
