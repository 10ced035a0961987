"""Constants and derivations of sealed format version 1; docs/sealed-format.md is the specification."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

from sealmesh.security.memory import Secret, wipe
from sealmesh.security.sm4.engine import KEY_BYTES
from sealmesh.security.sm4.sm3 import hkdf_sm3

MANIFEST_NAME: Final = "sealmesh.manifest"
SLOTS_NAME: Final = "sealmesh.slots"
SEALED_SUFFIX: Final = ".sealed"

FILE_MAGIC: Final = b"SMSHFILE"
MANIFEST_MAGIC: Final = b"SMSHMANI"
VERSION: Final = 1
SUITE_SM4_GCM_SM3: Final = 1

MODEL_ID_BYTES: Final = 16
FILE_ID_BYTES: Final = 16
MAC_BYTES: Final = 32
PREAMBLE_BYTES: Final = 64
DATA_ALIGNMENT_BYTES: Final = 4096

CHUNK_BYTES: Final = 1 << 20
MIN_CHUNK_BYTES: Final = 1 << 12
MAX_CHUNK_BYTES: Final = 1 << 26
MAX_INDEX_BYTES: Final = 64 << 20
MAX_MANIFEST_BYTES: Final = 16 << 20
MAX_NAME_BYTES: Final = 1024
MAX_DIMENSIONS: Final = 32

# Bits of one element of every safetensors dtype (safetensors 0.8); some are smaller than a byte.
DTYPE_BITS: Final = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class FileKind(IntEnum):
    """What a sealed file holds."""

    TENSORS = 1
    BLOB = 2


class EntryKind(IntEnum):
    """What an entry of an index is."""

    RAW = 0
    TENSOR = 1


def valid_model_name(name: str) -> bool:
    """Letters, digits, `.`, `_`, `-`; at most 128; starting with a letter or digit."""
    return _MODEL_NAME.fullmatch(name) is not None


def tensor_size_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor; None for an unknown dtype or a size that is not whole bytes."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    for dimension in shape:
        bits *= dimension
    return bits // 8 if bits % 8 == 0 else None


def chunk_nonce(file_number: int, chunk: int) -> bytes:
    """12 bytes: 32-bit file number, 64-bit chunk index in the file; unique under the model's fresh key."""
    return file_number.to_bytes(4, "little") + chunk.to_bytes(8, "little")


def chunk_aad(index_digest: bytes, file_id: bytes, entry: int, chunk_in_entry: int, last: bool) -> bytes:
    """61 bytes that bind a chunk to its place: any move, copy or removal changes them."""
    return (
        index_digest
        + file_id
        + entry.to_bytes(4, "little")
        + chunk_in_entry.to_bytes(8, "little")
        + (b"\x01" if last else b"\x00")
    )


class FileKeys:
    """Subkeys of one file: SM4 key of its chunks, HMAC key of its index. `close` wipes them."""

    def __init__(self, data_key: Secret, model_id: bytes, file_id: bytes) -> None:
        derived = hkdf_sm3(
            data_key,
            salt=model_id,
            info=b"sealmesh v1 file" + file_id,
            length_bytes=KEY_BYTES + MAC_BYTES,
        )
        self.chunk_key = bytearray(derived[:KEY_BYTES])
        self.index_key = bytearray(derived[KEY_BYTES:])
        wipe(derived)

    def close(self) -> None:
        wipe(self.chunk_key)
        wipe(self.index_key)
