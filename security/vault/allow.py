"""Who may have which key: default deny, listed identities only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sealmesh.security.errors import configuration_invalid
from sealmesh.security.tls import ROLES, PeerIdentity

_TENANT = "tenant:"


class AllowList:
    """An allow-list of identities per model and tenant.

    Args:
        table: model name, `tenant:<handle>` or `tenant:*`, to identities `role/name` or `role/*`.

    Raises CONFIGURATION_INVALID for an identity that could never match: a typing slip here would
    silently lock everybody out.
    """

    def __init__(self, table: Mapping[str, Sequence[str]]) -> None:
        for subject, identities in table.items():
            for identity in identities:
                role, _, name = identity.partition("/")
                if role not in ROLES or not name:
                    raise configuration_invalid(
                        f"allow: {identity!r} for {subject!r} is no identity; write role/name or role/*"
                    )
        self._table = {subject: frozenset(identities) for subject, identities in table.items()}

    def permits_model(self, model: str, peer: PeerIdentity) -> bool:
        """Whether the peer may have the data key of a model."""
        return self._permits(model, peer)

    def permits_tenant(self, handle: str, peer: PeerIdentity) -> bool:
        """Whether the peer may have the KV key of a tenant."""
        return self._permits(_TENANT + handle, peer) or self._permits(_TENANT + "*", peer)

    def _permits(self, subject: str, peer: PeerIdentity) -> bool:
        identities = self._table.get(subject, frozenset())
        return str(peer) in identities or f"{peer.role}/*" in identities
