"""Whatever is changed in a sealed folder is refused, nothing in the clear is released, the place is named."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sealmesh.security.keys.signing import create_signing_key, load_signer
from sealmesh.security.sealed.format import EntryKind, FileKind
from sealmesh.security.sealed.index import Entry, FileIndex
from sealmesh.security.sealed.manifest import Manifest
from sealmesh.security.sealed.reader import TensorInfo, open_sealed
from sealmesh.security.sealed.unseal import unseal_folder
from sealmesh.security.sealed.verify import verify_folder
from sealmesh.security.sm4.sm3 import sm3
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.unit.security.conftest import CHUNK_BYTES, SAMPLE_FILES, SAMPLE_TENSORS, Lab

WEIGHTS = "model.safetensors.sealed"
MANIFEST = "sealmesh.manifest"
SLOTS = "sealmesh.slots"


def index_of(lab: Lab, sealed: Path, path: str = "model.safetensors") -> FileIndex:
    with open_sealed(sealed, pinned=[lab.verifying_key]) as model:
        return next(file.index for file in model.files() if file.listed.path == path)


def span(lab: Lab, sealed: Path, tensor: str, chunk: int) -> tuple[int, int]:
    """Where a chunk's ciphertext lies in the weights file: offset and size."""
    index = index_of(lab, sealed)
    entry = next(n for n, e in enumerate(index.entries) if e.name == tensor)
    found = list(index.chunks_of(entry))[chunk]
    return index.data_offset_bytes + found.offset_bytes, found.size_bytes


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


# --- bit flips -----------------------------------------------------------------------------------------


