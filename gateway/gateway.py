"""The gateway put together: settings and telemetry in, a specification for the runtime out."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
from sealmesh.gateway.access.identity import Authenticator
from sealmesh.gateway.app import GatewayApp
from sealmesh.gateway.http import new_request_id
from sealmesh.gateway.pipeline import Caller, Pipeline
from sealmesh.gateway.privacy import PrivacyFilter
from sealmesh.gateway.rest.native import RestFront
from sealmesh.gateway.rest.openai import OpenAIFront
from sealmesh.gateway.rest.transcode import StreamHandler, Transcoder, UnaryHandler
from sealmesh.gateway.routing.pool import WorkerPool
from sealmesh.gateway.service import OPERATIONS, SERVICE, GatewayMethods, GatewayServicer, RpcAuthorizer
from sealmesh.gateway.settings import GatewaySettings
from sealmesh.protos.gateway.v1 import gateway_pb2_grpc
from sealmesh.security.tls import TlsFiles, channel_credentials
from sealmesh.telemetry.runtime.channel import open_channel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.health import READY, Readiness
from sealmesh.telemetry.runtime.http import HttpOptions
from sealmesh.telemetry.runtime.server import ServerSpec
from sealmesh.telemetry.telemetry import Telemetry

__all__ = ["Gateway"]


class Gateway:
    """Every part of one gateway process.

    Attributes:
        pool: workers.
        privacy: PII filter.
        authenticator: API keys.

    Args:
        settings: see GatewaySettings.
        telemetry: of this process.
        privacy: PII filter; default: the real one with the settings' deadline.
    """

    def __init__(
        self, settings: GatewaySettings, telemetry: Telemetry, *, privacy: PrivacyFilter | None = None
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._tls = TlsFiles.from_settings(settings)
        self.authenticator = Authenticator(settings.access_keys_file, settings.secret_file, telemetry.log)
        self.privacy = privacy or PrivacyFilter(telemetry, timeout_s=settings.pii_timeout_ms / 1000)
        self.pool = WorkerPool(
            settings.workers,
            lambda address: self._channel(address, telemetry),
            lambda address: self._channel(address, None),
            telemetry.log,
        )
        self._pipeline = Pipeline(self.pool, self.privacy, telemetry, max_choices=settings.max_choices)
        self._methods = GatewayMethods(self._pipeline, self.pool)

    def spec(self) -> ServerSpec:
        """What the runtime needs to serve this gateway.

        Raises:
            SealmeshError: CONFIGURATION_INVALID when a TLS file of the front cannot be used.
        """
        settings = self._settings
        rest = RestFront(self._transcoder(), OPERATIONS, self.authenticator, settings)
        openai = OpenAIFront(self._pipeline, self.pool, self.authenticator, settings)
        return ServerSpec(
            settings=settings,
            telemetry=self._telemetry,
            service_names=(SERVICE.full_name,),
            register=self._register,
            authorize=RpcAuthorizer(self.authenticator),
            credentials=_front_credentials(settings),
            components=(self.authenticator, self.privacy, self.pool),
            ready=self._readiness,
            http_app=GatewayApp(openai, rest, self._telemetry),
            http_options=HttpOptions(
                certificate=settings.front_tls_certificate,
                key=settings.front_tls_key,
                keep_alive_s=settings.keep_alive_ms / 1000,
                max_connections=settings.max_connections,
            ),
        )

    def _readiness(self) -> Readiness:
        return READY if self.pool.ready else Readiness(False, "no worker is ready")

    def _channel(self, address: str, telemetry: Telemetry | None) -> grpc.aio.Channel:
        return open_channel(
            address,
            channel_credentials(self._tls) if self._tls is not None else None,
            expected_role="worker" if self._tls is not None else None,
            telemetry=telemetry,
            max_message_bytes=self._settings.max_message_bytes,
        )

    def _register(self, server: grpc.aio.Server) -> None:
        servicer = GatewayServicer(
            self._methods,
            self.authenticator,
            timeout_s=self._settings.request_timeout_ms / 1000,
            new_request_id=new_request_id,
        )
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)

    def _transcoder(self) -> Transcoder[Caller]:
        methods = self._methods
        # The handlers' request types are those of the method descriptors that they are listed under.
        unary: dict[str, UnaryHandler[Caller]] = {
            f"{SERVICE.full_name}/ListModels": methods.list_models,  # type: ignore[dict-item]
            f"{SERVICE.full_name}/GetModel": methods.get_model,  # type: ignore[dict-item]
            f"{SERVICE.full_name}/MaskText": methods.mask_text,  # type: ignore[dict-item]
        }
        stream: dict[str, StreamHandler[Caller]] = {
            f"{SERVICE.full_name}/GenerateText": methods.generate_text,  # type: ignore[dict-item]
            f"{SERVICE.full_name}/CreateChatCompletion": methods.create_chat_completion,  # type: ignore[dict-item]
        }
        return Transcoder.of([SERVICE], unary, stream)


def _front_credentials(settings: GatewaySettings) -> grpc.ServerCredentials | None:
    certificate, key = settings.front_tls_certificate, settings.front_tls_key
    if certificate is None or key is None:
        return None
    try:
        # uvicorn would report a bad file only after the start.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(certificate).read_bytes())])
    except (OSError, ssl.SSLError) as error:
        raise SealmeshError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "CONFIGURATION_INVALID",
            f"front_tls_certificate {certificate} and front_tls_key {key}: {error.strerror or error}",
        ) from None
