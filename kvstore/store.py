"""What the service needs from a block store, and the rules for namespaces and keys."""

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc
from sealmesh.telemetry.runtime.errors import SealmeshError

#: Bytes of a block key.
KEY_BYTES = 32
#: Most keys that one call may name.
MAX_KEYS = 65536

# Strict on purpose: a namespace becomes part of a Redis key and of a SCAN pattern, so glob and hash-tag
# characters must not get through.
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}/[0-9]{1,20}")


class PutOutcome(Enum):
    """What became of a block that was to be stored."""

    STORED = "stored"
    EXISTING = "existing"
    REFUSED = "refused"


@dataclass(frozen=True)
class StoreStats:
    """Size of the store now. Bytes are the store's own count of its memory; a capacity of 0 means none."""

    block_count: int
    used_bytes: int
    capacity_bytes: int
    evicted_count: int
    backend: str


class StoreUnavailableError(SealmeshError):
    """The store does not answer, or answers with an error (UNAVAILABLE, HTTP 503)."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", message)


class Store(Protocol):
    """A store of opaque blocks. Every method raises StoreUnavailableError when the store does not answer."""

    async def start(self) -> None:
        """Connects. Raises StoreUnavailableError when that fails."""

    async def close(self) -> None:
        """Lets go of every connection."""

    async def ping(self) -> None:
        """Returns when the store answers."""

    async def count_prefix(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading keys are present; marks them as used."""

    def read(
        self, namespace: str, keys: Sequence[bytes]
    ) -> AsyncGenerator[tuple[int, memoryview | None], None]:
        """Yields (position, value or None when gone) in the order of the keys."""

    async def put(self, namespace: str, key: bytes, value: bytes, *, replace: bool = False) -> PutOutcome:
        """Stores a value; one that exists is kept unless it is to be replaced."""

    async def delete_namespace(self, namespace: str) -> int:
        """Drops every block of a namespace and returns how many there were."""

    async def stats(self) -> StoreStats:
        """Size and limits now."""


def check_namespace(namespace: str) -> None:
    """Raises SealmeshError (INVALID_ARGUMENT) unless the namespace reads "handle/epoch"."""
    if not _NAMESPACE.fullmatch(namespace):
        raise _invalid(
            "namespace",
            'namespace must read "handle/epoch": 1 to 64 letters, digits, "-" or "_", a slash, a number',
        )


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises SealmeshError (INVALID_ARGUMENT) unless there are few enough keys of the right size."""
    if len(keys) > MAX_KEYS:
        raise _invalid("keys", f"{len(keys)} keys in one call; at most {MAX_KEYS} are allowed")
    for position, key in enumerate(keys):
        if len(key) != KEY_BYTES:
            raise _invalid("keys", f"key {position} has {len(key)} bytes; a key has {KEY_BYTES}")


def _invalid(field: str, message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, field=field)
