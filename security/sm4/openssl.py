"""SM4-GCM by the `cryptography` package (OpenSSL): always there, about five times slower than libgcrypt."""

from __future__ import annotations

import cryptography
from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers import Cipher, modes
from cryptography.hazmat.primitives.ciphers.algorithms import SM4
from sealmesh.security.memory import Region, Secret, wipe
from sealmesh.security.sm4.engine import KEY_BYTES, EngineUnavailableError, TagMismatchError, check_sizes


class CryptographyCipher:
    """SM4-GCM under one key; every call has a context of its own."""

    def __init__(self, key: Secret) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"an SM4 key is {KEY_BYTES} bytes, not {len(key)}")
        self._key = bytearray(key)

    def seal_into(self, nonce: bytes, aad: bytes, region: Region) -> bytes:
        check_sizes(nonce)
        encryptor = Cipher(SM4(bytes(self._key)), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(aad)
        region.view[:] = encryptor.update(region.view)
        encryptor.finalize()
        return encryptor.tag

    def open_into(self, nonce: bytes, aad: bytes, region: Region, tag: bytes) -> None:
        check_sizes(nonce, tag)
        verified = False
        try:
            decryptor = Cipher(SM4(bytes(self._key)), modes.GCM(nonce, tag)).decryptor()
            decryptor.authenticate_additional_data(aad)
            # Into a buffer of its own: the target receives plaintext only once the tag has verified.
            plaintext = bytearray(decryptor.update(region.view))
            try:
                decryptor.finalize()
                region.view[:] = plaintext
                verified = True
            except InvalidTag:
                raise TagMismatchError from None
            finally:
                wipe(plaintext)
        finally:
            if not verified:
                region.zero()

    def close(self) -> None:
        wipe(self._key)
        self._key = bytearray()


class CryptographyEngine:
    """The engine of last resort. Raises EngineUnavailableError when OpenSSL was built without SM4."""

    def __init__(self) -> None:
        try:
            Cipher(SM4(bytes(KEY_BYTES)), modes.GCM(bytes(12))).encryptor()
        except UnsupportedAlgorithm as exc:
            raise EngineUnavailableError(f"cryptography's OpenSSL has no SM4-GCM: {exc}") from exc

    @property
    def name(self) -> str:
        return "cryptography"

    @property
    def detail(self) -> str:
        return f"cryptography {cryptography.__version__}"

    def new_cipher(self, key: Secret) -> CryptographyCipher:
        return CryptographyCipher(key)

    def encrypt_block(self, key: Secret, block: bytes) -> bytes:
        # ECB of a single block is the raw cipher: what the self-test's vector is about.
        return Cipher(SM4(bytes(key)), modes.ECB()).encryptor().update(block)