@given(
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    which=st.sampled_from(sorted(SAMPLE_FILES)),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_anywhere_in_any_file_is_refused(
    lab: Lab, sample: Path, where: float, bit: int, which: str
) -> None:
    copy = lab.copy(sample)
    path = copy / (which + ".sealed")
    flip(path, int(where * path.stat().st_size), bit)
    error = lab.refused(copy)
    assert error.reason == "INTEGRITY_FAILURE"
    assert str(path) in error.message
    assert not verify_folder(copy, pinned=[lab.verifying_key]).ok
    shutil.rmtree(copy)


def test_a_flipped_bit_in_every_region_is_refused(lab: Lab, sample: Path) -> None:
    index = index_of(lab, sample)
    header = 64 + index.preamble.index_bytes
    regions = {
        "preamble": range(64),
        "index": range(64, 300, 2),
        "padding": range(header - 40, header, 4),
        "mac": range(header, header + 32),
        "data": range(index.data_offset_bytes, index.tags_offset_bytes, 2237),
        "tags": range(index.tags_offset_bytes, index.file_bytes, 3),
    }
    copy = lab.copy(sample)
    path = copy / WEIGHTS
    original = path.read_bytes()
    for region, positions in regions.items():
        for position in positions:
            changed = bytearray(original)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            error = lab.refused(copy)
            assert error.reason == "INTEGRITY_FAILURE", (region, position)
            assert str(path) in error.message, (region, position)


@pytest.mark.parametrize("tensor", ["embed", "norm", "scalar", "proj"])
def test_the_message_names_file_tensor_and_chunk_and_the_target_is_zeroed(
    lab: Lab, tampered: Path, tensor: str
) -> None:
    last = -(-len(SAMPLE_TENSORS[tensor][2]) // CHUNK_BYTES) - 1
    offset, size = span(lab, tampered, tensor, last)
    flip(tampered / WEIGHTS, offset + size - 1)
    with lab.open(tampered) as model:
        target = bytearray(b"\xaa" * len(SAMPLE_TENSORS[tensor][2]))
        with pytest.raises(SealmeshError) as caught:
            model.read_tensor_into(tensor, target)
        assert not any(target)
        for other in SAMPLE_TENSORS.keys() - {tensor}:
            model.read_tensor_into(other, bytearray(len(SAMPLE_TENSORS[other][2])))
    assert caught.value.reason == "INTEGRITY_FAILURE"
    place = {"file": str(tampered / WEIGHTS), "tensor": tensor, "chunk": str(last)}
    assert caught.value.metadata == place
    assert all(f"{key} {value}" in caught.value.message for key, value in place.items())
    report = verify_folder(tampered, pinned=[lab.verifying_key], source=lab.root)
    assert any(f"tensor {tensor}, chunk {last}" in problem for problem in report.problems)


def test_a_failed_stream_zeroes_every_tensor_that_was_not_handed_over(lab: Lab, tampered: Path) -> None:
    offset, _ = span(lab, tampered, "norm", 0)
    flip(tampered / WEIGHTS, offset)
    made: dict[str, bytearray] = {}

    def allocate(info: TensorInfo) -> tuple[bytearray, bytearray]:
        made[info.name] = bytearray(b"\xaa" * info.size_bytes)
        return made[info.name], made[info.name]

    with lab.open(tampered) as model:
        stream = model.stream_tensors(allocate, threads=2)
        got = [next(stream)[0].name]
        with pytest.raises(SealmeshError, match="tensor norm, chunk 0"):
            next(stream)
    assert got == ["embed"]
    assert bytes(made["embed"]) == SAMPLE_TENSORS["embed"][2]
    assert len(made) > 2
    assert not any(any(content) for name, content in made.items() if name != "embed")


def test_a_failed_unsealing_leaves_nothing(lab: Lab, tampered: Path) -> None:
    flip(tampered / WEIGHTS, span(lab, tampered, "proj", 1)[0])
    target = lab.folder("unsealed")
    with lab.open(tampered) as model, pytest.raises(SealmeshError, match="tensor proj, chunk 1"):
        unseal_folder(model, target)
    assert not [path for path in lab.base.iterdir() if target.name in path.name]


# --- truncation, trailing bytes, moved chunks ----------------------------------------------------------


def test_truncation_at_every_boundary_and_at_random_is_refused(lab: Lab, sample: Path) -> None:
    index = index_of(lab, sample)
    cuts = {0, 1, 63, 64, 65, 95, 96, index.data_offset_bytes, index.tags_offset_bytes, index.file_bytes - 1}
    for chunk in index.chunks():
        cuts |= {index.data_offset_bytes + chunk.offset_bytes, index.tags_offset_bytes + 16 * chunk.number}
    cuts |= {random.Random(7).randrange(index.file_bytes) for _ in range(20)}
    copy = lab.copy(sample)
    path = copy / WEIGHTS
    original = path.read_bytes()
    for cut in sorted(cuts):
        path.write_bytes(original[:cut])
        error = lab.refused(copy)
        assert (error.reason, str(path) in error.message) == ("INTEGRITY_FAILURE", True), cut
    for extra in (b"\0", b"x" * 16, b"x" * CHUNK_BYTES):
        path.write_bytes(original + extra)
        assert "too long" in lab.refused(copy).message


def test_a_file_that_is_cut_while_it_is_open_is_refused(lab: Lab, tampered: Path) -> None:
    with lab.open(tampered) as model:
        os.truncate(tampered / WEIGHTS, index_of(lab, tampered).data_offset_bytes + 5000)
        target = bytearray(b"\xaa" * len(SAMPLE_TENSORS["embed"][2]))
        with pytest.raises(SealmeshError, match="too early"):
            model.read_tensor_into("embed", target)
    assert not any(target)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("proj", 0), ("proj", 1)), (("embed", 1), ("proj", 0)), (("embed", 0), ("embed", 2))],
)
@pytest.mark.parametrize("with_tags", [True, False])
def test_swapped_and_duplicated_chunks_are_refused(
    lab: Lab, sample: Path, first: tuple[str, int], second: tuple[str, int], with_tags: bool
) -> None:
    index = index_of(lab, sample)
    names = [entry.name for entry in index.entries]
    chunks = [list(index.chunks_of(names.index(tensor)))[at] for tensor, at in (first, second)]
    spans = [(index.data_offset_bytes + c.offset_bytes, c.size_bytes) for c in chunks]
    tags = [index.tags_offset_bytes + 16 * c.number for c in chunks]
    assert spans[0][1] == spans[1][1] == CHUNK_BYTES
    original = (sample / WEIGHTS).read_bytes()
    for swap in (True, False):
        changed = bytearray(original)
        moves = [(spans[0][0], spans[1][0], CHUNK_BYTES)] + [(tags[0], tags[1], 16)] * with_tags
        for here, there, size in moves:
            changed[there : there + size] = original[here : here + size]
            if swap:
                changed[here : here + size] = original[there : there + size]
        copy = lab.copy(sample)
        (copy / WEIGHTS).write_bytes(changed)
        error = lab.refused(copy)
        assert error.reason == "INTEGRITY_FAILURE"
        assert error.metadata["tensor"] in (first[0], second[0])
        shutil.rmtree(copy)


