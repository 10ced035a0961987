"""What a sealed folder says about itself, without any key: for `sealmesh inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sealmesh.security.keys.signing import VerifyingKey
from sealmesh.security.sealed.format import FileKind
from sealmesh.security.sealed.keyring import list_slots
from sealmesh.security.sealed.reader import TensorInfo, open_sealed


@dataclass(frozen=True)
class FileDescription:
    """A sealed file."""

    path: str
    kind: str  # "tensors" or "blob"
    plaintext_bytes: int
    sealed_bytes: int
    tensor_count: int
    chunk_count: int
    chunk_bytes: int
    sm3: str  # hex, of the sealed file


@dataclass(frozen=True)
class SlotDescription:
    """A key slot."""

    slot_id: str  # hex
    kind: str
    label: str
    created_s: int  # seconds since 1970


@dataclass(frozen=True)
class ModelDescription:
    """A sealed model. Signature and indexes hold; `signer_pinned` says whether the signer was known."""

    folder: Path
    name: str
    version: int
    model_id: str  # hex
    manifest_digest: str  # SM3, hex
    created_s: int  # seconds since 1970
    signature_suite: str
    signer_key_id: str
    signer_pinned: bool
    plaintext_bytes: int
    sealed_bytes: int
    parameter_count: int
    dtypes: Mapping[str, int]  # dtype to number of tensors
    files: tuple[FileDescription, ...]
    slots: tuple[SlotDescription, ...]
    tensors: tuple[TensorInfo, ...]


def describe(path: Path, *, pinned: Collection[VerifyingKey] | None = None) -> ModelDescription:
    """Describes a sealed folder.

    Raises NOT_FOUND when it is not one, INTEGRITY_FAILURE when signature, slot file, sizes or indexes do
    not hold; ciphertext and tags are not read (see `verify_folder`).
    """
    slots = list_slots(path) if (path / "sealmesh.manifest").exists() else ()
    with open_sealed(path, pinned=pinned) as model:
        manifest, tensors = model.manifest, model.tensors()
        per_file = Counter(info.file for info in tensors)
        files = tuple(
            FileDescription(
                path=file.listed.path,
                kind="tensors" if file.listed.kind is FileKind.TENSORS else "blob",
                plaintext_bytes=file.listed.plaintext_bytes,
                sealed_bytes=file.listed.size_bytes,
                tensor_count=per_file[file.listed.path],
                chunk_count=file.index.chunk_count,
                chunk_bytes=file.index.preamble.chunk_bytes,
                sm3=file.listed.sm3.hex(),
            )
            for file in model.files()
        )
    parameters = 0
    for info in tensors:
        count = 1
        for dimension in info.shape:
            count *= dimension
        parameters += count
    return ModelDescription(
        folder=path,
        name=manifest.name,
        version=manifest.version,
        model_id=manifest.model_id.hex(),
        manifest_digest=manifest.digest.hex(),
        created_s=manifest.created_s,
        signature_suite=manifest.signer.suite.name.lower(),
        signer_key_id=manifest.signer.key_id,
        signer_pinned=pinned is not None,
        plaintext_bytes=manifest.plaintext_bytes,
        sealed_bytes=manifest.ciphertext_bytes,
        parameter_count=parameters,
        dtypes=dict(Counter(info.dtype for info in tensors)),
        files=files,
        slots=tuple(SlotDescription(s.slot_id.hex(), s.kind_name, s.label, s.created_s) for s in slots),
        tensors=tensors,
    )
