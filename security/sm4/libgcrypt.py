"""SM4-GCM and SM3 by libgcrypt (1.9 or later) through ctypes, which releases the GIL during each call."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from contextlib import contextmanager

from sealmesh.security.memory import Region, Secret, wipe
from sealmesh.security.sm4.engine import (
    BLOCK_BYTES,
    KEY_BYTES,
    TAG_BYTES,
    EngineUnavailableError,
    TagMismatchError,
    check_sizes,
)

# Constants of gcrypt.h; part of its stable ABI.
_CIPHER_SM4 = 318
_MODE_ECB = 1
_MODE_GCM = 9
_MD_SM3 = 326
_CTL_DISABLE_SECMEM = 37
_CTL_INITIALIZATION_FINISHED = 38
_CTL_INITIALIZATION_FINISHED_P = 39
_ERR_CODE_MASK = 0xFFFF
_ERR_CHECKSUM = 10
_OLDEST_VERSION = b"1.9.0"
_NAMES = ("libgcrypt.so.20", "libgcrypt.20.dylib")


class LibGcrypt:
    """The loaded library with typed prototypes.

    Loading is idempotent: libgcrypt keeps one state per process and other users (GnuPG bindings) may
    have initialised it before.
    """

    def __init__(self) -> None:
        lib = self._find()
        void_p, size_t, error = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        # c_char_p rather than c_void_p for constant inputs: ctypes passes bytes without a copy.
        const_p = ctypes.c_char_p
        lib.gcry_check_version.argtypes = [ctypes.c_char_p]
        lib.gcry_check_version.restype = ctypes.c_char_p
        prototypes: dict[str, tuple[list[type], type | None]] = {
            "gcry_cipher_open": ([ctypes.POINTER(void_p), ctypes.c_int, ctypes.c_int, ctypes.c_uint], error),
            "gcry_cipher_close": ([void_p], None),
            "gcry_cipher_setkey": ([void_p, void_p, size_t], error),
            "gcry_cipher_setiv": ([void_p, const_p, size_t], error),
            "gcry_cipher_authenticate": ([void_p, const_p, size_t], error),
            "gcry_cipher_encrypt": ([void_p, void_p, size_t, void_p, size_t], error),
            "gcry_cipher_decrypt": ([void_p, void_p, size_t, void_p, size_t], error),
            "gcry_cipher_gettag": ([void_p, void_p, size_t], error),
            "gcry_cipher_checktag": ([void_p, const_p, size_t], error),
            "gcry_md_open": ([ctypes.POINTER(void_p), ctypes.c_int, ctypes.c_uint], error),
            "gcry_md_close": ([void_p], None),
            "gcry_md_write": ([void_p, void_p, size_t], None),
            "gcry_md_read": ([void_p, ctypes.c_int], void_p),
            "gcry_strerror": ([error], ctypes.c_char_p),
        }
        try:
            for name, (arguments, result) in prototypes.items():
                function = getattr(lib, name)
                function.argtypes = arguments
                function.restype = result
        except AttributeError as exc:
            raise EngineUnavailableError(f"libgcrypt lacks a function that is needed: {exc}") from exc
        version = lib.gcry_check_version(_OLDEST_VERSION)
        if not version:
            raise EngineUnavailableError("libgcrypt is older than 1.9.0, which brought SM4")
        if not lib.gcry_control(_CTL_INITIALIZATION_FINISHED_P):
            # The secure-memory pool is small and shared; keys of ciphers live in ordinary memory that
            # gcry_cipher_close wipes.
            lib.gcry_control(_CTL_DISABLE_SECMEM, 0)
            lib.gcry_control(_CTL_INITIALIZATION_FINISHED, 0)
        self.lib = lib
        self.version = str(version.decode("ascii", "replace"))

    @staticmethod
    def _find() -> ctypes.CDLL:
        reason = "not found"
        for name in _NAMES:
            try:
                return ctypes.CDLL(name)
            except OSError as exc:
                reason = str(exc)
        # Last, because it starts ldconfig or a compiler to look for it.
        found = ctypes.util.find_library("gcrypt")
        if found is not None:
            try:
                return ctypes.CDLL(found)
            except OSError as exc:
                reason = str(exc)
        raise EngineUnavailableError(
            f"libgcrypt cannot be loaded ({reason}); install the package libgcrypt20 (Debian) or libgcrypt"
        )

    def check(self, error: int, what: str) -> None:
        """Raises RuntimeError when a call failed."""
        if error:
            text = self.lib.gcry_strerror(error) or b"unknown error"
            raise RuntimeError(f"libgcrypt: {what}: {text.decode('utf-8', 'replace')}")

    @contextmanager
    def handle(self, mode: int, key: Secret) -> Iterator[ctypes.c_void_p]:
        """A keyed SM4 handle; closing it wipes the key schedule."""
        handle = ctypes.c_void_p()
        self.check(self.lib.gcry_cipher_open(ctypes.byref(handle), _CIPHER_SM4, mode, 0), "open SM4")
        try:
            own = bytearray(key)
            try:
                self.check(self.lib.gcry_cipher_setkey(handle, Region.of(own).address, len(own)), "set key")
            finally:
                wipe(own)
            yield handle
        finally:
            self.lib.gcry_cipher_close(handle)


class LibGcryptCipher:
    """SM4-GCM under one key. Every call uses a handle of its own, so threads need no lock."""

    def __init__(self, library: LibGcrypt, key: Secret) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"an SM4 key is {KEY_BYTES} bytes, not {len(key)}")
        self._library = library
        self._key = bytearray(key)

    def _begin(self, handle: ctypes.c_void_p, nonce: bytes, aad: bytes) -> None:
        library = self._library
        library.check(library.lib.gcry_cipher_setiv(handle, nonce, len(nonce)), "set nonce")
        if aad:
            library.check(library.lib.gcry_cipher_authenticate(handle, aad, len(aad)), "authenticate")

    def seal_into(self, nonce: bytes, aad: bytes, region: Region) -> bytes:
        check_sizes(nonce)
        library = self._library
        tag = ctypes.create_string_buffer(TAG_BYTES)
        with library.handle(_MODE_GCM, self._key) as handle:
            self._begin(handle, nonce, aad)
            if region.length_bytes:
                error = library.lib.gcry_cipher_encrypt(handle, region.address, region.length_bytes, None, 0)
                library.check(error, "encrypt")
            library.check(library.lib.gcry_cipher_gettag(handle, tag, TAG_BYTES), "get tag")
        return tag.raw

    def open_into(self, nonce: bytes, aad: bytes, region: Region, tag: bytes) -> None:
        check_sizes(nonce, tag)
        library = self._library
        verified = False
        # libgcrypt decrypts before it can check: whatever goes wrong on the way, the target is zeroed.
        try:
            with library.handle(_MODE_GCM, self._key) as handle:
                self._begin(handle, nonce, aad)
                if region.length_bytes:
                    error = library.lib.gcry_cipher_decrypt(
                        handle, region.address, region.length_bytes, None, 0
                    )
                    library.check(error, "decrypt")
                error = library.lib.gcry_cipher_checktag(handle, tag, TAG_BYTES)
                if error & _ERR_CODE_MASK == _ERR_CHECKSUM:
                    raise TagMismatchError
                library.check(error, "check tag")
            verified = True
        finally:
            if not verified:
                region.zero()

    def close(self) -> None:
        wipe(self._key)
        self._key = bytearray()


class LibGcryptEngine:
    """The libgcrypt engine."""

    def __init__(self, library: LibGcrypt) -> None:
        self._library = library

    @property
    def name(self) -> str:
        return "libgcrypt"

    @property
    def detail(self) -> str:
        return f"libgcrypt {self._library.version}"

    def new_cipher(self, key: Secret) -> LibGcryptCipher:
        return LibGcryptCipher(self._library, key)

    def encrypt_block(self, key: Secret, block: bytes) -> bytes:
        buffer = ctypes.create_string_buffer(block, BLOCK_BYTES)
        with self._library.handle(_MODE_ECB, key) as handle:
            error = self._library.lib.gcry_cipher_encrypt(handle, buffer, BLOCK_BYTES, None, 0)
            self._library.check(error, "encrypt block")
        return buffer.raw


class LibGcryptSm3:
    """SM3 (GB/T 32905) by libgcrypt: about a fifth faster than OpenSSL's and without the GIL."""

    def __init__(self, library: LibGcrypt) -> None:
        self._lib = library.lib
        self._handle = ctypes.c_void_p()
        library.check(self._lib.gcry_md_open(ctypes.byref(self._handle), _MD_SM3, 0), "open SM3")

    def update(self, data: bytes | bytearray | memoryview) -> None:
        if isinstance(data, bytes):
            self._lib.gcry_md_write(self._handle, data, len(data))
            return
        view = memoryview(data)
        if view.readonly:
            self.update(bytes(view))
        elif len(view):
            self._lib.gcry_md_write(self._handle, Region.of(view).address, view.nbytes)

    def digest(self) -> bytes:
        """The digest; the object cannot take more data afterwards."""
        return ctypes.string_at(self._lib.gcry_md_read(self._handle, _MD_SM3), 32)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._lib.gcry_md_close(handle)
            self._handle = ctypes.c_void_p()
