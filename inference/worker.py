"""Puts a worker together from its settings."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from sealmesh.inference.devices import DeviceError, detect_device
from sealmesh.inference.in_flight import InFlight
from sealmesh.inference.kv_config import KVConnectorConfig
from sealmesh.inference.model_folder import (
    check_plain_folder,
    computation_dtype,
    converted_bytes,
    plain_weights_digest,
    weight_bytes,
)
from sealmesh.inference.sealed_options import LOAD_FORMAT, SealedLoadOptions
from sealmesh.inference.service import InferenceService
from sealmesh.inference.settings import EngineArgument, WorkerSettings
from sealmesh.inference.shared_memory import remove_noted_buffers
from sealmesh.inference.vllm_engine import EnginePlan, VllmEngine
from sealmesh.inference.watchdog import Watchdog
from sealmesh.inference.worker_metrics import WorkerMetrics
from sealmesh.protos.inference.v1 import inference_pb2, inference_pb2_grpc
from sealmesh.security.keys.signing import load_verifying_key
from sealmesh.security.sealed.materialise import materialise
from sealmesh.security.sm4.sm3 import sm3
from sealmesh.security.tls import RoleAuthorizer, TlsFiles, server_credentials
from sealmesh.security.vault.client import VaultClient, open_remote_model
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import ServerSpec
from sealmesh.telemetry.telemetry import Telemetry

__all__ = ["worker_spec"]

_SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_ROLES: Final = {
    _SERVICE: ("gateway", "operator"),
    f"{_SERVICE}/ReloadModel": ("operator",),
    f"{_SERVICE}/Drain": ("operator",),
}
_CONNECTOR: Final = "SealmeshKVConnector"
_CONNECTOR_MODULE: Final = "sealmesh.inference.kv_connector"


def worker_spec(settings: WorkerSettings, telemetry: Telemetry) -> ServerSpec:
    """The worker as the settings ask for; nothing is started yet."""
    metrics = WorkerMetrics(telemetry.metrics)
    engine = VllmEngine(lambda: prepare_engine(settings), telemetry, metrics)
    in_flight = InFlight()
    # The generated base answers UNIMPLEMENTED for ReloadModel; only its type stub is abstract.
    service = InferenceService(engine, settings.name, in_flight, metrics)  # type: ignore[abstract]
    watchdog = Watchdog(engine, settings.engine_stall_ms / 1000)

    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)

    files = TlsFiles.from_settings(settings)
    return ServerSpec(
        settings=settings,
        telemetry=telemetry,
        service_names=[_SERVICE],
        register=register,
        authorize=RoleAuthorizer(_ROLES),
        credentials=server_credentials(files) if files is not None else None,
        components=[engine],
        ready=watchdog.readiness,
        watch=watchdog.run,
        endless={f"/{_SERVICE}/WatchLoad"},
    )


def prepare_engine(settings: WorkerSettings) -> EnginePlan:
    """Makes the model ready for vLLM and says what engine to build. Blocks.

    Raises:
        SealmeshError: CONFIGURATION_INVALID for a folder or device that cannot serve; what the vault or the
            verification of a sealed model raise.
    """
    try:
        device = detect_device(settings.device)
    except DeviceError as exc:
        raise _invalid(str(exc)) from None

    def dtype_of(folder: Path) -> str:
        return settings.dtype if settings.dtype != "auto" else computation_dtype(folder, device)

    model = (_sealed_model if settings.sealed else _plain_model)(settings, dtype_of)
    arguments: dict[str, EngineArgument] = {**settings.engine_args, **model.arguments}
    if settings.kvstore_address:
        arguments["kv_transfer_config"] = _kv_transfer(settings, model.digest())
    return EnginePlan(
        model=settings.model,
        folder=model.folder,
        version=model.version,
        device=device,
        dtype=model.dtype,
        max_model_len=settings.max_model_len,
        kv_cache_gib=settings.kv_cache_gib,
        weight_bytes=model.weight_bytes,
        arguments=arguments,
        log=f"{settings.log_level}:{settings.log_format}",
        private=model.private,
        release=model.release,
    )


@dataclass(frozen=True)
class _Model:
    """A model made ready."""

    folder: Path
    private: Path
    version: str
    dtype: str
    weight_bytes: int
    arguments: Mapping[str, EngineArgument]
    digest: Callable[[], str]
    """Digest of the weights, 32 bytes as hex; may read every byte."""
    release: Callable[[], None]


def _plain_model(settings: WorkerSettings, dtype_of: Callable[[Path], str]) -> _Model:
    if settings.model_dir is None:
        raise _invalid("set worker.vault_address or worker.model_dir")
    folder = settings.model_dir.resolve()
    check_plain_folder(folder)
    dtype = dtype_of(folder)
    private = Path(tempfile.mkdtemp(prefix="sealmesh-worker-", dir=settings.private_dir))
    return _Model(
        folder=folder,
        private=private,
        version="",
        dtype=dtype,
        weight_bytes=weight_bytes(folder, dtype),
        arguments={},
        digest=lambda: plain_weights_digest(folder),
        release=lambda: shutil.rmtree(private, ignore_errors=True),
    )


def _sealed_model(settings: WorkerSettings, dtype_of: Callable[[Path], str]) -> _Model:
    """Verifies the model, and opens its configuration and tokenizer into memory; weights stay sealed."""
    files = TlsFiles.from_settings(settings)
    key_file = settings.verifying_key_file
    if files is None or key_file is None:
        raise _invalid("a sealed model needs worker.verifying_key_file and the three worker.tls_* files")
    with (
        VaultClient(settings.vault_address, files) as vault,
        open_remote_model(
            vault, settings.model, pinned=[load_verifying_key(key_file)], model_dir=settings.model_dir
        ) as sealed,
    ):
        folder = materialise(
            sealed,
            base=settings.private_dir,
            allow_code=bool(settings.engine_args.get("trust_remote_code")),
            on_abandoned=remove_noted_buffers,
        )
        dtype = dtype_of(folder.path)
        version = sm3(sealed.manifest.encoded).hex()
        size = sum(converted_bytes(info.dtype, info.size_bytes, dtype) for info in sealed.tensors())
    options = SealedLoadOptions(
        vault_address=settings.vault_address,
        model=settings.model,
        tls_ca=str(files.ca.resolve()),
        tls_certificate=str(files.certificate.resolve()),
        tls_key=str(files.key.resolve()),
        verifying_key=str(key_file.resolve()),
        location=str(settings.model_dir.resolve()) if settings.model_dir is not None else "",
        threads=settings.load_threads,
    )
    return _Model(
        folder=folder.path,
        private=folder.path,
        version=version,
        dtype=dtype,
        weight_bytes=size,
        arguments={"load_format": LOAD_FORMAT, "model_loader_extra_config": {**options.to_extra_config()}},
        digest=lambda: version,
        release=folder.close,
    )


def _kv_transfer(settings: WorkerSettings, digest: str) -> dict[str, EngineArgument]:
    extra: dict[str, EngineArgument] = {
        **settings.kv_options,
        "kvstore_address": settings.kvstore_address,
        "model_digest": digest,
        "lookup_deadline_ms": settings.kv_lookup_deadline_ms,
        **_tls_paths(settings),
    }
    if settings.otlp_endpoint:
        extra["otlp_endpoint"] = settings.otlp_endpoint
    if settings.trace_dir is not None:
        extra["trace_dir"] = str(settings.trace_dir)
    try:
        # Here rather than in the engine process, where a person would not see the reason.
        KVConnectorConfig.parse(extra)
    except ValueError as exc:
        raise _invalid(str(exc)) from None
    return {
        "kv_connector": _CONNECTOR,
        "kv_connector_module_path": _CONNECTOR_MODULE,
        "kv_role": "kv_both",
        # vLLM's own default fails the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _tls_paths(settings: WorkerSettings) -> dict[str, EngineArgument]:
    """Paths of the PEM files: engine processes read them and authenticate themselves."""
    names = ("tls_ca", "tls_certificate", "tls_key")
    paths = {name: getattr(settings, name) for name in names}
    return {name: str(path.resolve()) for name, path in paths.items() if path is not None}


def _invalid(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)
