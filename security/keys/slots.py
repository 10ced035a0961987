"""Key slots: several roots that each open one data key (after LUKS and age); see docs/sealed-format.md."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sealmesh.security.binary import Cursor, Packer
from sealmesh.security.errors import integrity_failure, invalid_request, slot_mismatch
from sealmesh.security.keys.sources import KeySource, SlotKind
from sealmesh.security.memory import Region, Secret, wipe
from sealmesh.security.sm4.engine import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Sm4GcmEngine, TagMismatchError
from sealmesh.security.sm4.sm3 import DIGEST_BYTES, equal, hkdf_sm3, hmac_sm3

MAGIC = b"SMSHSLOT"
VERSION = 1
SUITE_SM4_GCM_SM3 = 1
MODEL_ID_BYTES = 16
DATA_KEY_BYTES = 32
MAX_FILE_BYTES = 16 * 1024
_MAX_SLOTS = 32
_MAX_PARAMETERS_BYTES = 1024
_MAX_LABEL_BYTES = 64
_SLOT_ID_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """One slot. Everything but the key it wraps is public."""

    slot_id: bytes
    kind: int
    label: str
    created_s: int  # seconds since 1970
    parameters: bytes
    check: bytes
    wrapped_key: bytes

    @property
    def kind_name(self) -> str:
        try:
            return SlotKind(self.kind).label
        except ValueError:
            return f"kind-{self.kind}"

    def _head(self) -> bytes:
        return (
            Packer()
            .raw(self.slot_id)
            .u8(self.kind)
            .text(self.label)
            .u64(self.created_s)
            .blob(self.parameters)
            .bytes()
        )

    def encode(self) -> bytes:
        return self._head() + self.check + self.wrapped_key

    @classmethod
    def decode(cls, cursor: Cursor) -> Slot:
        slot = cls(
            slot_id=cursor.take(_SLOT_ID_BYTES),
            kind=cursor.u8(),
            label=cursor.text(),
            created_s=cursor.u64(),
            parameters=cursor.blob(),
            check=cursor.take(DIGEST_BYTES),
            wrapped_key=cursor.take(DATA_KEY_BYTES + TAG_BYTES),
        )
        if len(slot.parameters) > _MAX_PARAMETERS_BYTES or len(slot.label.encode("utf-8")) > _MAX_LABEL_BYTES:
            raise integrity_failure(f"{cursor.what} has a slot with over-long parameters or label")
        return slot

    def derive(self, secret: Secret, model_id: bytes) -> tuple[bytearray, bytes]:
        """The wrapping key (16 bytes, caller wipes) and the check value of a slot's secret.

        The slot id is random and goes into the salt, so every wrapping key is used once.
        """
        derived = hkdf_sm3(
            secret,
            salt=self.slot_id + model_id,
            info=b"sealmesh v1 slot" + bytes([self.kind]),
            length_bytes=KEY_BYTES + DIGEST_BYTES,
        )
        try:
            return bytearray(derived[:KEY_BYTES]), bytes(derived[KEY_BYTES:])
        finally:
            wipe(derived)

    def aad(self, model_id: bytes) -> bytes:
        return _head(model_id) + self._head()


def _head(model_id: bytes) -> bytes:
    return Packer().raw(MAGIC).u16(VERSION).u16(SUITE_SM4_GCM_SM3).raw(model_id).bytes()


def _mac(data_key: Secret, model_id: bytes, content: bytes) -> bytes:
    key = hkdf_sm3(data_key, salt=model_id, info=b"sealmesh v1 slots", length_bytes=32)
    try:
        return hmac_sm3(key, content)
    finally:
        wipe(key)


def key_commitment(data_key: Secret, model_id: bytes) -> bytes:
    """32 bytes that only this data key gives; stands in the signed manifest.

    GCM alone does not commit to its key: two keys can be found that both open one ciphertext.
    """
    return bytes(hkdf_sm3(data_key, salt=model_id, info=b"sealmesh v1 commitment", length_bytes=DIGEST_BYTES))


@dataclass(frozen=True)
class SlotFile:
    """The slots of one model, with a MAC under the data key over all of them."""

    model_id: bytes
    slots: tuple[Slot, ...]
    mac: bytes

    @classmethod
    def decode(cls, data: bytes, what: str) -> SlotFile:
        """Parses a slot file. The MAC is checked by `unlock`, which has the key."""
        if len(data) > MAX_FILE_BYTES:
            raise integrity_failure(f"{what} is over {MAX_FILE_BYTES} bytes")
        cursor = Cursor(data, what)
        if cursor.take(len(MAGIC)) != MAGIC:
            raise integrity_failure(f"{what} is not a slot file")
        version, suite = cursor.u16(), cursor.u16()
        if (version, suite) != (VERSION, SUITE_SM4_GCM_SM3):
            raise integrity_failure(
                f"{what} has version {version} and suite {suite}, which are not known here"
            )
        model_id = cursor.take(MODEL_ID_BYTES)
        count = cursor.u16()
        if not 1 <= count <= _MAX_SLOTS:
            raise integrity_failure(f"{what} claims {count} slots; 1 to {_MAX_SLOTS} are possible")
        slots = tuple(Slot.decode(cursor) for _ in range(count))
        mac = cursor.take(DIGEST_BYTES)
        cursor.end()
        return cls(model_id, slots, mac)

    def _content(self) -> bytes:
        packer = Packer().raw(_head(self.model_id)).u16(len(self.slots))
        for slot in self.slots:
            packer.raw(slot.encode())
        return packer.bytes()

    def encode(self) -> bytes:
        return self._content() + self.mac

    @classmethod
    def build(cls, model_id: bytes, slots: Sequence[Slot], data_key: Secret) -> SlotFile:
        """A slot file with its MAC. Raises INVALID_REQUEST for no slot or too many."""
        if not 1 <= len(slots) <= _MAX_SLOTS:
            raise invalid_request(f"a sealed model has 1 to {_MAX_SLOTS} key slots, not {len(slots)}")
        bare = cls(model_id, tuple(slots), b"")
        return cls(model_id, bare.slots, _mac(data_key, model_id, bare._content()))

    def check_model(self, model_id: bytes, what: str) -> None:
        """Raises INTEGRITY_FAILURE unless the file names this model; needs no key."""
        if self.model_id != model_id:
            raise integrity_failure(f"{what} belongs to another sealed model")

    def unlock(
        self, source: KeySource, *, model_id: bytes, commitment: bytes, engine: Sm4GcmEngine, what: str
    ) -> bytearray:
        """The data key (32 bytes, caller wipes).

        Raises KEY_SLOT_MISMATCH when no slot opens with the source, INTEGRITY_FAILURE when the file was
        changed or belongs to another model than `model_id` and `commitment` (from the manifest) say.
        """
        self.check_model(model_id, what)
        tried = 0
        for slot in self.slots:
            if slot.kind != source.kind:
                continue
            tried += 1
            data_key = _open_slot(slot, source, model_id, engine, what)
            if data_key is None:
                continue
            if not equal(key_commitment(data_key, model_id), commitment):
                wipe(data_key)
                raise integrity_failure(f"{what} holds a key that is not the one of this model's manifest")
            if not equal(_mac(data_key, model_id, self._content()), self.mac):
                wipe(data_key)
                raise integrity_failure(f"{what} was changed after it was written (its MAC does not verify)")
            return data_key
        kind = source.kind.label
        if not tried:
            others = ", ".join(sorted({slot.kind_name for slot in self.slots}))
            raise slot_mismatch(f"{what} has no {kind} slot; it opens with: {others}")
        hint = "wrong passphrase" if source.kind is SlotKind.PASSPHRASE else "the key is another one"
        # A changed check value or parameter looks the same as a wrong secret.
        raise slot_mismatch(
            f"{what}: none of its {tried} {kind} slot(s) opens: {hint}, or the slot file was changed"
        )


def _open_slot(
    slot: Slot, source: KeySource, model_id: bytes, engine: Sm4GcmEngine, what: str
) -> bytearray | None:
    secret = source.recover(slot.parameters)
    if secret is None:
        return None
    wrapping_key, check = slot.derive(secret, model_id)
    wipe(secret)
    try:
        if not equal(check, slot.check):
            return None
        data_key = bytearray(slot.wrapped_key[:DATA_KEY_BYTES])
        cipher = engine.new_cipher(wrapping_key)
        try:
            tag = slot.wrapped_key[DATA_KEY_BYTES:]
            cipher.open_into(bytes(NONCE_BYTES), slot.aad(model_id), Region.of(data_key), tag)
        except TagMismatchError:
            raise integrity_failure(f"{what} was changed: {slot.kind_name} slot does not verify") from None
        finally:
            cipher.close()
        return data_key
    finally:
        wipe(wrapping_key)


def make_slot(
    source: KeySource, *, model_id: bytes, data_key: Secret, engine: Sm4GcmEngine, label: str = ""
) -> Slot:
    """A new slot by which the source opens the data key."""
    if len(label.encode("utf-8")) > _MAX_LABEL_BYTES:
        raise invalid_request(f"a slot label has at most {_MAX_LABEL_BYTES} bytes")
    parameters, secret = source.create()
    bare = Slot(
        slot_id=secrets.token_bytes(_SLOT_ID_BYTES),
        kind=source.kind,
        label=label,
        created_s=int(time.time()),
        parameters=parameters,
        check=b"",
        wrapped_key=b"",
    )
    wrapping_key, check = bare.derive(secret, model_id)
    wipe(secret)
    wrapped = bytearray(data_key)
    cipher = engine.new_cipher(wrapping_key)
    try:
        tag = cipher.seal_into(bytes(NONCE_BYTES), bare.aad(model_id), Region.of(wrapped))
    finally:
        cipher.close()
        wipe(wrapping_key)
    return Slot(bare.slot_id, bare.kind, label, bare.created_s, parameters, check, bytes(wrapped) + tag)
