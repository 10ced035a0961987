"""What the sealed loader is told: vLLM's `model_loader_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sealmesh.security.tls import TlsFiles

__all__ = ["LOAD_FORMAT", "SealedLoadOptions"]

LOAD_FORMAT: Final = "sealed"


@dataclass(frozen=True)
class SealedLoadOptions:
    """`model_loader_extra_config` of the load format: addresses and paths, never keys.

    Attributes:
        vault_address: host:port of the vault.
        model: name of the sealed model.
        tls_ca, tls_certificate, tls_key: PEM files of this worker.
        verifying_key: PEM of the public key that must have signed the manifest.
        location: folder of the ciphertext on this machine; empty: where the vault says.
        threads: that decrypt; 0: one per core, at most 8.
        lookahead_bytes: tensors decrypted ahead of the one that vLLM takes.
    """

    vault_address: str
    model: str
    tls_ca: str
    tls_certificate: str
    tls_key: str
    verifying_key: str
    location: str = ""
    threads: int = 0
    lookahead_bytes: int = 64 << 20

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> SealedLoadOptions:
        """Reads the mapping as vLLM passes it.

        Raises:
            ValueError: a key is unknown or missing, or a value has the wrong type.
        """
        try:
            options = cls(**extra)  # type: ignore[arg-type]  # types are checked below
        except TypeError as exc:
            raise ValueError(f"model_loader_extra_config of load format {LOAD_FORMAT}: {exc}") from None
        for name, kind in cls.__annotations__.items():
            if type(getattr(options, name)).__name__ != kind:
                raise ValueError(
                    f"model_loader_extra_config of load format {LOAD_FORMAT}: {name} must be {kind}"
                )
        return options

    def tls_files(self) -> TlsFiles:
        """The certificate that this process shows the vault."""
        return TlsFiles(Path(self.tls_ca), Path(self.tls_certificate), Path(self.tls_key))

    def to_extra_config(self) -> dict[str, str | int]:
        """As `model_loader_extra_config`."""
        return asdict(self)
