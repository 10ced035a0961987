"""Chooses the SM4 engine of this process and measures it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc
from sealmesh.security.memory import Region
from sealmesh.security.sm4.engine import (
    KEY_BYTES,
    NONCE_BYTES,
    EngineUnavailableError,
    Sm4GcmEngine,
    self_test,
)
from sealmesh.security.sm4.libgcrypt import LibGcrypt, LibGcryptEngine
from sealmesh.security.sm4.openssl import CryptographyEngine
from sealmesh.telemetry.runtime.errors import SealmeshError

ENGINE_VARIABLE = "SEALMESH_SM4_ENGINE"

EngineFactory = Callable[[], Sm4GcmEngine]


def engine_factories() -> dict[str, EngineFactory]:
    """Every engine, fastest first."""
    return {
        "libgcrypt": lambda: LibGcryptEngine(LibGcrypt()),
        "cryptography": CryptographyEngine,
    }


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, and why faster ones were passed over (name to reason)."""

    engine: Sm4GcmEngine
    passed_over: Mapping[str, str] = field(default_factory=dict)


def choose_engine(
    name: str | None = None, factories: Mapping[str, EngineFactory] | None = None
) -> EngineChoice:
    """Chooses the fastest engine that gives the known answers.

    `name` (default: the environment's SEALMESH_SM4_ENGINE) forces one engine. Raises SealmeshError
    (CONFIGURATION_INVALID) when the named engine, or every engine, cannot be used.
    """
    factories = engine_factories() if factories is None else factories
    forced = os.environ.get(ENGINE_VARIABLE, "") if name is None else name
    if forced and forced not in factories:
        raise _unusable(f"unknown SM4 engine {forced!r} in {ENGINE_VARIABLE}; use {', '.join(factories)}")
    passed_over: dict[str, str] = {}
    for candidate, factory in factories.items():
        if forced and candidate != forced:
            continue
        try:
            engine = factory()
            self_test(engine)
        except EngineUnavailableError as exc:
            passed_over[candidate] = str(exc)
            continue
        return EngineChoice(engine, passed_over)
    reasons = "; ".join(f"{key}: {reason}" for key, reason in passed_over.items())
    if forced:
        raise _unusable(f"SM4 engine {forced!r}, forced by {ENGINE_VARIABLE}, cannot be used: {reasons}")
    raise _unusable(f"no SM4 engine can be used: {reasons}")


def select_engine(name: str | None = None) -> Sm4GcmEngine:
    """The engine of `choose_engine`."""
    return choose_engine(name).engine


def _unusable(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)


@dataclass(frozen=True)
class EngineSpeed:
    """Speed of an engine on one thread, in 10^9 bytes per CPU-second."""

    engine: str
    detail: str
    seal_gbytes_per_s: float
    open_gbytes_per_s: float


def measure(engine: Sm4GcmEngine, *, total_bytes: int = 64 << 20, chunk_bytes: int = 1 << 20) -> EngineSpeed:
    """Measures sealing and opening of chunks that stay in the cache, in this thread's CPU time."""
    cipher = engine.new_cipher(os.urandom(KEY_BYTES))
    buffer = bytearray(chunk_bytes)
    region = Region.of(buffer)
    rounds = max(1, total_bytes // chunk_bytes)
    seal_s = open_s = 0.0
    try:
        for index in range(rounds):
            nonce = index.to_bytes(NONCE_BYTES, "little")
            start = time.thread_time()
            tag = cipher.seal_into(nonce, b"", region)
            middle = time.thread_time()
            cipher.open_into(nonce, b"", region, tag)
            seal_s += middle - start
            open_s += time.thread_time() - middle
    finally:
        cipher.close()
    done = rounds * chunk_bytes / 1e9
    return EngineSpeed(engine.name, engine.detail, done / max(seal_s, 1e-9), done / max(open_s, 1e-9))
