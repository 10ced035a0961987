"""Every SM4 engine gives the published answers and the same ones as every other."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealmesh.security.memory import RawMemory, Region, Secret, wipe
from sealmesh.security.sm4 import libgcrypt
from sealmesh.security.sm4.engine import EngineUnavailableError, Sm4GcmCipher, Sm4GcmEngine, TagMismatchError
from sealmesh.security.sm4.openssl import CryptographyEngine
from sealmesh.security.sm4.select import choose_engine, engine_factories, measure, select_engine
from sealmesh.security.sm4.sm3 import OpenSslSm3, bulk_sm3, hkdf_sm3, hmac_sm3, sm3
from sealmesh.telemetry.runtime.errors import SealmeshError

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "shang_mi.json").read_text())
NAMES = list(engine_factories())


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest) -> Sm4GcmEngine:
    try:
        return select_engine(str(request.param))
    except SealmeshError as exc:
        pytest.skip(exc.message)


@pytest.mark.parametrize("vector", VECTORS["sm4_block"], ids=lambda v: v["source"])
def test_block_vector(engine: Sm4GcmEngine, vector: dict[str, str]) -> None:
    ciphertext = engine.encrypt_block(bytes.fromhex(vector["key"]), bytes.fromhex(vector["plaintext"]))
    assert ciphertext.hex() == vector["ciphertext"]


@pytest.mark.parametrize("vector", VECTORS["sm4_gcm"], ids=lambda v: v["source"])
def test_gcm_vector(engine: Sm4GcmEngine, vector: dict[str, str]) -> None:
    values = {name: bytes.fromhex(value) for name, value in vector.items() if name != "source"}
    cipher = engine.new_cipher(values["key"])
    data = bytearray(values["plaintext"])
    tag = cipher.seal_into(values["nonce"], values["aad"], Region.of(data))
    assert (bytes(data), tag) == (values["ciphertext"], values["tag"])
    cipher.open_into(values["nonce"], values["aad"], Region.of(data), tag)
    assert bytes(data) == values["plaintext"]


@given(
    key=st.binary(min_size=16, max_size=16),
    nonce=st.binary(min_size=12, max_size=12),
    aad=st.binary(max_size=80),
    plaintext=st.one_of(
        st.binary(max_size=300), st.integers(0, 9000).map(lambda n: bytes(n % 251 for n in range(n)))
    ),
    shift=st.integers(0, 17),
)
@settings(deadline=None)
def test_engines_agree_at_any_length_and_alignment(
    key: bytes, nonce: bytes, aad: bytes, plaintext: bytes, shift: int
) -> None:
    results = set()
    for engine in _usable():
        cipher = engine.new_cipher(key)
        memory = bytearray(shift + len(plaintext) + 16)
        region = Region.of(memory).slice(shift, len(plaintext))
        region.view[:] = plaintext
        tag = cipher.seal_into(nonce, aad, region)
        assert memory[:shift] == bytes(shift)
        assert memory[shift + len(plaintext) :] == bytes(16)
        results.add((bytes(region.view), tag))
        cipher.open_into(nonce, aad, region, tag)
        assert bytes(region.view) == plaintext
    assert len(results) == 1


def _usable() -> Iterator[Sm4GcmEngine]:
    for name in NAMES:
        try:
            yield select_engine(name)
        except SealmeshError:
            continue


@pytest.mark.parametrize("what", ["tag", "ciphertext", "aad", "nonce", "key"])
def test_any_change_is_refused_and_the_target_zeroed(engine: Sm4GcmEngine, what: str) -> None:
    parts = {"key": b"k" * 16, "nonce": b"n" * 12, "aad": b"where"}
    data = bytearray(b"secret weights" * 700)
    parts["tag"] = engine.new_cipher(parts["key"]).seal_into(parts["nonce"], parts["aad"], Region.of(data))
    if what == "ciphertext":
        data[5000] ^= 0x10
    else:
        parts[what] = bytes([parts[what][0] ^ 1]) + parts[what][1:]
    cipher = engine.new_cipher(parts["key"])
    with pytest.raises(TagMismatchError):
        cipher.open_into(parts["nonce"], parts["aad"], Region.of(data), parts["tag"])
    assert not any(data)


def test_raw_memory_is_worked_on_in_place(engine: Sm4GcmEngine) -> None:
    memory = (ctypes.c_ubyte * 100)(*range(100))
    region = Region.of(RawMemory(ctypes.addressof(memory), 100))
    cipher = engine.new_cipher(bytes(16))
    tag = cipher.seal_into(bytes(12), b"", region)
    assert bytes(memory) != bytes(range(100))
    cipher.open_into(bytes(12), b"", region, tag)
    assert bytes(memory) == bytes(range(100))


@pytest.mark.parametrize(("nonce", "tag"), [(11, 16), (16, 16), (12, 15), (12, 4)])
def test_sizes_that_sealmesh_never_uses_are_refused(engine: Sm4GcmEngine, nonce: int, tag: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        engine.new_cipher(bytes(16)).open_into(bytes(nonce), b"", Region.of(bytearray(8)), bytes(tag))


def test_a_key_of_another_size_is_refused(engine: Sm4GcmEngine) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        engine.new_cipher(bytes(32))


def test_read_only_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="writable"):
        Region.of(memoryview(b"constant"))


def test_a_slice_outside_its_region_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        Region.of(bytearray(8)).slice(4, 5)


def test_wipe() -> None:
    secret = bytearray(b"secret")
    wipe(secret)
    assert secret == bytes(6)


def test_measure_gives_plausible_speeds(engine: Sm4GcmEngine) -> None:
    speed = measure(engine, total_bytes=1 << 20)
    assert speed.engine == engine.name
    assert 0.001 < speed.seal_gbytes_per_s < 100
    assert 0.001 < speed.open_gbytes_per_s < 100


class _Broken:
    """An engine whose every answer is off in one place."""

    name = "broken"
    detail = "test"

    def __init__(self, fault: str) -> None:
        self._inner = CryptographyEngine()
        self._fault = fault

    def encrypt_block(self, key: Secret, block: bytes) -> bytes:
        return bytes(16) if self._fault == "block" else self._inner.encrypt_block(key, block)

    def new_cipher(self, key: Secret) -> Sm4GcmCipher:
        return _BrokenCipher(self._inner.new_cipher(key), self._fault)


class _BrokenCipher:
    def __init__(self, inner: Sm4GcmCipher, fault: str) -> None:
        self._inner = inner
        self._fault = fault

    def seal_into(self, nonce: bytes, aad: bytes, region: Region) -> bytes:
        tag = self._inner.seal_into(nonce, aad, region)
        return bytes(16) if self._fault == "tag" else tag

    def open_into(self, nonce: bytes, aad: bytes, region: Region, tag: bytes) -> None:
        ciphertext = bytes(region.view)
        try:
            self._inner.open_into(nonce, aad, region, tag)
        except TagMismatchError:
            if self._fault == "accepts forgery":
                return
            if self._fault == "leaves plaintext":
                region.view[:] = ciphertext
            raise

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("fault", ["block", "tag", "accepts forgery", "leaves plaintext"])
def test_an_engine_with_wrong_answers_is_passed_over(fault: str) -> None:
    choice = choose_engine("", {"broken": lambda: _Broken(fault), "cryptography": CryptographyEngine})
    assert choice.engine.name == "cryptography"
    assert "broken" in choice.passed_over["broken"]


def test_a_healthy_stand_in_is_chosen() -> None:
    factories: dict[str, Callable[[], Sm4GcmEngine]] = {"stand-in": lambda: _Broken("none")}
    assert choose_engine("", factories).engine.name == "broken"


def test_the_environment_forces_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALMESH_SM4_ENGINE", "cryptography")
    assert select_engine().name == "cryptography"


def test_an_unknown_engine_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALMESH_SM4_ENGINE", "abacus")
    with pytest.raises(SealmeshError, match=r"unknown SM4 engine 'abacus'.*libgcrypt") as caught:
        select_engine()
    assert caught.value.reason == "CONFIGURATION_INVALID"


def test_a_missing_library_falls_back_and_says_so_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libgcrypt, "_NAMES", ("libgcrypt-that-is-not-there.so",))
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: None)
    choice = choose_engine("")
    assert choice.engine.name == "cryptography"
    assert "install" in choice.passed_over["libgcrypt"]
    with pytest.raises(SealmeshError, match=r"'libgcrypt'.*cannot be used.*install"):
        choose_engine("libgcrypt")
    assert bulk_sm3() is OpenSslSm3


def test_no_engine_at_all_is_a_clear_error() -> None:
    def unavailable() -> Sm4GcmEngine:
        raise EngineUnavailableError("not today")

    with pytest.raises(SealmeshError, match="no SM4 engine can be used: only: not today"):
        choose_engine("", {"only": unavailable})


@pytest.mark.parametrize("vector", VECTORS["sm3"], ids=lambda v: v["source"])
def test_sm3_vector(vector: dict[str, str]) -> None:
    message = bytes.fromhex(vector["message"])
    bulk = bulk_sm3()()
    bulk.update(message[:7])
    bulk.update(bytearray(message[7:]))
    assert sm3(message).hex() == bulk.digest().hex() == vector["digest"]


@given(parts=st.lists(st.binary(max_size=200), max_size=5))
@settings(deadline=None)
def test_bulk_sm3_equals_openssl(parts: list[bytes]) -> None:
    bulk = bulk_sm3()()
    for number, part in enumerate(parts):
        bulk.update((part, bytearray(part), memoryview(part))[number % 3])
    assert bulk.digest() == sm3(b"".join(parts))


def test_hmac_sm3_follows_rfc_2104() -> None:
    key, message = b"key" * 5, b"message"
    padded = key.ljust(64, b"\0")
    inner = sm3(bytes(b ^ 0x36 for b in padded), message)
    assert hmac_sm3(key, b"mess", b"age") == sm3(bytes(b ^ 0x5C for b in padded), inner)


def test_hkdf_sm3_follows_rfc_5869() -> None:
    pseudo_random_key = hmac_sm3(b"salt", b"secret")
    first = hmac_sm3(pseudo_random_key, b"info", b"\x01")
    second = hmac_sm3(pseudo_random_key, first, b"info", b"\x02")
    assert bytes(hkdf_sm3(b"secret", salt=b"salt", info=b"info", length_bytes=48)) == (first + second)[:48]
