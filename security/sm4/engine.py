"""The interface of every SM4-GCM engine, and the known answers that each must give before it is used."""

from __future__ import annotations

from typing import Protocol

from sealmesh.security.memory import Region, Secret

KEY_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
BLOCK_BYTES = 16


class TagMismatchError(Exception):
    """The tag does not verify; the target was zeroed and none of its plaintext was released."""


class EngineUnavailableError(Exception):
    """The engine cannot be used here; the message says why."""


class Sm4GcmCipher(Protocol):
    """SM4-GCM (GB/T 32907, RFC 8998) under one key. Safe to use from several threads at once."""

    def seal_into(self, nonce: bytes, aad: bytes, region: Region) -> bytes:
        """Encrypts the region in place and returns its 16-byte tag.

        `nonce` is 12 bytes and must never repeat under this key. The GIL is released where the engine can.
        """
        ...

    def open_into(self, nonce: bytes, aad: bytes, region: Region, tag: bytes) -> None:
        """Verifies the tag and leaves the plaintext in the region.

        Raises TagMismatchError after zeroing the region when the tag does not verify.
        """
        ...

    def close(self) -> None:
        """Wipes the key; the cipher cannot be used afterwards. May be called twice."""
        ...


class Sm4GcmEngine(Protocol):
    """An implementation of SM4-GCM. Stateless and safe to share."""

    @property
    def name(self) -> str:
        """Short name, as `SEALMESH_SM4_ENGINE` takes it."""
        ...

    @property
    def detail(self) -> str:
        """Version or instruction set, for people."""
        ...

    def new_cipher(self, key: Secret) -> Sm4GcmCipher:
        """A cipher under a 16-byte key (copied; wipe your own)."""
        ...

    def encrypt_block(self, key: Secret, block: bytes) -> bytes:
        """One raw SM4 block, 16 bytes; only for the known-answer self-test."""
        ...


def check_sizes(nonce: bytes, tag: bytes | None = None) -> None:
    """Raises ValueError for a nonce or tag of a size that sealmesh never uses."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"an SM4-GCM nonce is {NONCE_BYTES} bytes, not {len(nonce)}")
    if tag is not None and len(tag) != TAG_BYTES:
        raise ValueError(f"an SM4-GCM tag is {TAG_BYTES} bytes, not {len(tag)}")


# GB/T 32907-2016, appendix A.1.
_BLOCK_KEY = bytes.fromhex("0123456789abcdeffedcba9876543210")
_BLOCK_CIPHERTEXT = bytes.fromhex("681edf34d206965e86b3e94f536e4246")

# RFC 8998, appendix A.1.
_GCM_NONCE = bytes.fromhex("00001234567800000000abcd")
_GCM_AAD = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
_GCM_PLAINTEXT = bytes.fromhex("".join(pair * 8 for pair in ("aa", "bb", "cc", "dd", "ee", "ff", "ee", "aa")))
_GCM_CIPHERTEXT = bytes.fromhex(
    "17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735"
    "d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d"
)
_GCM_TAG = bytes.fromhex("83de3541e4c2b58177e065a9bf7b62ec")


def self_test(engine: Sm4GcmEngine) -> None:
    """Checks an engine against the published vectors, in both directions and with a forged tag.

    Raises EngineUnavailableError naming the vector that came out wrong.
    """
    if engine.encrypt_block(_BLOCK_KEY, _BLOCK_KEY) != _BLOCK_CIPHERTEXT:
        raise EngineUnavailableError(f"SM4 engine {engine.name} fails the GB/T 32907 block vector")
    cipher = engine.new_cipher(_BLOCK_KEY)
    try:
        data = bytearray(_GCM_PLAINTEXT)
        tag = cipher.seal_into(_GCM_NONCE, _GCM_AAD, Region.of(data))
        if bytes(data) != _GCM_CIPHERTEXT or tag != _GCM_TAG:
            raise EngineUnavailableError(f"SM4 engine {engine.name} fails the RFC 8998 SM4-GCM vector (seal)")
        cipher.open_into(_GCM_NONCE, _GCM_AAD, Region.of(data), tag)
        if bytes(data) != _GCM_PLAINTEXT:
            raise EngineUnavailableError(f"SM4 engine {engine.name} fails the RFC 8998 SM4-GCM vector (open)")
        forged = bytes([tag[0] ^ 1]) + tag[1:]
        data = bytearray(_GCM_CIPHERTEXT)
        try:
            cipher.open_into(_GCM_NONCE, _GCM_AAD, Region.of(data), forged)
        except TagMismatchError:
            if any(data):
                raise EngineUnavailableError(
                    f"SM4 engine {engine.name} leaves plaintext behind after a forged tag"
                ) from None
        else:
            raise EngineUnavailableError(f"SM4 engine {engine.name} accepts a forged tag")
    finally:
        cipher.close()
