"""A second reader, written from docs/sealed-format.md alone, reads what the writer wrote.

It shares no code with the product: struct and the `cryptography` package only.
"""

from __future__ import annotations

import struct
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, modes
from cryptography.hazmat.primitives.ciphers.algorithms import SM4
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from tests.unit.security.conftest import SAMPLE_FILES, Lab


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        value: int = struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]
        return value

    def blob(self) -> bytes:
        return self.take(self.number("H"))

    def text(self) -> str:
        return self.blob().decode()


def sm3(data: bytes) -> bytes:
    digest = hashes.Hash(hashes.SM3())
    digest.update(data)
    return digest.finalize()


def hmac(key: bytes, data: bytes) -> bytes:
    mac = HMAC(key, hashes.SM3())
    mac.update(data)
    return mac.finalize()


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    return HKDF(hashes.SM3(), length, salt, info).derive(secret)


def gcm_open(key: bytes, nonce: bytes, aad: bytes, ciphertext: bytes, tag: bytes) -> bytes:
    decryptor = Cipher(SM4(key), modes.GCM(nonce, tag)).decryptor()
    decryptor.authenticate_additional_data(aad)
    return decryptor.update(ciphertext) + decryptor.finalize()


def read_model(folder: Path, signer: bytes, root_key: bytes, passphrase: bytes | None) -> dict[str, bytes]:
    encoded = (folder / "sealmesh.manifest").read_bytes()
    manifest = Bytes(encoded)
    assert manifest.take(8) == b"SMSHMANI"
    assert struct.unpack("<HHHH", manifest.take(8)) == (1, 1, 1, 0)
    assert manifest.blob() == signer
    body = Bytes(manifest.take(manifest.number("I")))
    signed = encoded[: manifest.at]
    Ed25519PublicKey.from_public_bytes(signer).verify(manifest.blob(), b"sealmesh manifest v1\0" + signed)
    assert manifest.at == len(encoded)
    model_id, _name, version, _created = body.take(16), body.text(), body.number("Q"), body.number("Q")
    commitment = body.take(32)
    data_key = read_data_key(folder, model_id, root_key, passphrase)
    assert hkdf(data_key, model_id, b"sealmesh v1 commitment", 32) == commitment
    files = {}
    for _ in range(body.number("I")):
        kind, path, file_id, number = body.number("B"), body.text(), body.take(16), body.number("I")
        plain_size, size = body.number("Q"), body.number("Q")
        digest, index_bytes, index_digest = body.take(32), body.number("I"), body.take(32)
        content = (folder / (path + ".sealed")).read_bytes()
        assert len(content) == size
        assert sm3(content) == digest
        head = content[: 64 + index_bytes]
        assert sm3(head) == index_digest
        assert head[:64] == struct.pack(
            "<8sHHI16s16sIIII", b"SMSHFILE", 1, 1, kind, model_id, file_id, number, 4096, index_bytes, 0
        )
        files[path] = read_file(
            content, head, index_digest, file_id, number, path, version, data_key, model_id
        )
        assert len(files[path]) == plain_size
    assert body.at == len(body.data)
    return files


def read_data_key(folder: Path, model_id: bytes, root_key: bytes, passphrase: bytes | None) -> bytes:
    encoded = (folder / "sealmesh.slots").read_bytes()
    slots = Bytes(encoded)
    assert slots.take(28) == b"SMSHSLOT" + struct.pack("<HH", 1, 1) + model_id
    data_key = b""
    for _ in range(slots.number("H")):
        start = slots.at
        slot_id, kind, _label, _created = slots.take(16), slots.number("B"), slots.text(), slots.number("Q")
        parameters = Bytes(slots.blob())
        aad = encoded[:28] + encoded[start : slots.at]
        check, wrapped, tag = slots.take(32), slots.take(32), slots.take(16)
        if kind == 1 and passphrase is not None:
            salt, log2_n, r, p = parameters.take(16), *struct.unpack("<BII", parameters.take(9))
            secret = Scrypt(salt, 32, 1 << log2_n, r, p).derive(passphrase)
        elif kind == 2 and passphrase is None:
            assert parameters.take(8) == hkdf(root_key, b"", b"sealmesh v1 root id", 8)
            secret = hkdf(root_key, parameters.take(16), b"sealmesh v1 root slot", 32)
        else:
            continue
        derived = hkdf(secret, slot_id + model_id, b"sealmesh v1 slot" + bytes([kind]), 48)
        assert derived[16:] == check
        data_key = gcm_open(derived[:16], bytes(12), aad, wrapped, tag)
    slots_key = hkdf(data_key, model_id, b"sealmesh v1 slots", 32)
    assert slots.take(32) == hmac(slots_key, encoded[:-32])
    assert slots.at == len(encoded)
    return data_key


def read_file(
    content: bytes,
    head: bytes,
    index_digest: bytes,
    file_id: bytes,
    number: int,
    path: str,
    version: int,
    data_key: bytes,
    model_id: bytes,
) -> bytes:
    keys = hkdf(data_key, model_id, b"sealmesh v1 file" + file_id, 48)
    assert content[len(head) : len(head) + 32] == hmac(keys[16:], head)
    data_offset = len(head) + 32
    assert data_offset % 4096 == 0
    index = Bytes(head[64:])
    assert (index.text(), index.number("Q")) == (path, version)
    entries = []
    for _ in range(index.number("I")):
        index.number("B"), index.text(), index.text()
        for _ in range(index.number("B")):
            index.number("Q")
        entries.append((index.number("Q"), index.number("Q"), index.number("Q")))
    assert not any(index.data[index.at :])
    tags_offset = data_offset + sum(size for size, _, _ in entries)
    plain, at, n = b"", data_offset, 0
    for e, (size, first, count) in enumerate(entries):
        assert (first, count) == (n, -(-size // 4096))
        for c in range(count):
            length = min(4096, size - 4096 * c)
            plain += gcm_open(
                keys[:16],
                struct.pack("<IQ", number, n),
                index_digest + file_id + struct.pack("<IQB", e, c, c == count - 1),
                content[at : at + length],
                content[tags_offset + 16 * n :][:16],
            )
            at, n = at + length, n + 1
    assert len(content) == tags_offset + 16 * n
    return plain


def test_a_reader_written_from_the_specification_reads_a_model(lab: Lab) -> None:
    sealed = lab.seal(lab.plain(SAMPLE_FILES), slots=[lab.root, Lab.passphrase("口令")])
    root_key = bytes.fromhex(lab.root_key_file.read_text().split()[1])
    signer = lab.verifying_key.public_key
    assert read_model(sealed, signer, root_key, None) == SAMPLE_FILES
    assert read_model(sealed, signer, root_key, "口令".encode()) == SAMPLE_FILES
