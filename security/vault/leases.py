"""Leases: one worker's right, for a while, to read a model's ciphertext and ask for its key."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from sealmesh.security.tls import PeerIdentity
from sealmesh.security.vault.catalog import CatalogEntry
from sealmesh.telemetry.runtime.errors import SealmeshError


@dataclass
class Lease:
    """An open lease. `used_keys` are the one-time public keys that were wrapped to already."""

    lease_id: str
    holder: PeerIdentity
    entry: CatalogEntry
    expires_at_s: float  # of the table's clock
    used_keys: set[bytes] = field(default_factory=set)


class LeaseTable:
    """The open leases of a vault; used from the event loop only.

    Args:
        lifetime_s: how long a lease lasts.
        max_leases: most leases at once.
        clock: monotonic seconds.
    """

    def __init__(
        self, lifetime_s: float, max_leases: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lifetime_s = lifetime_s
        self._max_leases = max_leases
        self._clock = clock
        self._leases: dict[str, Lease] = {}

    def open(self, holder: PeerIdentity, entry: CatalogEntry) -> Lease:
        """A new lease; raises OVERLOADED when too many are open."""
        now = self._clock()
        for lease_id in [lease.lease_id for lease in self._leases.values() if lease.expires_at_s <= now]:
            del self._leases[lease_id]
        if len(self._leases) >= self._max_leases:
            raise SealmeshError(
                grpc.StatusCode.UNAVAILABLE,
                "OVERLOADED",
                f"{self._max_leases} leases are open; close some, or raise max_leases",
                retry_after_s=1.0,
            )
        lease = Lease(secrets.token_hex(16), holder, entry, now + self.lifetime_s)
        self._leases[lease.lease_id] = lease
        return lease

    def get(self, lease_id: str, holder: PeerIdentity) -> Lease:
        """An open lease of this holder; raises LEASE_EXPIRED for any other.

        A lease of somebody else reads exactly like an unknown one.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder or lease.expires_at_s <= self._clock():
            raise SealmeshError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "LEASE_EXPIRED",
                "the lease has ended or was never given to this caller; call OpenModel again",
            )
        return lease

    def close(self, lease_id: str, holder: PeerIdentity) -> None:
        """Ends a lease; raises LEASE_EXPIRED when there is none."""
        self.get(lease_id, holder)
        del self._leases[lease_id]
