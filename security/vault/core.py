"""The vault without its wire: leases, releases, and who gets what. It never decrypts a tensor."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from opentelemetry import trace
from sealmesh.protos.common.v1 import audit_pb2
from sealmesh.security.audit.sink import AuditSink
from sealmesh.security.errors import configuration_invalid, invalid_request
from sealmesh.security.files import Folder, pread_exactly
from sealmesh.security.keys.ecies import PUBLIC_KEY_BYTES, Wrapped, lease_subject, tenant_subject, wrap_key
from sealmesh.security.keys.signing import load_verifying_key
from sealmesh.security.keys.sources import KeySource, source_from_files
from sealmesh.security.keys.tenants import TenantKeyStore
from sealmesh.security.memory import wipe
from sealmesh.security.sealed.keyring import unlock_data_key
from sealmesh.security.sm4.engine import Sm4GcmEngine
from sealmesh.security.sm4.select import choose_engine
from sealmesh.security.tls import PeerIdentity
from sealmesh.security.vault.allow import AllowList
from sealmesh.security.vault.catalog import CatalogEntry, ModelCatalog
from sealmesh.security.vault.leases import Lease, LeaseTable
from sealmesh.security.vault.settings import VaultSettings
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.errors import Reason, SealmeshError

_READ_BYTES = 1 << 20
_MAX_REMEMBERED_KEYS = 65_536
_KEY_RELEASE = audit_pb2.AuditRecord.KIND_KEY_RELEASE
_OK = audit_pb2.AuditRecord.OUTCOME_OK
_DENIED = audit_pb2.AuditRecord.OUTCOME_DENIED
_FAILED = audit_pb2.AuditRecord.OUTCOME_FAILED

T = TypeVar("T")
_DENIALS: frozenset[Reason] = frozenset({"KEY_DENIED", "LEASE_EXPIRED", "INVALID_REQUEST"})


class Vault:
    """The vault's state and rules; a `Component`.

    Args:
        settings: of the service.
        audit: gets a record of every release and refusal before the caller learns of it.
        log: structured log.
    """

    def __init__(self, settings: VaultSettings, audit: AuditSink, log: StructuredLogger) -> None:
        self._settings = settings
        self._audit = audit
        self._log = log
        self._allow = AllowList({})
        self._leases = LeaseTable(settings.lease_lifetime_ms / 1000, settings.max_leases)
        self._scanning = asyncio.Lock()
        self._tenant_recipients: OrderedDict[bytes, None] = OrderedDict()
        self._engine: Sm4GcmEngine | None = None
        self._source: KeySource | None = None
        self._catalog: ModelCatalog | None = None
        self._tenants: TenantKeyStore | None = None

    @property
    def lease_lifetime_s(self) -> float:
        return self._leases.lifetime_s

    async def start(self) -> None:
        """Loads keys and looks for models. Raises CONFIGURATION_INVALID, KEY_SLOT_MISMATCH."""
        await asyncio.to_thread(self._load)
        await self.models()

    def _load(self) -> None:
        settings = self._settings
        if settings.verifying_key_file is None:
            raise configuration_invalid(
                "verifying_key_file is not set: the vault must know whose signature to trust on models"
            )
        self._allow = AllowList(settings.allow)
        choice = choose_engine()
        for name, reason in choice.passed_over.items():
            self._log.warning("a faster SM4 engine cannot be used", engine=name, cause=reason)
        self._log.info("SM4 engine", engine=choice.engine.name, detail=choice.engine.detail)
        self._engine = choice.engine
        pinned = [load_verifying_key(settings.verifying_key_file)]
        self._catalog = ModelCatalog(settings.models_dir, pinned, self._log)
        self._source = source_from_files(settings.root_key_file, settings.passphrase_file)
        self._tenants = TenantKeyStore(settings.state_dir, self._engine)
        try:
            self._tenants.open(self._source)
        except BaseException:
            self._source.close()
            raise

    async def close(self) -> None:
        """Wipes all keys."""
        if self._tenants is not None:
            self._tenants.close()
        if self._source is not None:
            self._source.close()

    async def models(self) -> list[CatalogEntry]:
        """The models on offer, by name."""
        catalog = _started(self._catalog)
        async with self._scanning:
            return list((await asyncio.to_thread(catalog.scan)).values())

    async def open_model(self, peer: PeerIdentity, name: str) -> Lease:
        """A lease on a model whose manifest verifies and whose files are all there.

        Raises MODEL_NOT_FOUND, INTEGRITY_FAILURE, OVERLOADED.
        """
        catalog = _started(self._catalog)
        async with self._scanning:
            entry = await asyncio.to_thread(catalog.find, name)
        await asyncio.to_thread(entry.check_files)
        return self._leases.open(peer, entry)

    def close_model(self, peer: PeerIdentity, lease_id: str) -> None:
        """Ends a lease; raises LEASE_EXPIRED when the peer has none of that id."""
        self._leases.close(lease_id, peer)

    async def release_model_key(
        self, peer: PeerIdentity, lease_id: str, recipient: bytes, action: str
    ) -> Wrapped:
        """The data key of the lease's model, wrapped to the recipient; audited either way.

        Raises LEASE_EXPIRED, KEY_DENIED, INVALID_REQUEST, INTEGRITY_FAILURE, KEY_SLOT_MISMATCH.
        """
        record = _record(peer, action, "models/?")
        try:
            lease = self._leases.get(lease_id, peer)
            manifest = lease.entry.manifest
            record.resource = f"models/{manifest.name}"
            record.model_version = manifest.digest.hex()
            if not self._allow.permits_model(manifest.name, peer):
                raise _denied(peer, f"model {manifest.name}")
            _check_recipient(recipient, recipient in lease.used_keys)
            lease.used_keys.add(recipient)
            try:
                wrapped = await asyncio.to_thread(self._wrap_model_key, lease, recipient)
                await self._audit_release(record)
            except BaseException:
                # Nothing was released, so the same call may be tried again.
                lease.used_keys.discard(recipient)
                raise
        except SealmeshError as exc:
            await self._audit_refusal(record, exc)
            raise
        return wrapped

    def _wrap_model_key(self, lease: Lease, recipient: bytes) -> Wrapped:
        engine, source = _started(self._engine), _started(self._source)
        with Folder(lease.entry.path) as folder:
            data_key = unlock_data_key(folder, lease.entry.manifest, source, engine)
        try:
            return wrap_key(data_key, recipient, lease_subject(lease.lease_id), engine)
        finally:
            wipe(data_key)

    async def release_tenant_key(
        self, peer: PeerIdentity, handle: str, epoch: int, recipient: bytes, action: str
    ) -> Wrapped:
        """The KV key of a tenant, made on first use, wrapped to the recipient; audited either way.

        Raises KEY_DENIED, INVALID_REQUEST, INTEGRITY_FAILURE.
        """
        record = _record(peer, action, f"tenants/{handle[:32]}/epochs/{epoch}")
        try:
            if not self._allow.permits_tenant(handle, peer):
                raise _denied(peer, "this tenant")
            _check_recipient(recipient, recipient in self._tenant_recipients)
            self._tenant_recipients[recipient] = None
            if len(self._tenant_recipients) > _MAX_REMEMBERED_KEYS:
                self._tenant_recipients.popitem(last=False)
            try:
                wrapped = await asyncio.to_thread(self._wrap_tenant_key, handle, epoch, recipient)
                await self._audit_release(record)
            except BaseException:
                # Nothing was released, so the same call may be tried again.
                self._tenant_recipients.pop(recipient, None)
                raise
        except SealmeshError as exc:
            await self._audit_refusal(record, exc)
            raise
        return wrapped

    def _wrap_tenant_key(self, handle: str, epoch: int, recipient: bytes) -> Wrapped:
        engine, tenants = _started(self._engine), _started(self._tenants)
        key = tenants.key(handle, epoch)
        try:
            return wrap_key(key, recipient, tenant_subject(handle, epoch), engine)
        finally:
            wipe(key)

    async def read(
        self, peer: PeerIdentity, lease_id: str, path: str, offset_bytes: int, length_bytes: int
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Ciphertext of a file, as (offset, at most 1 MiB); the consumer sets the pace.

        The lease is checked again for every piece, so that a revoked or expired one ends the stream.
        Raises LEASE_EXPIRED, INVALID_REQUEST for an unknown file or a range outside it, INTEGRITY_FAILURE.
        """
        entry = self._leases.get(lease_id, peer).entry
        file = next((file for file in entry.manifest.files if file.sealed_path == path), None)
        if file is None:
            raise invalid_request(f"model {entry.manifest.name} has no file {path[:200]!r}")
        if offset_bytes > file.size_bytes or length_bytes > file.size_bytes - offset_bytes:
            raise invalid_request(f"{path} has {file.size_bytes} bytes; the range asked for ends behind them")
        end = offset_bytes + length_bytes if length_bytes else file.size_bytes
        with Folder(entry.path) as folder:
            fd = folder.open_file(path)
        try:
            for offset in range(offset_bytes, end, _READ_BYTES):
                self._leases.get(lease_id, peer)
                size = min(_READ_BYTES, end - offset)
                yield offset, await asyncio.to_thread(pread_exactly, fd, size, offset, entry.path / path)
        finally:
            os.close(fd)

    async def _audit_release(self, record: audit_pb2.AuditRecord) -> None:
        record.outcome = _OK
        # Before the key leaves: a release that cannot be recorded does not happen.
        await asyncio.to_thread(self._audit.write, record)
        self._log.info("key released", actor=record.actor, resource=record.resource)

    async def _audit_refusal(self, record: audit_pb2.AuditRecord, exc: SealmeshError) -> None:
        record.outcome = _DENIED if exc.reason in _DENIALS else _FAILED
        record.reason = exc.reason
        await asyncio.to_thread(self._audit.write, record)
        self._log.warning("key refused", actor=record.actor, resource=record.resource, cause=exc.message)


def _started(part: T | None) -> T:
    if part is None:
        raise RuntimeError("the vault is not started")
    return part


def _record(peer: PeerIdentity, action: str, resource: str) -> audit_pb2.AuditRecord:
    span = trace.get_current_span().get_span_context()
    return audit_pb2.AuditRecord(
        kind=_KEY_RELEASE,
        actor=str(peer),
        action=action,
        resource=resource,
        trace_id=trace.format_trace_id(span.trace_id) if span.is_valid else "",
    )


def _denied(peer: PeerIdentity, what: str) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.PERMISSION_DENIED,
        "KEY_DENIED",
        f"{peer} is not on the vault's allow-list for {what}; add it to `allow` in [vault]",
    )


def _check_recipient(recipient: bytes, used: bool) -> None:
    if len(recipient) != PUBLIC_KEY_BYTES:
        raise invalid_request(f"recipient_public_key has {PUBLIC_KEY_BYTES} bytes, not {len(recipient)}")
    if used:
        raise SealmeshError(
            grpc.StatusCode.PERMISSION_DENIED,
            "KEY_DENIED",
            "recipient_public_key was used before; make a new one for every release",
        )
