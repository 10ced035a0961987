"""Names and wire form of stored KV blocks: layout digest, key derivation, value header.

A block is found only by a key that every fact about it went into, and is used only when its header
repeats those facts: a wrong model, layout, tenant or a damaged value is a miss, never wrong KV state.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives import hashes, hmac

#: Version of keys and values; part of both.
FORMAT_VERSION: Final = 1
#: Bytes of a block key and of every digest (SM3, GB/T 32905).
KEY_BYTES: Final = 32
#: Bytes in front of the payload; a multiple of a cache line, so that the payload is aligned.
HEADER_BYTES: Final = 128

_MAGIC: Final = b"SMKVBLK\x01"
_KEY_LABEL: Final = b"sealmesh/kv/key/1"
_TAG_LABEL: Final = b"sealmesh/kv/tag/1"
# magic, format version, codec, header bytes, payload bytes, physical layout digest, payload CRC-32.
_HEAD: Final = struct.Struct("<8sHHIQ32sI")
_TAG_BYTES: Final = 32
_CODECS: Final = {"raw": 0}


class BlockMismatchError(Exception):
    """A stored value is not the block that was asked for. `reason` is one of a few fixed words."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stored block does not fit: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class BlockLayout:
    """Everything that must be equal for a block to fit; see kvstore.v1.BlockLayout for each field."""

    model_digest: bytes
    engine_layout: str
    dtype: str
    compute_dtype: str
    block_tokens: int
    hash_scheme: str
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    kv_group: int = 0
    codec: str = "raw"
    lora_digest: bytes = b""
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """SM3 over all fields by name, each with its length: no two layouts share an encoding."""
        parts: list[bytes] = []
        for field in fields(self):
            value = getattr(self, field.name)
            parts += [field.name.encode(), value if isinstance(value, bytes) else str(value).encode()]
        return sm3(encode_parts(parts))


def encode_parts(parts: Sequence[bytes]) -> bytes:
    """Concatenates byte strings so that the result tells where each ends (32-bit lengths)."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def sm3(data: bytes) -> bytes:
    """SM3 digest, 32 bytes."""
    return hashlib.new("sm3", data).digest()


class KeyDeriver:
    """Derives the key of a block: HMAC-SM3(secret; layout, namespace, salt, hash of the block).

    Args:
        secret: Key of the tenant; without one, a fixed label that makes keys a plain digest.
        layout_digest: Digest of the BlockLayout of this rank.
        namespace: "handle/epoch" of the tenant.
        cache_salt: Salt of the request. The engine's hashes hold it too, but in some releases without a
            tag that tells it from an adapter's name, so it is bound here once more.
    """

    def __init__(self, secret: bytes, layout_digest: bytes, namespace: str, cache_salt: str) -> None:
        self._base = hmac.HMAC(secret or _KEY_LABEL, hashes.SM3())
        self._base.update(encode_parts([_KEY_LABEL, layout_digest, namespace.encode(), cache_salt.encode()]))

    def key(self, block_hash: bytes) -> bytes:
        """Key of the block whose chained hash (as the engine makes it) is given; 32 bytes."""
        mac = self._base.copy()
        mac.update(encode_parts([block_hash]))
        return mac.finalize()


def make_deriver_cache(secret: bytes, size: int = 256) -> Callable[[bytes, str, str], KeyDeriver]:
    """A function (layout digest, namespace, salt) -> KeyDeriver that remembers the last ones."""

    @lru_cache(maxsize=size)
    def deriver(layout_digest: bytes, namespace: str, cache_salt: str) -> KeyDeriver:
        return KeyDeriver(secret, layout_digest, namespace, cache_salt)

    return deriver


def write_header(value: memoryview, key: bytes, physical_digest: bytes, codec: str = "raw") -> None:
    """Fills the first HEADER_BYTES of a value whose payload is in place.

    Args:
        value: Header space and payload, writable.
        key: Key under which it is stored; bound by the tag.
        physical_digest: Digest of the memory layout that the payload was copied from, 32 bytes.
    """
    payload = value[HEADER_BYTES:]
    head = _HEAD.pack(
        _MAGIC,
        FORMAT_VERSION,
        _CODECS[codec],
        HEADER_BYTES,
        len(payload),
        physical_digest,
        zlib.crc32(payload),
    )
    head = head.ljust(HEADER_BYTES - _TAG_BYTES, b"\0")
    value[:HEADER_BYTES] = head + _tag(key, head)


def open_value(
    value: memoryview, key: bytes, physical_digest: bytes, payload_bytes: int, codec: str = "raw"
) -> memoryview:
    """The payload of a stored value, checked in full before any byte of it is used.

    Raises:
        BlockMismatchError: "length", "magic", "version", "tag", "codec", "layout" or "payload".
    """
    if len(value) != HEADER_BYTES + payload_bytes:
        raise BlockMismatchError("length")
    head = bytes(value[: HEADER_BYTES - _TAG_BYTES])
    magic, version, stored_codec, header_bytes, length, layout, crc = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise BlockMismatchError("magic")
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        raise BlockMismatchError("version")
    if bytes(value[HEADER_BYTES - _TAG_BYTES : HEADER_BYTES]) != _tag(key, head):
        raise BlockMismatchError("tag")
    if stored_codec != _CODECS[codec]:
        raise BlockMismatchError("codec")
    if layout != physical_digest:
        raise BlockMismatchError("layout")
    payload = value[HEADER_BYTES:]
    # CRC-32 finds every burst of up to 32 bits and is 6 times faster than SM3; forgery is the matter of
    # the encrypted format, whose AEAD tag takes this place.
    if length != payload_bytes or crc != zlib.crc32(payload):
        raise BlockMismatchError("payload")
    return payload


def _tag(key: bytes, head: bytes) -> bytes:
    return sm3(encode_parts([_TAG_LABEL, key, head]))