def test_a_dropped_chunk_is_refused(lab: Lab, tampered: Path) -> None:
    offset, size = span(lab, tampered, "proj", 0)
    content = (tampered / WEIGHTS).read_bytes()
    (tampered / WEIGHTS).write_bytes(content[:offset] + content[offset + size :])
    assert "cut short" in lab.refused(tampered).message


# --- files ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(lab: Lab) -> tuple[Path, Path]:
    """Two sealings, under one root, of models with the same shapes and names."""
    files = {
        "a.safetensors": Lab.safetensors({"a": ("U8", [5000], b"a" * 5000)}),
        "b.safetensors": Lab.safetensors({"b": ("U8", [5000], b"b" * 5000)}),
        "config.json": b'{"x": 1}',
        "params.json": b'{"x": 2}',
    }
    plain = lab.plain(files)
    return lab.seal(plain, name="twin", version=1), lab.seal(plain, name="twin", version=2)


@pytest.mark.parametrize(("one", "two"), [("a.safetensors", "b.safetensors"), ("config.json", "params.json")])
def test_files_swapped_within_a_model_are_refused(
    lab: Lab, twins: tuple[Path, Path], one: str, two: str
) -> None:
    copy = lab.copy(twins[0])
    first, second = copy / (one + ".sealed"), copy / (two + ".sealed")
    contents = first.read_bytes(), second.read_bytes()
    assert len(contents[0]) == len(contents[1])
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert str(copy) in lab.refused(copy).message


@pytest.mark.parametrize("name", ["a.safetensors.sealed", "config.json.sealed", SLOTS, MANIFEST])
def test_a_file_of_another_model_under_the_same_root_is_refused(
    lab: Lab, twins: tuple[Path, Path], name: str
) -> None:
    copy = lab.copy(twins[0])
    shutil.copy(twins[1] / name, copy / name)
    error = lab.refused(copy)
    assert error.reason == "INTEGRITY_FAILURE"
    assert str(copy) in error.message


@pytest.mark.parametrize("name", [f"{path}.sealed" for path in sorted(SAMPLE_FILES)])
def test_a_plaintext_file_under_a_sealed_name_is_refused(lab: Lab, tampered: Path, name: str) -> None:
    plain = SAMPLE_FILES[name.removesuffix(".sealed")]
    (tampered / name).write_bytes(plain.ljust(100, b"\n"))
    assert "plaintext file under a sealed name" in lab.refused(tampered).message


@pytest.mark.parametrize("name", [WEIGHTS, "config.json.sealed", SLOTS])
def test_a_missing_or_renamed_file_is_refused(lab: Lab, tampered: Path, name: str) -> None:
    (tampered / name).rename(tampered / "other.sealed")
    error = lab.refused(tampered)
    assert error.reason == "INTEGRITY_FAILURE"
    assert "missing" in error.message
    problems = verify_folder(tampered, pinned=[lab.verifying_key]).problems
    assert any("missing" in problem for problem in problems)
    assert any("other.sealed does not belong" in problem for problem in problems)


def test_files_that_do_not_belong_are_never_read_and_verify_names_them(lab: Lab, tampered: Path) -> None:
    (tampered / "config.json").write_text('{"evil": true}')
    (tampered / "evil").symlink_to("/etc")
    assert lab.load(tampered)[1]["config.json"] == SAMPLE_FILES["config.json"]
    problems = verify_folder(tampered, pinned=[lab.verifying_key]).problems
    assert {problem.split(" ")[0] for problem in problems} == {
        str(tampered / "config.json"),
        str(tampered / "evil"),
    }


@pytest.mark.parametrize("what", ["link to a good file", "link on the way", "fifo", "folder"])
def test_links_and_special_files_are_refused(lab: Lab, sample: Path, tampered: Path, what: str) -> None:
    name = "tokenizer/vocab.txt.sealed"
    if what == "link on the way":
        shutil.rmtree(tampered / "tokenizer")
        (tampered / "tokenizer").symlink_to(sample / "tokenizer")
    else:
        (tampered / name).unlink()
        if what == "link to a good file":
            (tampered / name).symlink_to(sample / name)
        elif what == "fifo":
            os.mkfifo(tampered / name)
        else:
            (tampered / name).mkdir()
    assert lab.refused(tampered).reason == "INTEGRITY_FAILURE"


