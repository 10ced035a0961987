"""ModelVaultService on the wire: messages in, messages out; the rules are in `core`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sealmesh.protos.security.v1 import model_vault_pb2 as pb
from sealmesh.protos.security.v1 import model_vault_pb2_grpc
from sealmesh.security.errors import invalid_request
from sealmesh.security.sealed.manifest import Manifest
from sealmesh.security.tls import PeerIdentity
from sealmesh.security.vault.core import Vault
from sealmesh.telemetry.runtime.interceptors import Context

SERVICE = pb.DESCRIPTOR.services_by_name["ModelVaultService"].full_name

# Who may call what; see the contract.
ROLES = {
    f"/{SERVICE}/ListModels": ("worker", "gateway", "operator"),
    f"/{SERVICE}/OpenModel": ("worker",),
    f"/{SERVICE}/ReleaseKey": ("worker",),
    f"/{SERVICE}/ReadTensors": ("worker",),
    f"/{SERVICE}/CloseModel": ("worker",),
}


class ModelVaultService(model_vault_pb2_grpc.ModelVaultServiceServicer):
    """The servicer. Errors are SealmeshError; the runtime's interceptor puts them on the wire."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        models = await self._vault.models()
        return pb.ListModelsResponse(models=[_sealed_model(entry.manifest) for entry in models])

    async def OpenModel(self, request: pb.OpenModelRequest, context: Context) -> pb.OpenModelResponse:
        lease = await self._vault.open_model(PeerIdentity.of(context), request.model)
        manifest = lease.entry.manifest
        response = pb.OpenModelResponse(
            lease=lease.lease_id,
            sealed_model=_sealed_model(manifest),
            manifest=manifest.encoded,
            location=str(lease.entry.path.absolute()),
            files=[
                pb.SealedFile(path=file.sealed_path, size_bytes=file.size_bytes, sm3=file.sm3)
                for file in manifest.files
            ],
        )
        response.lifetime.FromMilliseconds(round(self._vault.lease_lifetime_s * 1000))
        return response

    async def ReleaseKey(self, request: pb.ReleaseKeyRequest, context: Context) -> pb.ReleaseKeyResponse:
        peer = PeerIdentity.of(context)
        action = f"{SERVICE}/ReleaseKey"
        match request.WhichOneof("subject"):
            case "lease":
                wrapped = await self._vault.release_model_key(
                    peer, request.lease, request.recipient_public_key, action
                )
            case "tenant":
                wrapped = await self._vault.release_tenant_key(
                    peer, request.tenant.handle, request.tenant.epoch, request.recipient_public_key, action
                )
            case _:
                raise invalid_request("ReleaseKey needs a subject: a lease or a tenant")
        return pb.ReleaseKeyResponse(
            key=pb.WrappedKey(
                algorithm=pb.WrappedKey.ALGORITHM_X25519_HKDF_SM3_SM4_GCM,
                sender_public_key=wrapped.sender_public_key,
                ciphertext=wrapped.ciphertext,
            )
        )

    async def ReadTensors(
        self, request: pb.ReadTensorsRequest, context: Context
    ) -> AsyncIterator[pb.ReadTensorsResponse]:
        pieces = self._vault.read(
            PeerIdentity.of(context), request.lease, request.path, request.offset_bytes, request.length_bytes
        )
        async for offset, data in pieces:
            yield pb.ReadTensorsResponse(offset_bytes=offset, data=data)

    async def CloseModel(self, request: pb.CloseModelRequest, context: Context) -> pb.CloseModelResponse:
        self._vault.close_model(PeerIdentity.of(context), request.lease)
        return pb.CloseModelResponse()


def _sealed_model(manifest: Manifest) -> pb.SealedModel:
    return pb.SealedModel(
        model=manifest.name,
        model_id=manifest.model_id,
        version=manifest.version,
        manifest_digest=manifest.digest,
        ciphertext_bytes=manifest.ciphertext_bytes,
    )
