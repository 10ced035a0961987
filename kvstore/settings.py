"""Settings of the kvstore service: section [kvstore]."""

from pathlib import Path

from pydantic import Field
from sealmesh.telemetry.runtime.settings import ServiceSettings


class KVStoreSettings(ServiceSettings):
    """Store of KV-cache blocks in Redis, shared by all workers and kept over restarts."""

    grpc_address: str = Field("127.0.0.1:9102", description="host:port of the gRPC server")
    http_address: str = Field("127.0.0.1:9202", description="host:port of /healthz, /readyz and /metrics")
    redis_url: str = Field(
        "",
        pattern=r"^$|^(redis|rediss|unix)://",
        description="redis://, rediss:// or unix:// address of the cache Redis; empty: an embedded one",
    )
    data_dir: Path = Field(Path("kv"), description="folder of the embedded Redis; not used with redis_url")
    max_memory_bytes: int = Field(
        1 << 30,
        ge=16 << 20,
        le=1 << 46,
        description="memory for blocks in the embedded Redis; the least recently used are dropped",
    )
    max_value_bytes: int = Field(
        64 << 20, ge=1 << 10, le=512 << 20, description="largest block that is stored; larger are refused"
    )
    redis_connections: int = Field(16, ge=2, le=1024, description="most connections to Redis at once")
    connect_timeout_ms: int = Field(1_000, ge=10, le=60_000, description="time to connect to Redis")
    command_timeout_ms: int = Field(
        2_000, ge=10, le=60_000, description="time for one Redis command or pipeline"
    )
    lookup_timeout_ms: int = Field(
        100, ge=5, le=10_000, description="time for one lookup; the worker's own deadline is shorter"
    )
    embedded_start_timeout_ms: int = Field(
        120_000, ge=1_000, le=3_600_000, description="time for the embedded Redis to load its data"
    )
    probe_interval_ms: int = Field(
        1_000, ge=50, le=60_000, description="how often Redis is pinged; readiness follows the answer"
    )
