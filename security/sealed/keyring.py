"""The slots of a sealed folder: open, list, add and remove. Only the slot file is ever rewritten."""

from __future__ import annotations

from pathlib import Path

from sealmesh.security.errors import invalid_request, not_found
from sealmesh.security.files import Folder, atomic_write
from sealmesh.security.keys.slots import MAX_FILE_BYTES, Slot, SlotFile, make_slot
from sealmesh.security.keys.sources import KeySource
from sealmesh.security.memory import wipe
from sealmesh.security.sealed.format import MANIFEST_NAME, MAX_MANIFEST_BYTES, SLOTS_NAME
from sealmesh.security.sealed.manifest import Manifest
from sealmesh.security.sm4.engine import Sm4GcmEngine


def read_manifest_bytes(folder: Folder) -> bytes:
    """The manifest file of an open folder; raises NOT_FOUND when the folder is not a sealed model."""
    if not (folder.path / MANIFEST_NAME).exists():
        raise not_found(f"{folder.path} is not a sealed model: it has no {MANIFEST_NAME}; seal one first")
    return folder.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)


def read_slots(folder: Folder) -> SlotFile:
    """The slot file of an open folder."""
    return SlotFile.decode(folder.read_file(SLOTS_NAME, MAX_FILE_BYTES), str(folder.path / SLOTS_NAME))


def unlock_data_key(folder: Folder, manifest: Manifest, source: KeySource, engine: Sm4GcmEngine) -> bytearray:
    """The data key of the model (caller wipes); errors as `SlotFile.unlock`."""
    return read_slots(folder).unlock(
        source,
        model_id=manifest.model_id,
        commitment=manifest.key_commitment,
        engine=engine,
        what=str(folder.path / SLOTS_NAME),
    )


def list_slots(path: Path) -> tuple[Slot, ...]:
    """The slots of a sealed folder; needs no key, so their integrity is not checked."""
    with Folder(path) as folder:
        return read_slots(folder).slots


def add_slot(
    path: Path,
    manifest: Manifest,
    opener: KeySource,
    added: KeySource,
    engine: Sm4GcmEngine,
    *,
    label: str = "",
) -> Slot:
    """Lets another root open the model as well. The file is replaced atomically."""
    with Folder(path) as folder:
        data_key = unlock_data_key(folder, manifest, opener, engine)
        try:
            slots = read_slots(folder).slots
            slot = make_slot(added, model_id=manifest.model_id, data_key=data_key, engine=engine, label=label)
            _write(path, SlotFile.build(manifest.model_id, (*slots, slot), data_key))
            return slot
        finally:
            wipe(data_key)


def remove_slot(
    path: Path, manifest: Manifest, opener: KeySource, slot_id: bytes, engine: Sm4GcmEngine
) -> None:
    """Removes a slot; raises NOT_FOUND for an unknown one and INVALID_REQUEST for the last one.

    The data key stays the same: whoever kept a copy of the old slot file can still use it.
    """
    with Folder(path) as folder:
        data_key = unlock_data_key(folder, manifest, opener, engine)
        try:
            slots = read_slots(folder).slots
            kept = tuple(slot for slot in slots if slot.slot_id != slot_id)
            if len(kept) == len(slots):
                raise not_found(f"{path / SLOTS_NAME} has no slot {slot_id.hex()}")
            if not kept:
                raise invalid_request(
                    "the last slot cannot be removed: nothing would open the model any more"
                )
            _write(path, SlotFile.build(manifest.model_id, kept, data_key))
        finally:
            wipe(data_key)


def _write(path: Path, slots: SlotFile) -> None:
    atomic_write(path / SLOTS_NAME, slots.encode(), mode=0o644)