def test_the_folder_itself_may_be_a_link(lab: Lab, sample: Path) -> None:
    link = lab.folder("current")
    link.symlink_to(sample)
    assert lab.load(link)[0].keys() == SAMPLE_TENSORS.keys()


# --- manifest ------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_manifest_is_refused(lab: Lab, sample: Path) -> None:
    content = (sample / MANIFEST).read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        for pinned in ([lab.verifying_key], None):
            with pytest.raises(SealmeshError) as caught:
                Manifest.decode(bytes(changed), "manifest", pinned)
            assert caught.value.reason == "INTEGRITY_FAILURE", position


def test_a_cut_or_longer_manifest_is_refused(sample: Path) -> None:
    content = (sample / MANIFEST).read_bytes()
    for cut in range(0, len(content), 7):
        with pytest.raises(SealmeshError, match="manifest"):
            Manifest.decode(content[:cut], "manifest", None)
    with pytest.raises(SealmeshError, match="too many"):
        Manifest.decode(content + b"\0", "manifest", None)


def test_another_signer_is_refused(lab: Lab, tmp_path: Path) -> None:
    create_signing_key(tmp_path / "mallory.key", tmp_path / "mallory.pub")
    mallory = load_signer(tmp_path / "mallory.key")
    sealed = lab.seal(lab.plain(SAMPLE_FILES), signer=mallory)
    assert "not a pinned key" in lab.refused(sealed).message
    with open_sealed(sealed, pinned=None) as model:
        with pytest.raises(SealmeshError, match="not a pinned key"):
            model.verify_manifest([lab.verifying_key])
        model.verify_manifest([lab.verifying_key, mallory.verifying_key])
    with pytest.raises(SealmeshError, match="not a pinned key"):
        open_sealed(sealed, pinned=[])


def test_a_stripped_signature_is_refused(lab: Lab, tampered: Path) -> None:
    content = bytearray((tampered / MANIFEST).read_bytes())
    for changed in (content[:-66] + b"\0\0", content[:-66], content[:12] + b"\0\0" + content[14:]):
        (tampered / MANIFEST).write_bytes(changed)
        assert lab.refused(tampered).reason == "INTEGRITY_FAILURE"


def resigned(lab: Lab, sealed: Path, change: Mapping[str, object]) -> bytes:
    """A manifest with some fields changed and a good signature: what a signer could be tricked into."""
    manifest = Manifest.decode((sealed / MANIFEST).read_bytes(), "manifest", None)
    fields: dict[str, object] = {
        "model_id": manifest.model_id,
        "name": manifest.name,
        "version": manifest.version,
        "created_s": manifest.created_s,
        "key_commitment": manifest.key_commitment,
        "files": manifest.files,
    }
    return Manifest.sign(lab.signer, **(fields | dict(change))).encoded  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    ["../evil", "/etc/passwd", "a/../../b", "a//b", "./a", "a\\b", "a\0b", "", "a/", "x" * 600, "a\nb"],
)
def test_path_tricks_in_a_signed_manifest_are_refused(lab: Lab, sample: Path, path: str) -> None:
    manifest = Manifest.decode((sample / MANIFEST).read_bytes(), "manifest", None)
    with pytest.raises(SealmeshError, match="plain relative path"):
        resigned(lab, sample, {"files": [dataclasses.replace(manifest.files[0], path=path)]})


def test_a_manifest_that_contradicts_its_files_is_refused(lab: Lab, tampered: Path) -> None:
    changes: list[dict[str, object]] = [
        {"version": 9},
        {"model_id": b"x" * 16},
        {"key_commitment": bytes(32)},
    ]
    for change in changes:
        original = (tampered / MANIFEST).read_bytes()
        (tampered / MANIFEST).write_bytes(resigned(lab, tampered, change))
        assert lab.refused(tampered).reason == "INTEGRITY_FAILURE"
        (tampered / MANIFEST).write_bytes(original)


# --- parsers -------------------------------------------------------------------------------------------


def build_index(entries: list[Entry], kind: FileKind = FileKind.TENSORS) -> FileIndex:
    return FileIndex.build(
        kind=kind,
        model_id=b"m" * 16,
        file_id=b"f" * 16,
        file_number=0,
        chunk_bytes=CHUNK_BYTES,
        path="x",
        model_version=1,
        entries=[Entry(EntryKind.RAW, "", "", (), 8), *entries],
    )


