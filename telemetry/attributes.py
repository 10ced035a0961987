"""The allow-list: every attribute that a sealmesh span or access log may carry.

Telemetry leaves the trust boundary of a request, so what it may say is decided here and nowhere else.
Values are counts, durations, sizes, names from configuration and names from contracts. Never: prompts,
answers, tool arguments, keys, tokens ids, personal data, tenant names. A new attribute is a reviewed
change of this file. Names follow the OpenTelemetry semantic conventions where they have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from opentelemetry.trace import Span

__all__ = ["MAX_VALUE_CHARS", "Attribute", "AttributeValue", "bounded", "set_attributes"]

AttributeValue = str | int | float | bool

MAX_VALUE_CHARS: Final = 256


class Attribute(StrEnum):
    """Attribute names. Units are part of the name."""

    # OpenTelemetry: rpc, http, server, error
    RPC_SYSTEM = "rpc.system"
    RPC_SERVICE = "rpc.service"
    RPC_METHOD = "rpc.method"
    RPC_STATUS = "rpc.grpc.status_code"
    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    SERVER_ADDRESS = "server.address"
    ERROR_TYPE = "error.type"

    # OpenTelemetry: gen_ai
    GEN_AI_OPERATION = "gen_ai.operation.name"
    GEN_AI_MODEL = "gen_ai.request.model"
    GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
    GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
    GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    GEN_AI_FINISH_REASON = "gen_ai.response.finish_reason"
    GEN_AI_STREAM = "gen_ai.request.stream"
    GEN_AI_TIME_TO_FIRST_TOKEN_S = "gen_ai.server.time_to_first_token"

    # OpenTelemetry: db
    DB_SYSTEM = "db.system.name"
    DB_OPERATION = "db.operation.name"
    DB_BATCH_SIZE = "db.operation.batch.size"

    # sealmesh
    ERROR_REASON = "sealmesh.error.reason"
    PEER_ROLE = "sealmesh.peer.role"
    WORKER_NAME = "sealmesh.worker.name"
    REQUEST_ID = "sealmesh.request.id"
    KV_BLOCKS_ASKED = "sealmesh.kv.blocks_asked"
    KV_BLOCKS_HIT = "sealmesh.kv.blocks_hit"
    KV_BLOCKS_STORED = "sealmesh.kv.blocks_stored"
    KV_BYTES = "sealmesh.kv.bytes"
    KV_OUTCOME = "sealmesh.kv.outcome"
    PII_FINDINGS = "sealmesh.pii.findings"
    PII_TYPES = "sealmesh.pii.types"
    PII_RESTORED = "sealmesh.pii.restored"
    TEXT_CHARS = "sealmesh.text.chars"
    SEALED_BYTES = "sealmesh.sealed.bytes"
    SEALED_ENGINE = "sealmesh.sealed.engine"
    MODEL_VERSION = "sealmesh.model.version"


def bounded(value: AttributeValue) -> AttributeValue:
    """The value, text cut to MAX_VALUE_CHARS so that nothing large slips into telemetry."""
    return value[:MAX_VALUE_CHARS] if isinstance(value, str) else value


def set_attributes(span: Span, attributes: Mapping[Attribute, AttributeValue]) -> None:
    """Sets attributes of the allow-list on a span; the only way sealmesh code sets any."""
    if span.is_recording():
        for name, value in attributes.items():
            span.set_attribute(name.value, bounded(value))
