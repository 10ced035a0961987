"""The vault as its callers see it: blocking, for the loader in the engine's process and for the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from sealmesh.protos.security.v1 import model_vault_pb2 as pb
from sealmesh.protos.security.v1 import model_vault_pb2_grpc
from sealmesh.security.errors import integrity_failure
from sealmesh.security.keys.ecies import OneTimeKey, Wrapped, lease_subject, tenant_subject
from sealmesh.security.keys.signing import VerifyingKey
from sealmesh.security.memory import wipe
from sealmesh.security.sealed.reader import SealedModel, open_sealed
from sealmesh.security.sm4.engine import Sm4GcmEngine
from sealmesh.security.sm4.select import select_engine
from sealmesh.security.tls import TlsFiles, channel_credentials
from sealmesh.telemetry.runtime.channel import cancelled_on_exit, open_sync_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.telemetry import Telemetry

DEFAULT_TIMEOUT_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """A sealed file as the vault lists it."""

    path: str  # of the sealed file, relative to the model's folder
    size_bytes: int
    sm3: bytes


@dataclass(frozen=True)
class RemoteModel:
    """A model on offer."""

    name: str
    model_id: bytes
    version: int
    manifest_digest: bytes
    ciphertext_bytes: int


@dataclass(frozen=True)
class LeaseInfo:
    """An open lease."""

    lease: str
    lifetime_s: float
    model: RemoteModel
    manifest: bytes
    location: Path  # as the vault sees it
    files: tuple[RemoteFile, ...]


class VaultClient:
    """Calls one vault over mTLS and checks that it has the vault's role. Safe to share between threads.

    Every method raises SealmeshError; DEPENDENCY_UNAVAILABLE when the vault cannot be reached.

    Args:
        target: host:port of the vault.
        files: the caller's certificate (role worker) and authority.
        telemetry: traces and measures the calls when given.
        timeout_s: of each unary call.
        engine: SM4 engine; by default the fastest.
    """

    def __init__(
        self,
        target: str,
        files: TlsFiles,
        *,
        telemetry: Telemetry | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        engine: Sm4GcmEngine | None = None,
    ) -> None:
        self._target = target
        self._files = files
        self._telemetry = telemetry
        self._timeout_s = timeout_s
        self._engine = engine
        self._channel: grpc.Channel | None = None
        self._stub: model_vault_pb2_grpc.ModelVaultServiceStub | None = None

    def start(self) -> VaultClient:
        """Reads the certificates and makes the channel; it connects at the first call."""
        self._engine = self._engine or select_engine()
        self._channel = open_sync_channel(
            self._target,
            channel_credentials(self._files),
            expected_role="vault",
            telemetry=self._telemetry,
        )
        self._stub = model_vault_pb2_grpc.ModelVaultServiceStub(self._channel)
        return self

    def close(self) -> None:
        """Closes the channel. May be called twice."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def __enter__(self) -> VaultClient:
        return self if self._channel is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Sm4GcmEngine:
        """The SM4 engine in use."""
        if self._engine is None:
            raise RuntimeError("the vault client is not started")
        return self._engine

    def _calls(self) -> model_vault_pb2_grpc.ModelVaultServiceStub:
        if self._stub is None:
            raise RuntimeError("the vault client is not started")
        return self._stub

    def _call(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except grpc.RpcError as exc:
            error = SealmeshError.from_rpc_error(exc)
            if error.reason == "DEPENDENCY_UNAVAILABLE":
                raise SealmeshError(
                    error.code, error.reason, f"the vault at {self._target} does not answer: {error.message}"
                ) from exc
            raise error from exc

    def list_models(self) -> tuple[RemoteModel, ...]:
        """The models on offer, by name."""
        response = self._call(
            lambda: self._calls().ListModels(pb.ListModelsRequest(), timeout=self._timeout_s)
        )
        return tuple(_remote_model(model) for model in response.models)

    def open_model(self, name: str) -> LeaseInfo:
        """Opens a lease. Raises MODEL_NOT_FOUND, INTEGRITY_FAILURE, ROLE_DENIED."""
        response = self._call(
            lambda: self._calls().OpenModel(pb.OpenModelRequest(model=name), timeout=self._timeout_s)
        )
        return LeaseInfo(
            lease=response.lease,
            lifetime_s=response.lifetime.ToMilliseconds() / 1000,
            model=_remote_model(response.sealed_model),
            manifest=response.manifest,
            location=Path(response.location),
            files=tuple(RemoteFile(file.path, file.size_bytes, file.sm3) for file in response.files),
        )

    def release_key(self, lease: str) -> bytearray:
        """The data key of the lease's model (32 bytes; wipe it after use).

        Raises KEY_DENIED, LEASE_EXPIRED, ROLE_DENIED.
        """
        return self._release(pb.ReleaseKeyRequest(lease=lease), lease_subject(lease))

    def release_tenant_key(self, handle: str, epoch: int) -> bytearray:
        """The KV-cache key of a tenant (32 bytes; wipe it after use). Raises KEY_DENIED, ROLE_DENIED."""
        subject = pb.TenantKeySubject(handle=handle, epoch=epoch)
        return self._release(pb.ReleaseKeyRequest(tenant=subject), tenant_subject(handle, epoch))

    def _release(self, request: pb.ReleaseKeyRequest, subject: bytes) -> bytearray:
        one_time = OneTimeKey()
        request.recipient_public_key = one_time.public_key
        response = self._call(lambda: self._calls().ReleaseKey(request, timeout=self._timeout_s))
        key = response.key
        if key.algorithm != pb.WrappedKey.ALGORITHM_X25519_HKDF_SM3_SM4_GCM:
            raise integrity_failure(f"the vault wrapped a key in an unknown way ({key.algorithm})")
        return one_time.unwrap(Wrapped(key.sender_public_key, key.ciphertext), subject, self.engine)

    def read_ciphertext(
        self, lease: str, path: str, *, offset_bytes: int = 0, length_bytes: int = 0
    ) -> Iterator[bytes]:
        """Ciphertext of a file in order, at most 1 MiB a piece; 0 length means to the end."""
        request = pb.ReadTensorsRequest(
            lease=lease, path=path, offset_bytes=offset_bytes, length_bytes=length_bytes
        )
        expected = offset_bytes
        with cancelled_on_exit(self._calls().ReadTensors(request)) as stream:
            pieces = iter(stream)
            while (piece := self._call(lambda: next(pieces, None))) is not None:
                if piece.offset_bytes != expected:
                    raise integrity_failure(
                        f"the vault sent bytes from {piece.offset_bytes}, expected {expected}", file=path
                    )
                expected += len(piece.data)
                yield piece.data

    def close_model(self, lease: str) -> None:
        """Ends a lease. Raises LEASE_EXPIRED when it has ended already."""
        self._call(
            lambda: self._calls().CloseModel(pb.CloseModelRequest(lease=lease), timeout=self._timeout_s)
        )


def _remote_model(model: pb.SealedModel) -> RemoteModel:
    return RemoteModel(
        model.model, model.model_id, model.version, model.manifest_digest, model.ciphertext_bytes
    )


@contextmanager
def open_remote_model(
    client: VaultClient,
    name: str,
    *,
    pinned: Collection[VerifyingKey],
    model_dir: Path | None = None,
) -> Iterator[SealedModel]:
    """A model unlocked with the key that the vault releases, its ciphertext read from shared storage.

    Args:
        client: started.
        name: of the model.
        pinned: keys that may have signed it; checked here again, the vault is not trusted for that.
        model_dir: where the sealed folder lies on this machine; by default where the vault says.

    Yields the unlocked model; keys are wiped, files closed and the lease ended afterwards.

    Raises MODEL_NOT_FOUND, KEY_DENIED, LEASE_EXPIRED, INTEGRITY_FAILURE, NOT_FOUND (folder not reachable).
    """
    lease = client.open_model(name)
    with ExitStack() as stack:
        stack.callback(_end_lease, client, lease.lease)
        folder = model_dir or lease.location
        model = stack.enter_context(
            open_sealed(folder, pinned=pinned, manifest=lease.manifest, engine=client.engine)
        )
        if model.manifest.name != name:
            raise integrity_failure(
                f"the vault sent the manifest of {model.manifest.name!r}, not of {name!r}"
            )
        key = client.release_key(lease.lease)
        try:
            model.unlock_with(key)
        finally:
            wipe(key)
        yield model


def _end_lease(client: VaultClient, lease: str) -> None:
    try:
        client.close_model(lease)
    except SealmeshError as exc:
        # The lease ends by itself; a load that is complete must not fail because the vault is away now.
        logging.getLogger(__name__).info("the lease could not be ended early: %s", exc.message)