@pytest.mark.parametrize(
    "entry",
    [
        Entry(EntryKind.TENSOR, "t", "U8", (4,), 5),
        Entry(EntryKind.TENSOR, "t", "NOPE", (4,), 4),
        Entry(EntryKind.TENSOR, "t", "F4", (1,), 0),
        Entry(EntryKind.TENSOR, "t" * 2000, "U8", (4,), 4),
        Entry(EntryKind.TENSOR, "t", "U8", (1,) * 33, 1),
        Entry(EntryKind.RAW, "named", "", (), 4),
        Entry(EntryKind.RAW, "", "", (), 4),
    ],
)
def test_edited_dtypes_shapes_and_names_do_not_even_parse(entry: Entry) -> None:
    with pytest.raises(SealmeshError) as caught:
        build_index([entry])
    assert caught.value.reason == "INTEGRITY_FAILURE"


def test_an_edited_index_is_refused_before_it_is_parsed(lab: Lab, tampered: Path) -> None:
    content = (tampered / WEIGHTS).read_bytes()
    (tampered / WEIGHTS).write_bytes(content.replace(b"norm", b"mron", 1))
    assert "not the one that was signed" in lab.refused(tampered).message


def test_huge_claims_allocate_nothing(lab: Lab, sample: Path, tampered: Path) -> None:
    """Sizes up to 2^64 and a limit on the address space: an allocation by the claim would fail loudly."""
    content = (sample / WEIGHTS).read_bytes()
    huge = [(56, b"\xf0\xff\xff\xff"), (60, b"\xff" * 4), (64, b"\xff\xff"), (64 + 2 + 17 + 8, b"\xff" * 4)]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        for at, claim in huge:
            (tampered / WEIGHTS).write_bytes(content[:at] + claim + content[at + len(claim) :])
            assert lab.refused(tampered).reason == "INTEGRITY_FAILURE"
            edited = content[:at] + claim + content[at + len(claim) :]
            with pytest.raises(SealmeshError):
                FileIndex.decode(edited[: 64 + index_of(lab, sample).preamble.index_bytes], "edited")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@given(
    data=st.binary(max_size=600),
    head=st.sampled_from([b"", b"SMSHMANI\x01\0\x01\0\x01\0\0\0\x20\0" + bytes(32)]),
)
@settings(deadline=None)
def test_the_manifest_parser_only_ever_refuses(data: bytes, head: bytes) -> None:
    with pytest.raises(SealmeshError) as caught:
        Manifest.decode(head + data, "manifest", None)
    assert caught.value.reason == "INTEGRITY_FAILURE"


@given(
    body=st.binary(max_size=3000),
    edit=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
)
@settings(deadline=None)
def test_the_index_parser_refuses_or_describes_exactly_what_it_read(
    body: bytes, edit: list[tuple[int, int]]
) -> None:
    good = build_index(
        [Entry(EntryKind.TENSOR, "t", "U8", (4, 4), 16), Entry(EntryKind.TENSOR, "u", "F64", (), 8)]
    )
    for candidate in (
        good.encoded[:64] + body.ljust(len(good.encoded) - 64, b"\0"),
        _edited(good.encoded, edit),
    ):
        try:
            index = FileIndex.decode(candidate, "index")
        except SealmeshError:
            continue
        assert index.digest == sm3(candidate)
        rebuilt = FileIndex.build(
            kind=index.preamble.kind,
            model_id=index.preamble.model_id,
            file_id=index.preamble.file_id,
            file_number=index.preamble.file_number,
            chunk_bytes=index.preamble.chunk_bytes,
            path=index.path,
            model_version=index.model_version,
            entries=index.entries,
        )
        assert rebuilt.encoded == candidate


def _edited(data: bytes, edit: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for position, value in edit:
        changed[position % len(changed)] = value
    return bytes(changed)


def test_a_slot_file_of_another_model_is_noticed_without_a_key(lab: Lab, tampered: Path) -> None:
    other = lab.seal(lab.plain(SAMPLE_FILES), name="other")
    shutil.copyfile(other / SLOTS, tampered / SLOTS)
    report = verify_folder(tampered, pinned=[lab.verifying_key])
    assert report.problems == (f"{tampered / SLOTS} belongs to another sealed model",)
