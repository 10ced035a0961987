"""From a credential to a principal: authentication and the rule of each operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
from sealmesh.gateway.access.keys import ApiKey, KeyFileError, KeySet, read_key_file
from sealmesh.gateway.access.tenants import SecretFileError, TenantDeriver, read_secret_file
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.errors import SealmeshError

_CHECK_INTERVAL_S: Final = 0.5
_USERS: Final = frozenset({"user", "app", "operator"})
_WHERE_FROM: Final = (
    "Ask the operator of this gateway for a key; operators make one with `sealmesh keys api-key create`"
)

# Who may do what. An operation that is not listed is refused.
OPERATION_ROLES: Final[Mapping[str, frozenset[str]]] = {
    "infer": _USERS,
    "models.read": _USERS | {"system", "security", "audit"},
    "text.mask": _USERS | {"security"},
}


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        key_prefix: shown part of the key; may be logged.
        tenant: name of the tenant; stays in the gateway.
        role: see access.keys.ROLES.
        context: what inner services learn.
        pii_key: 32 bytes that key this tenant's placeholders.
    """

    key_prefix: str
    tenant: str
    role: str
    context: types_pb2.TenantContext
    pii_key: bytes

    def require(self, operation: str) -> None:
        """Raise ROLE_DENIED unless the role may do ``operation`` (see OPERATION_ROLES)."""
        if self.role not in OPERATION_ROLES.get(operation, frozenset()):
            raise SealmeshError(
                grpc.StatusCode.PERMISSION_DENIED,
                "ROLE_DENIED",
                f"role {self.role!r} may not do {operation!r}; use a key with another role",
            )


class Authenticator:
    """Checks API keys against a key file and follows changes of that file.

    A key that is removed from the file stops working within half a second. While the file is missing or
    broken nobody is let in.

    Args:
        path: the key file.
        secret_file: the gateway's secret, read once at the start.
        log: where changes of the file are noted.
        monotonic: clock that paces the look at the file, in seconds.
        now: clock that expiry is measured by.
    """

    def __init__(
        self,
        path: Path,
        secret_file: Path,
        log: StructuredLogger,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._path = path
        self._secret_file = secret_file
        self._deriver: TenantDeriver | None = None
        self._log = log
        self._monotonic = monotonic
        self._now = now
        self._key_set: KeySet | None = None
        self._principals: dict[str, tuple[ApiKey, Principal]] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._next_check = 0.0

    async def start(self) -> None:
        """Read both files; raises SealmeshError CONFIGURATION_INVALID."""
        try:
            self._deriver = TenantDeriver(read_secret_file(self._secret_file))
            self._load(self._stat())
        except SecretFileError as error:
            raise _misconfigured(f"secret_file: {error}") from None
        except KeyFileError as error:
            raise _misconfigured(f"access_keys_file: {error}") from None

    async def close(self) -> None:
        """Forget the keys."""
        self._key_set = None
        self._principals.clear()

    def authenticate(self, authorization: str | None) -> Principal:
        """The caller behind an ``authorization`` header or metadata value.

        Raises:
            SealmeshError: CREDENTIAL_INVALID, or DEPENDENCY_UNAVAILABLE while the key file is unusable.
        """
        self._follow_file()
        if self._key_set is None or self._deriver is None:
            raise SealmeshError(
                grpc.StatusCode.UNAVAILABLE,
                "DEPENDENCY_UNAVAILABLE",
                "the gateway cannot read its API keys; its log says why",
                retry_after_s=1.0,
            )
        if authorization is None:
            raise _refused(
                "no API key was given; send the header 'Authorization: Bearer sk-sealmesh-…'. " + _WHERE_FROM
            )
        scheme, _, presented = authorization.partition(" ")
        if scheme.lower() != "bearer" or not presented.strip():
            raise _refused("the Authorization header must read 'Bearer sk-sealmesh-…'. " + _WHERE_FROM)
        key = self._key_set.find(presented.strip(), self._now())
        if key is None:
            raise _refused("the API key is not known, was revoked or has expired. " + _WHERE_FROM)
        return self._principal(key, self._key_set.epoch(key.tenant), self._deriver)

    def _principal(self, key: ApiKey, epoch: int, deriver: TenantDeriver) -> Principal:
        known = self._principals.get(key.prefix)
        if known is not None and known[0] is key:
            return known[1]
        principal = Principal(
            key_prefix=key.prefix,
            tenant=key.tenant,
            role=key.role,
            context=deriver.context(key.tenant, epoch),
            pii_key=deriver.pii_key(key.tenant, epoch),
        )
        self._principals[key.prefix] = (key, principal)
        return principal

    def _follow_file(self) -> None:
        now = self._monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._load(stamp)
            self._log.info("API keys read again", keys=len(self._key_set.keys) if self._key_set else 0)
        except KeyFileError as error:
            if self._key_set is not None:
                self._log.error("API keys are refused until the key file is right", cause=str(error))
            self._key_set = None
            self._stamp = None
            self._principals.clear()

    def _stat(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise KeyFileError(f"{self._path}: {error.strerror}") from None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _load(self, stamp: tuple[int, int, int]) -> None:
        self._key_set = read_key_file(self._path)
        self._principals.clear()
        self._stamp = stamp


def _misconfigured(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)


def _refused(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID", message)
