"""What a request carries down to the KV connector: whose it is and which trace it belongs to.

It travels as vLLM's `kv_transfer_params`, the one per-request channel that reaches a connector in the
engine process. Callers cannot set it: the worker overwrites whatever a body holds.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tenant", "transfer_params"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a request is for, as the gateway vouches for it (common.v1.TenantContext)."""

    handle: str
    epoch: int
    cache_salt: str


def transfer_params(tenant: Tenant | None, traceparent: str) -> dict[str, object] | None:
    """`kv_transfer_params` of a vLLM request; None for a request without a tenant.

    Args:
        tenant: whose blocks the request may use.
        traceparent: W3C traceparent of the `engine.generate` span; empty when it is not traced.
    """
    if tenant is None:
        return None
    return {"sealmesh": {"handle": tenant.handle, "epoch": tenant.epoch, "traceparent": traceparent}}
