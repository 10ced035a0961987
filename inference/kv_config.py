"""The connector's part of vLLM's configuration: `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sealmesh.inference.kv_client import KVClientOptions
from sealmesh.security.tls import TlsFiles

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class KVConnectorConfig:
    """Settings of the connector; names are the keys of `kv_connector_extra_config`.

    Attributes:
        kvstore_address: host:port of kvstore.
        model_digest: Digest of the weights, 32 bytes as hex. Blocks of other weights are never found.
        tls_ca, tls_certificate, tls_key: PEM files of this worker; all three or none.
        lookup_deadline_ms: A lookup that takes longer is a miss.
        load_deadline_ms: A load that takes longer in all is recomputed from where it is.
        load_stall_ms: A load with no byte for that long is recomputed from where it is.
        save_deadline_ms: A save that takes longer is given up.
        save: Whether computed blocks are stored.
        save_queue_bytes: Snapshots that may wait to be stored; more are dropped.
        trace_dir: Folder of local traces; empty: none.
        otlp_endpoint: OTLP gRPC collector; empty: none.
    """

    kvstore_address: str
    model_digest: str
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    lookup_deadline_ms: int = 50
    load_deadline_ms: int = 2000
    load_stall_ms: int = 500
    save_deadline_ms: int = 5000
    save: bool = True
    save_queue_bytes: int = 256 << 20
    trace_dir: str = ""
    otlp_endpoint: str = ""
    digest: bytes = field(init=False, repr=False, default=b"")

    def __post_init__(self) -> None:
        try:
            digest = bytes.fromhex(self.model_digest)
        except ValueError:
            digest = b""
        if len(digest) != _DIGEST_BYTES:
            raise ValueError(
                "kv_connector_extra_config: model_digest must be the digest of the weights, "
                f"{_DIGEST_BYTES} bytes as hex; without it blocks of other weights could be loaded"
            )
        object.__setattr__(self, "digest", digest)
        tls = (self.tls_ca, self.tls_certificate, self.tls_key)
        if any(tls) and not all(tls):
            raise ValueError(
                "kv_connector_extra_config: set tls_ca, tls_certificate and tls_key together, or none"
            )
        for name in ("lookup_deadline_ms", "load_deadline_ms", "load_stall_ms", "save_deadline_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"kv_connector_extra_config: {name} must be positive")

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> "KVConnectorConfig":
        """Reads the mapping as vLLM passes it.

        Raises:
            ValueError: A key is unknown, missing or has a value of the wrong type; one line that says which.
        """
        known = {name: kind for name, kind in cls.__annotations__.items() if name != "digest"}
        values: dict[str, object] = {}
        for name, value in extra.items():
            if name not in known:
                raise ValueError(f"kv_connector_extra_config: unknown key {name}; known: {', '.join(known)}")
            if type(value) is not known[name]:
                raise ValueError(
                    f"kv_connector_extra_config: {name} must be {known[name].__name__}, "
                    f"not {type(value).__name__}"
                )
            values[name] = value
        for name in ("kvstore_address", "model_digest"):
            if not values.get(name):
                raise ValueError(f"kv_connector_extra_config: {name} is missing")
        return cls(**values)  # type: ignore[arg-type]  # types were checked above, key by key

    def client_options(self) -> KVClientOptions:
        """How to reach the store."""
        tls = None
        if self.tls_ca:
            tls = TlsFiles(Path(self.tls_ca), Path(self.tls_certificate), Path(self.tls_key))
        return KVClientOptions(
            address=self.kvstore_address,
            tls=tls,
            lookup_deadline_s=self.lookup_deadline_ms / 1e3,
            load_deadline_s=self.load_deadline_ms / 1e3,
            load_stall_s=self.load_stall_ms / 1e3,
            save_deadline_s=self.save_deadline_ms / 1e3,
        )
