"""What an inference worker can be told: section [worker]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator
from sealmesh.telemetry.runtime.settings import ServiceSettings

__all__ = ["EngineArgument", "WorkerSettings"]

EngineArgument = JsonValue
"""A vLLM option's value: anything that JSON and TOML can say."""

# Owned by other settings, or against what sealmesh promises. The value says what to use instead.
_RESERVED_ENGINE_ARGS = {
    "model": "model and model_dir",
    "served_model_name": "model",
    "load_format": "vault_address or model_dir",
    "model_loader_extra_config": "vault_address",
    "kv_transfer_config": "kvstore_address",
    "max_model_len": "max_model_len",
    "dtype": "dtype",
    "prefix_caching_hash_algo": "nothing: stored blocks depend on sha256_cbor",
    "enable_log_requests": "nothing: prompts are never logged",
    "enable_log_outputs": "nothing: answers are never logged",
}


class WorkerSettings(ServiceSettings):
    """Serves one model with vLLM over gRPC (sealmesh.inference.v1)."""

    grpc_address: str = Field("127.0.0.1:9111", description="host:port of the gRPC server")
    http_address: str = Field("127.0.0.1:9211", description="host:port of /healthz, /readyz and /metrics")
    name: str = Field("worker-0", min_length=1, max_length=63, description="identity of this worker")
    model: str = Field(min_length=1, max_length=128, description="name under which the model is served")
    model_dir: Path | None = Field(
        None, description="folder of a plain model, or of the sealed files on shared storage"
    )
    vault_address: str = Field("", description="host:port of the vault; empty: model_dir is a plain folder")
    verifying_key_file: Path | None = Field(
        None, description="public key that the sealed manifest must be signed with (pinned)"
    )
    allow_plaintext: bool = Field(False, description="whether a plain, unsealed model folder may be served")
    private_dir: Path = Field(
        Path("/dev/shm"),  # noqa: S108  # memory is the point: opened files must not reach a disk
        description="folder in memory (tmpfs) for the model's opened configuration and tokenizer",
    )
    load_threads: int = Field(
        0, ge=0, le=64, description="threads that decrypt weights; 0: one per core, at most 8"
    )

    kvstore_address: str = Field("", description="host:port of the KV store; empty: no store")
    kv_lookup_deadline_ms: int = Field(
        50, ge=1, le=10_000, description="longest wait for the KV store's answer before it counts as a miss"
    )
    kv_options: dict[str, EngineArgument] = Field(
        default_factory=dict, description="further options of the KV connector"
    )

    device: Literal["auto", "cpu", "cuda", "ascend"] = Field("auto", description="device family")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of the computation; auto: the fastest one of the device"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus output in tokens; default: what the model states"
    )
    kv_cache_gib: int = Field(
        1, ge=1, le=65_536, description="memory for the KV cache in GiB (cpu only: others use what is left)"
    )
    engine_args: dict[str, EngineArgument] = Field(
        default_factory=dict, description="any further vLLM engine or API server option, for example seed=1"
    )
    engine_stall_ms: int = Field(
        120_000,
        ge=1_000,
        description="with requests running and no engine step for this long the worker is NOT_SERVING; "
        "after twice this time it ends, to be started anew",
    )

    @field_validator("engine_args")
    @classmethod
    def _are_free(cls, value: dict[str, EngineArgument]) -> dict[str, EngineArgument]:
        names = {name.strip().lstrip("-").replace("-", "_"): item for name, item in value.items()}
        for name in names:
            if (instead := _RESERVED_ENGINE_ARGS.get(name)) is not None:
                raise ValueError(f"{name} may not be set here; use {instead}")
        return names

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.vault_address:
            if self.tls_ca is None:
                raise ValueError("vault_address needs mTLS: set tls_ca, tls_certificate and tls_key")
        elif self.model_dir is None:
            raise ValueError("set vault_address (a sealed model) or model_dir (a plain folder)")
        elif not self.allow_plaintext:
            raise ValueError(
                f"the plain model folder {self.model_dir} is refused: seal it (sealmesh seal) and set "
                "vault_address, or set allow_plaintext = true"
            )
        return self

    @property
    def sealed(self) -> bool:
        """Whether the model comes through the vault."""
        return bool(self.vault_address)
