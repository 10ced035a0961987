"""The signed manifest of a sealed model: which files belong to it, and digests of all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sealmesh.security.binary import Cursor, Packer
from sealmesh.security.errors import integrity_failure
from sealmesh.security.files import check_relative_path
from sealmesh.security.keys.signing import SignatureSuite, Signer, VerifyingKey
from sealmesh.security.sealed.format import (
    FILE_ID_BYTES,
    MANIFEST_MAGIC,
    MAX_MANIFEST_BYTES,
    MODEL_ID_BYTES,
    SEALED_SUFFIX,
    SUITE_SM4_GCM_SM3,
    VERSION,
    FileKind,
    valid_model_name,
)
from sealmesh.security.sm4.sm3 import DIGEST_BYTES, sm3

_SIGNATURE_CONTEXT = b"sealmesh manifest v1\x00"
_MIN_FILE_BYTES = 1 + 2 + FILE_ID_BYTES + 4 + 8 + 8 + DIGEST_BYTES + 4 + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of the model."""

    kind: FileKind
    path: str  # of the plaintext, relative to the model's folder
    file_id: bytes
    file_number: int
    plaintext_bytes: int
    size_bytes: int  # of the sealed file
    sm3: bytes  # of the sealed file
    index_bytes: int
    index_digest: bytes  # SM3 of the sealed file's preamble and index

    @property
    def sealed_path(self) -> str:
        return self.path + SEALED_SUFFIX


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest whose signature was verified by `decode`."""

    model_id: bytes
    name: str
    version: int
    created_s: int  # seconds since 1970
    key_commitment: bytes
    files: tuple[ManifestFile, ...]
    signer: VerifyingKey
    encoded: bytes

    @property
    def digest(self) -> bytes:
        """SM3 of the manifest file; names exactly this sealing."""
        return sm3(self.encoded)

    @property
    def ciphertext_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def plaintext_bytes(self) -> int:
        return sum(file.plaintext_bytes for file in self.files)

    def file(self, path: str) -> ManifestFile | None:
        """The file of a plaintext path."""
        return next((file for file in self.files if file.path == path), None)

    @classmethod
    def decode(cls, data: bytes, what: str, pinned: Collection[VerifyingKey] | None) -> Manifest:
        """Verifies the signature, then parses.

        Args:
            data: the manifest file.
            what: how errors name it.
            pinned: keys that may have signed; None trusts the key inside, which shows only that the
                manifest is whole, not who made it (for `inspect`).

        Raises INTEGRITY_FAILURE for an unknown signer, a bad signature or anything malformed.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise integrity_failure(f"{what} is over {MAX_MANIFEST_BYTES} bytes")
        cursor = Cursor(data, what)
        if cursor.take(len(MANIFEST_MAGIC)) != MANIFEST_MAGIC:
            raise integrity_failure(f"{what} is not a manifest of a sealed model")
        version, suite, signature_suite, reserved = cursor.u16(), cursor.u16(), cursor.u16(), cursor.u16()
        if (version, suite, reserved) != (VERSION, SUITE_SM4_GCM_SM3, 0):
            raise integrity_failure(f"{what} has format {version} and suite {suite}, not known here")
        if signature_suite not in list(SignatureSuite):
            raise integrity_failure(f"{what} has no signature of a known kind ({signature_suite})")
        signer = VerifyingKey(SignatureSuite(signature_suite), cursor.blob())
        if pinned is not None and signer not in pinned:
            allowed = ", ".join(key.key_id for key in pinned) or "none"
            raise integrity_failure(
                f"{what} is signed by {signer.key_id}, which is not a pinned key ({allowed})"
            )
        body = cursor.take(cursor.u32())
        signed = data[: cursor.at]
        signature = cursor.blob()
        cursor.end()
        if not signer.verifies(_SIGNATURE_CONTEXT + signed, signature):
            raise integrity_failure(f"{what}: the signature does not verify (changed after it was signed)")
        return cls._decode_body(body, what, signer, data)

    @classmethod
    def _decode_body(cls, body: bytes, what: str, signer: VerifyingKey, data: bytes) -> Manifest:
        cursor = Cursor(body, what)
        model_id, name = cursor.take(MODEL_ID_BYTES), cursor.text()
        version, created_s = cursor.u64(), cursor.u64()
        commitment, count = cursor.take(DIGEST_BYTES), cursor.u32()
        if not valid_model_name(name):
            raise integrity_failure(f"{what} has an impossible model name {name!r}")
        if count > cursor.remaining_bytes // _MIN_FILE_BYTES:
            raise integrity_failure(f"{what} claims {count} files and has no room for them")
        files = tuple(cls._decode_file(cursor) for _ in range(count))
        cursor.end()
        for values in ({f.path for f in files}, {f.file_id for f in files}, {f.file_number for f in files}):
            if len(values) != count:
                raise integrity_failure(f"{what} lists a file twice")
        return cls(model_id, name, version, created_s, commitment, files, signer, data)

    @staticmethod
    def _decode_file(cursor: Cursor) -> ManifestFile:
        kind = cursor.u8()
        if kind not in list(FileKind):
            raise integrity_failure(f"{cursor.what} lists a file of an unknown kind {kind}")
        file = ManifestFile(
            kind=FileKind(kind),
            path=cursor.text(),
            file_id=cursor.take(FILE_ID_BYTES),
            file_number=cursor.u32(),
            plaintext_bytes=cursor.u64(),
            size_bytes=cursor.u64(),
            sm3=cursor.take(DIGEST_BYTES),
            index_bytes=cursor.u32(),
            index_digest=cursor.take(DIGEST_BYTES),
        )
        check_relative_path(file.path)
        return file

    @classmethod
    def sign(
        cls,
        signer: Signer,
        *,
        model_id: bytes,
        name: str,
        version: int,
        created_s: int,
        key_commitment: bytes,
        files: Collection[ManifestFile],
    ) -> Manifest:
        """Makes and signs a manifest."""
        body = Packer().raw(model_id).text(name).u64(version).u64(created_s).raw(key_commitment)
        body.u32(len(files))
        for file in files:
            body.u8(file.kind).text(file.path).raw(file.file_id).u32(file.file_number)
            body.u64(file.plaintext_bytes).u64(file.size_bytes).raw(file.sm3)
            body.u32(file.index_bytes).raw(file.index_digest)
        key = signer.verifying_key
        head = Packer().raw(MANIFEST_MAGIC).u16(VERSION).u16(SUITE_SM4_GCM_SM3).u16(key.suite).u16(0)
        signed = head.blob(key.public_key).u32(len(body)).raw(body.bytes()).bytes()
        signature = signer.sign(_SIGNATURE_CONTEXT + signed)
        # Decoding applies every rule of the reader to the writer.
        return cls.decode(signed + Packer().blob(signature).bytes(), "new manifest", [key])
