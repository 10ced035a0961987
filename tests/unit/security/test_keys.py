"""Roots, slots, signatures, wrapped keys, tenant keys."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealmesh.security.keys.ecies import OneTimeKey, Wrapped, lease_subject, tenant_subject, wrap_key
from sealmesh.security.keys.signing import create_signing_key, load_signer, load_verifying_key
from sealmesh.security.keys.slots import DATA_KEY_BYTES, SlotFile, key_commitment, make_slot
from sealmesh.security.keys.sources import (
    KeyFileSource,
    KeySource,
    PassphraseSource,
    create_root_key,
    load_root_key,
    source_from_files,
)
from sealmesh.security.keys.tenants import TenantKeyStore
from sealmesh.security.sealed.keyring import add_slot, list_slots, remove_slot
from sealmesh.security.sealed.reader import open_sealed
from sealmesh.security.sm4.select import select_engine
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.unit.security.conftest import Lab

ENGINE = select_engine()
MODEL_ID = b"m" * 16
DATA_KEY = bytes(range(DATA_KEY_BYTES))
COMMITMENT = key_commitment(DATA_KEY, MODEL_ID)


def slot_file(*sources: KeySource) -> SlotFile:
    slots = [make_slot(source, model_id=MODEL_ID, data_key=DATA_KEY, engine=ENGINE) for source in sources]
    return SlotFile.build(MODEL_ID, slots, DATA_KEY)


def unlock(encoded: bytes, source: KeySource, commitment: bytes = COMMITMENT) -> bytes:
    slots = SlotFile.decode(encoded, "slots")
    return bytes(slots.unlock(source, model_id=MODEL_ID, commitment=commitment, engine=ENGINE, what="slots"))


# --- root key files ------------------------------------------------------------------------------------


def test_a_root_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "root.key"
    create_root_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = load_root_key(path)
    assert len(key) == 32
    assert any(key)
    with pytest.raises(SealmeshError, match="never overwritten"):
        create_root_key(path)
    assert load_root_key(path) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_root_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "root.key"
    create_root_key(path)
    path.chmod(mode)
    with pytest.raises(SealmeshError, match=r"open to others.*chmod 600") as caught:
        load_root_key(path)
    assert caught.value.reason == "CONFIGURATION_INVALID"


@pytest.mark.parametrize(
    "content", [b"", b"0" * 64, b"SEALMESH-ROOT-KEY-1 abc", b"SEALMESH-ROOT-KEY-1 " + b"zz" * 32]
)
def test_what_is_no_root_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "root.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SealmeshError, match=str(path)):
        load_root_key(path)


def test_a_missing_or_odd_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SealmeshError, match="cannot read root key file"):
        load_root_key(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SealmeshError, match="not a regular file"):
        load_root_key(tmp_path / "fifo")


def test_settings_name_exactly_one_source(tmp_path: Path, lab: Lab) -> None:
    phrase = tmp_path / "phrase"
    phrase.write_text("open sesame\r\nsecond line\n")
    phrase.chmod(0o600)
    for wrong in ((None, None), (lab.root_key_file, phrase)):
        with pytest.raises(SealmeshError, match="exactly one"):
            source_from_files(*wrong)
    assert isinstance(source_from_files(lab.root_key_file, None), KeyFileSource)
    source = source_from_files(None, phrase)
    assert unlock(slot_file(Lab.passphrase("open sesame")).encode(), source) == DATA_KEY


def test_an_empty_passphrase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SealmeshError, match="empty"):
        PassphraseSource("")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    empty.chmod(0o600)
    with pytest.raises(SealmeshError, match="empty"):
        PassphraseSource.from_file(empty)


# --- slots ---------------------------------------------------------------------------------------------


def test_each_of_several_slots_opens_the_same_key(lab: Lab) -> None:
    encoded = slot_file(lab.root, Lab.passphrase("one"), Lab.passphrase("two 二")).encode()
    for source in (lab.root, Lab.passphrase("two 二"), Lab.passphrase("one")):
        assert unlock(encoded, source) == DATA_KEY
    assert DATA_KEY not in encoded
    assert COMMITMENT not in encoded


def test_the_wrong_secret_is_a_clear_mismatch(lab: Lab) -> None:
    encoded = slot_file(lab.root, Lab.passphrase("right")).encode()
    with pytest.raises(SealmeshError, match="wrong passphrase, or the slot file was changed") as caught:
        unlock(encoded, Lab.passphrase("wrong"))
    assert caught.value.reason == "KEY_SLOT_MISMATCH"
    with pytest.raises(SealmeshError, match="another one") as caught:
        unlock(encoded, KeyFileSource(bytes(32)))
    assert caught.value.reason == "KEY_SLOT_MISMATCH"
    with pytest.raises(SealmeshError, match=r"no passphrase slot; it opens with: key-file"):
        unlock(slot_file(lab.root).encode(), Lab.passphrase("right"))


def test_every_flipped_bit_of_a_slot_file_is_refused(lab: Lab) -> None:
    encoded = slot_file(lab.root, Lab.passphrase("other")).encode()
    for position in range(len(encoded)):
        changed = bytearray(encoded)
        changed[position] ^= 1 << position % 8
        with pytest.raises(SealmeshError) as caught:
            unlock(bytes(changed), lab.root)
        assert caught.value.reason in ("INTEGRITY_FAILURE", "KEY_SLOT_MISMATCH"), position


@pytest.mark.parametrize("cut", [0, 1, 7, 30, 60, -1, -32, -33])
def test_a_cut_or_longer_slot_file_is_refused(lab: Lab, cut: int) -> None:
    encoded = slot_file(lab.root).encode()
    with pytest.raises(SealmeshError, match="slots") as caught:
        unlock(encoded[:cut], lab.root)
    assert caught.value.reason == "INTEGRITY_FAILURE"
    with pytest.raises(SealmeshError, match="too many"):
        unlock(encoded + b"\0", lab.root)


def test_a_dropped_or_moved_slot_is_refused(lab: Lab) -> None:
    whole = slot_file(lab.root, Lab.passphrase("x"))
    for slots in (whole.slots[:1], whole.slots[::-1]):
        changed = SlotFile(whole.model_id, slots, whole.mac)
        with pytest.raises(SealmeshError, match="MAC"):
            unlock(changed.encode(), lab.root)


def test_a_slot_file_of_another_model_or_key_is_refused(lab: Lab) -> None:
    encoded = slot_file(lab.root).encode()
    with pytest.raises(SealmeshError, match="another sealed model"):
        SlotFile.decode(encoded, "slots").unlock(
            lab.root, model_id=b"n" * 16, commitment=COMMITMENT, engine=ENGINE, what="slots"
        )
    with pytest.raises(SealmeshError, match="not the one of this model's manifest"):
        unlock(encoded, lab.root, key_commitment(bytes(32), MODEL_ID))


@pytest.mark.parametrize(
    ("log2_n", "r", "p"), [(0, 8, 1), (40, 8, 1), (255, 8, 1), (20, 8, 1), (10, 1 << 31, 1), (10, 8, 1 << 20)]
)
def test_absurd_scrypt_parameters_are_refused_before_any_work(log2_n: int, r: int, p: int) -> None:
    parameters = bytes(16) + bytes([log2_n]) + r.to_bytes(4, "little") + p.to_bytes(4, "little")
    with pytest.raises(SealmeshError, match="absurd"):
        Lab.passphrase("x").recover(parameters)


@given(data=st.binary(max_size=400), head=st.booleans())
@settings(deadline=None)
def test_the_slot_parser_only_ever_refuses(data: bytes, head: bool) -> None:
    encoded = b"SMSHSLOT\x01\0\x01\0" + data if head else data
    with contextlib.suppress(SealmeshError):
        assert SlotFile.decode(encoded, "slots").encode() == encoded


def test_slots_of_a_folder_are_added_and_removed_without_touching_anything_else(
    lab: Lab, tampered: Path
) -> None:
    before = {path: path.read_bytes() for path in tampered.rglob("*") if path.is_file()}
    with open_sealed(tampered, pinned=[lab.verifying_key]) as model:
        manifest = model.manifest
    phrase = Lab.passphrase("spare")
    added = add_slot(tampered, manifest, lab.root, phrase, ENGINE, label="spare")
    assert [slot.label for slot in list_slots(tampered)] == ["key-file", "spare"]
    original = list_slots(tampered)[0]
    remove_slot(tampered, manifest, phrase, original.slot_id, ENGINE)
    assert [slot.slot_id for slot in list_slots(tampered)] == [added.slot_id]
    with open_sealed(tampered, pinned=[lab.verifying_key]) as model:
        model.unlock(phrase)
        with pytest.raises(SealmeshError, match="no key-file slot"):
            model.unlock(lab.root)
    with pytest.raises(SealmeshError, match="last slot"):
        remove_slot(tampered, manifest, phrase, added.slot_id, ENGINE)
    with pytest.raises(SealmeshError, match="has no slot"):
        remove_slot(tampered, manifest, phrase, bytes(16), ENGINE)
    after = {path: path.read_bytes() for path in tampered.rglob("*") if path.is_file()}
    assert {path.name for path in after if after[path] != before.get(path)} == {"sealmesh.slots"}
    assert after.keys() == before.keys()


# --- signatures ----------------------------------------------------------------------------------------


def test_a_signing_key_pair_signs_and_verifies(tmp_path: Path) -> None:
    made = create_signing_key(tmp_path / "s.key", tmp_path / "s.pub")
    assert stat.S_IMODE((tmp_path / "s.key").stat().st_mode) == 0o600
    signer, pinned = load_signer(tmp_path / "s.key"), load_verifying_key(tmp_path / "s.pub")
    assert made == pinned == signer.verifying_key
    signature = signer.sign(b"message")
    assert pinned.verifies(b"message", signature)
    assert not pinned.verifies(b"messagf", signature)
    assert not pinned.verifies(b"message", bytes(64))
    assert not pinned.verifies(b"message", b"")
    with pytest.raises(SealmeshError, match="never overwritten"):
        create_signing_key(tmp_path / "s.key", tmp_path / "s.pub")


def test_what_is_no_signing_key_is_refused(tmp_path: Path, lab: Lab) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    junk.chmod(0o600)
    with pytest.raises(SealmeshError, match="PEM private key"):
        load_signer(junk)
    with pytest.raises(SealmeshError, match="PEM public key"):
        load_verifying_key(junk)
    with pytest.raises(SealmeshError, match="cannot read"):
        load_verifying_key(tmp_path / "none")
    copy = tmp_path / "open.key"
    copy.write_bytes(lab.signing_key_file.read_bytes())
    copy.chmod(0o644)
    with pytest.raises(SealmeshError, match="open to others"):
        load_signer(copy)


# --- wrapped keys --------------------------------------------------------------------------------------


def test_a_wrapped_key_opens_once_for_its_subject_only() -> None:
    subject = lease_subject("ab" * 16)
    recipient = OneTimeKey()
    wrapped = wrap_key(DATA_KEY, recipient.public_key, subject, ENGINE)
    assert DATA_KEY not in wrapped.ciphertext
    assert bytes(recipient.unwrap(wrapped, subject, ENGINE)) == DATA_KEY
    with pytest.raises(RuntimeError, match="twice"):
        recipient.unwrap(wrapped, subject, ENGINE)


def test_a_wrapped_key_is_bound_to_subject_recipient_and_bytes() -> None:
    subject = tenant_subject("0" * 32, 1)

    def wrapped_to(recipient: OneTimeKey) -> Wrapped:
        return wrap_key(DATA_KEY, recipient.public_key, subject, ENGINE)

    recipient = OneTimeKey()
    with pytest.raises(SealmeshError, match="not for this subject"):
        recipient.unwrap(wrapped_to(recipient), tenant_subject("0" * 32, 2), ENGINE)
    with pytest.raises(SealmeshError, match="does not verify"):
        OneTimeKey().unwrap(wrapped_to(OneTimeKey()), subject, ENGINE)
    recipient = OneTimeKey()
    good = wrapped_to(recipient)
    flipped = bytes([good.ciphertext[0] ^ 1]) + good.ciphertext[1:]
    with pytest.raises(SealmeshError, match="does not verify"):
        recipient.unwrap(Wrapped(good.sender_public_key, flipped), subject, ENGINE)
    with pytest.raises(SealmeshError, match="too short"):
        OneTimeKey().unwrap(Wrapped(good.sender_public_key, b"short"), subject, ENGINE)
    with pytest.raises(SealmeshError, match="unusable sender key"):
        OneTimeKey().unwrap(Wrapped(bytes(32), good.ciphertext), subject, ENGINE)


@pytest.mark.parametrize("public_key", [b"", b"x" * 31, bytes(32)])
def test_wrapping_to_what_is_no_public_key_is_refused(public_key: bytes) -> None:
    with pytest.raises(SealmeshError, match="X25519"):
        wrap_key(DATA_KEY, public_key, b"", ENGINE)


# --- tenant keys ---------------------------------------------------------------------------------------


def store(path: Path, source: KeySource) -> TenantKeyStore:
    made = TenantKeyStore(path, ENGINE)
    made.open(source)
    return made


HANDLE = "0123456789abcdef" * 2


def test_tenant_keys_are_random_stable_and_wrapped(tmp_path: Path, lab: Lab) -> None:
    first = store(tmp_path, lab.root)
    keys = {bytes(first.key(HANDLE, 1)), bytes(first.key(HANDLE, 2)), bytes(first.key("f" * 32, 1))}
    assert len(keys) == 3
    again = store(tmp_path, lab.root)
    assert bytes(again.key(HANDLE, 1)) == bytes(first.key(HANDLE, 1))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not any(key in path.read_bytes() for key in keys)


def test_an_erased_tenant_key_is_gone_for_good(tmp_path: Path, lab: Lab) -> None:
    tenants = store(tmp_path, lab.root)
    before = bytes(tenants.key(HANDLE, 1))
    assert tenants.erase(HANDLE, 1)
    assert not tenants.erase(HANDLE, 1)
    assert bytes(tenants.key(HANDLE, 1)) != before


def test_another_root_does_not_open_the_tenant_keys(tmp_path: Path, lab: Lab) -> None:
    store(tmp_path, lab.root).close()
    with pytest.raises(SealmeshError, match="another one") as caught:
        store(tmp_path, KeyFileSource(secrets.token_bytes(32)))
    assert caught.value.reason == "KEY_SLOT_MISMATCH"


def test_changed_or_swapped_tenant_key_files_are_refused(tmp_path: Path, lab: Lab) -> None:
    tenants = store(tmp_path, lab.root)
    tenants.key(HANDLE, 1)
    tenants.key(HANDLE, 2)
    one, two = (tmp_path / "tenants" / f"{HANDLE}-{epoch}.key" for epoch in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    with pytest.raises(SealmeshError, match="does not verify"):
        tenants.key(HANDLE, 1)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 0x80
        one.write_bytes(changed)
        with pytest.raises(SealmeshError) as caught:
            tenants.key(HANDLE, 1)
        assert caught.value.reason == "INTEGRITY_FAILURE"


@pytest.mark.parametrize(
    ("handle", "epoch"), [("../" * 10, 1), ("A" * 32, 1), ("", 1), (HANDLE, 0), (HANDLE, 1 << 63)]
)
def test_handles_and_epochs_are_checked(tmp_path: Path, lab: Lab, handle: str, epoch: int) -> None:
    with pytest.raises(SealmeshError, match="tenant") as caught:
        store(tmp_path, lab.root).key(handle, epoch)
    assert caught.value.reason == "INVALID_REQUEST"
