"""What is sealed comes out again, byte for byte; what cannot be sealed leaves nothing behind."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sealmesh.security.memory import RawMemory
from sealmesh.security.sealed.describe import describe
from sealmesh.security.sealed.format import DTYPE_BITS
from sealmesh.security.sealed.reader import TensorInfo, open_sealed
from sealmesh.security.sealed.unseal import unseal_folder
from sealmesh.security.sealed.verify import verify_folder
from sealmesh.security.sealed.writer import seal_folder
from sealmesh.telemetry.runtime.errors import SealmeshError

from tests.unit.security.conftest import CHUNK_BYTES, SAMPLE_FILES, SAMPLE_TENSORS, Lab


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[str, list[int], bytes]]:
    made: dict[str, tuple[str, list[int], bytes]] = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=12), max_size=6, unique=True)):
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 24), max_size=3))
        if math.prod(shape) * DTYPE_BITS[dtype] % 8:
            shape.append(8)
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        made[name] = (dtype, shape, random.Random(size).randbytes(size))
    return made


@given(made=tensors(), blob=st.binary(max_size=3 * CHUNK_BYTES), threads=st.integers(1, 3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_model_round_trips(
    lab: Lab, made: dict[str, tuple[str, list[int], bytes]], blob: bytes, threads: int
) -> None:
    file = Lab.safetensors(made, {"format": "pt"})
    plain = lab.plain({"a.safetensors": file, "notes.txt": blob})
    sealed = lab.seal(plain, threads=threads)
    with lab.open(sealed) as model:
        infos = {info.name: (info.dtype, list(info.shape), info.size_bytes) for info in model.tensors()}
        out = lab.folder("out")
        unseal_folder(model, out, threads=threads)
    assert infos == {name: (dtype, shape, len(data)) for name, (dtype, shape, data) in made.items()}
    assert lab.load(sealed) == ({name: data for name, (_, _, data) in made.items()}, {"notes.txt": blob})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        "a.safetensors": file,
        "notes.txt": blob,
    }


@pytest.mark.parametrize(
    "size", [0, 1, 15, 16, 17, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES]
)
def test_sizes_around_the_chunk_round_trip(lab: Lab, size: int) -> None:
    data = random.Random(size).randbytes(size)
    sealed = lab.seal(lab.plain({"m.safetensors": Lab.safetensors({"t": ("U8", [size], data)})}))
    assert lab.load(sealed)[0] == {"t": data}
    assert verify_folder(sealed, pinned=[lab.verifying_key], source=lab.root).ok


def test_chunks_never_cross_tensors(lab: Lab, sample: Path) -> None:
    with lab.open(sample) as model:
        for file in model.files():
            index = file.index
            numbers = []
            for entry, (size, start) in enumerate(
                zip((e.size_bytes for e in index.entries), index.offsets_bytes, strict=True)
            ):
                chunks = list(index.chunks_of(entry))
                assert sum(chunk.size_bytes for chunk in chunks) == size
                assert all(start <= c.offset_bytes < start + size for c in chunks)
                assert [c.last for c in chunks] == [False] * (len(chunks) - 1) + [True] * bool(chunks)
                numbers += [c.number for c in chunks]
            assert numbers == list(range(index.chunk_count))
            assert index.data_offset_bytes % 4096 == 0


def test_a_sharded_model_keeps_its_index_and_shards(lab: Lab) -> None:
    shards = {
        f"model-0000{n}-of-00002.safetensors": Lab.safetensors({f"t{n}": ("U8", [5], b"abcd%d" % n)})
        for n in (1, 2)
    }
    weight_map = {"t1": "model-00001-of-00002.safetensors", "t2": "model-00002-of-00002.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    sealed = lab.seal(lab.plain({**shards, "model.safetensors.index.json": index}))
    found, blobs = lab.load(sealed)
    assert found == {"t1": b"abcd1", "t2": b"abcd2"}
    assert blobs == {"model.safetensors.index.json": index}
    with lab.open(sealed) as model:
        assert {info.name: info.file for info in model.tensors()} == weight_map


def test_the_same_model_sealed_twice_shares_no_ciphertext(lab: Lab) -> None:
    plain = lab.plain({"m.safetensors": Lab.safetensors({"t": ("U8", [CHUNK_BYTES], b"z" * CHUNK_BYTES)})})
    first, second = ((lab.seal(plain) / "m.safetensors.sealed").read_bytes() for _ in range(2))
    blocks = [first[at : at + 16] for at in range(4096, len(first), 16)]
    assert not any(block in second for block in blocks)
    assert len(set(blocks)) == len(blocks)


def test_nothing_of_the_plaintext_is_in_the_sealed_folder(sample: Path) -> None:
    for path in sample.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for known in (
                b"norm" * 4,
                b"p" * 32,
                bytes(range(256)),
                b'{"model_type"',
                b"{{ messages",
                b"token7",
            ):
                assert known not in content, path


def test_raw_memory_and_views_are_filled_in_place(lab: Lab, sample: Path) -> None:
    expected = SAMPLE_TENSORS["embed"][2]
    memory = (ctypes.c_ubyte * (len(expected) + 2))()
    with lab.open(sample) as model:
        model.read_tensor_into("embed", RawMemory(ctypes.addressof(memory) + 1, len(expected)))
        assert bytes(memory) == b"\0" + expected + b"\0"
        view = memoryview(bytearray(len(expected))).cast("H")
        model.read_tensor_into("embed", view)
        assert view.tobytes() == expected
        model.read_tensor_into("empty", bytearray())
        with pytest.raises(SealmeshError, match=f"'embed' has {len(expected)} bytes"):
            model.read_tensor_into("embed", bytearray(len(expected) - 1))
        with pytest.raises(SealmeshError, match="no tensor 'nope'"):
            model.read_tensor_into("nope", bytearray())
        with pytest.raises(SealmeshError, match="no sealed file"):
            model.read_file("model.safetensors")


def test_streaming_keeps_order_names_and_the_lookahead(lab: Lab, sample: Path) -> None:
    held: set[str] = set()
    sizes = {name: len(data) for name, (_, _, data) in SAMPLE_TENSORS.items()}
    high = 0
    reports: list[tuple[int, int]] = []

    def allocate(info: TensorInfo) -> tuple[bytearray, bytearray]:
        nonlocal high
        held.add(info.name)
        high = max(high, sum(sizes[name] for name in held))
        made = bytearray(info.size_bytes)
        return made, made

    with lab.open(sample) as model:
        names = ["proj", "scalar", "embed", "norm"]
        got = []
        for info, content in model.stream_tensors(
            allocate, names=names, threads=2, lookahead_bytes=10_000, progress=lambda *at: reports.append(at)
        ):
            assert bytes(content) == SAMPLE_TENSORS[info.name][2]
            got.append(info.name)
            held.discard(info.name)
    assert got == names
    # proj and scalar fit the lookahead together; embed alone is larger and waits for its turn.
    assert high <= sizes["embed"] + 10_000
    total = sum(sizes[name] for name in names)
    assert reports[-1] == (total, total)
    assert reports == sorted(reports)


def test_a_consumer_that_stops_early_leaves_no_thread_and_no_plaintext(lab: Lab, sample: Path) -> None:
    made: list[bytearray] = []

    def allocate(info: TensorInfo) -> tuple[bytearray, bytearray]:
        made.append(bytearray(info.size_bytes))
        return made[-1], made[-1]

    with lab.open(sample) as model:
        stream = model.stream_tensors(allocate, threads=2)
        _, first = next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert any(first)
    assert len(made) > 1
    assert not any(any(content) for content in made[1:])


def test_reports_and_descriptions(lab: Lab) -> None:
    plain = lab.plain(
        SAMPLE_FILES | {"modeling.py": b"x", ".git/config": b"x", "old.bin": b"x", "a.png": b"x"}
    )
    reports: list[tuple[int, int]] = []
    target = lab.folder()
    report = lab.seal_into(plain, target, name="tiny", version=7, progress=lambda *at: reports.append(at))
    size = sum(map(len, SAMPLE_FILES.values()))
    assert (report.file_count, report.tensor_count, report.plaintext_bytes) == (4, 5, size)
    assert {skipped.path for skipped in report.skipped} == {"modeling.py", ".git/", "old.bin", "a.png"}
    assert reports[-1] == (size, size)
    assert reports == sorted(reports)
    described = describe(target, pinned=[lab.verifying_key])
    assert (described.name, described.version, described.plaintext_bytes) == ("tiny", 7, size)
    assert described.manifest_digest == report.manifest_digest.hex()
    assert described.parameter_count == sum(math.prod(shape) for _, shape, _ in SAMPLE_TENSORS.values())
    assert [slot.kind for slot in described.slots] == ["key-file"]
    on_disk = sum(p.stat().st_size for p in target.rglob("*.sealed"))
    assert described.sealed_bytes == report.ciphertext_bytes == on_disk


def test_code_is_sealed_only_when_allowed(lab: Lab) -> None:
    plain = lab.plain(SAMPLE_FILES | {"modeling.py": b"print()"})
    assert "modeling.py" not in lab.load(lab.seal(plain))[1]
    assert lab.load(lab.seal(plain, allow_code=True))[1]["modeling.py"] == b"print()"


def test_links_to_files_are_followed_as_in_the_hugging_face_cache(lab: Lab) -> None:
    blobs = lab.plain({"blob": SAMPLE_FILES["model.safetensors"]})
    plain = lab.plain({"config.json": b"{}"})
    (plain / "model.safetensors").symlink_to(blobs / "blob")
    (plain / "loop").symlink_to(plain)
    assert lab.load(lab.seal(plain))[0].keys() == SAMPLE_TENSORS.keys()


# --- what cannot be sealed -----------------------------------------------------------------------------


def refused_source(lab: Lab, files: dict[str, bytes], match: str) -> None:
    plain = lab.plain(files)
    target = lab.folder("never")
    with pytest.raises(SealmeshError, match=match):
        lab.seal_into(plain, target)
    assert not [path for path in lab.base.iterdir() if target.name in path.name]


def test_a_folder_without_weights_is_refused(lab: Lab) -> None:
    refused_source(lab, {"config.json": b"{}"}, "no weights")
    refused_source(lab, {"config.json": b"{}", "pytorch_model.bin": b"x"}, r"convert its \.bin weights")
    with pytest.raises(SealmeshError, match="is not a folder"):
        lab.seal_into(lab.base / "missing", lab.folder())


def header(text: str, data: bytes = b"") -> dict[str, bytes]:
    encoded = text.encode()
    return {"m.safetensors": len(encoded).to_bytes(8, "little") + encoded + data}


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"m.safetensors": b""}, "not a safetensors file"),
        ({"m.safetensors": b"\xff" * 100}, "not a safetensors file, or it is cut"),
        (header("[]"), "not an object"),
        (header("{"), "not valid JSON"),
        (header("[" * 100_000), "not valid JSON"),
        (header('{"a": 1, "a": 2}'), "twice"),
        (header('{"a": 1}'), "malformed"),
        (header('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', b"x"), "is it cut"),
        (header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"xx"), "is it cut"),
        (header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', b"xx"), "gap"),
        (header('{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}', b"x"), "malformed"),
        (header('{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}', b"x"), "malformed"),
        (header('{"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}', b"x"), "malformed"),
        (header('{"a": {"dtype": "U9", "shape": [1], "data_offsets": [0, 1]}}', b"x"), "not known"),
        (header('{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}', b"x"), "not known"),
    ],
)
def test_malformed_safetensors_are_refused(lab: Lab, files: dict[str, bytes], match: str) -> None:
    refused_source(lab, files, match)


def test_a_missing_shard_is_refused(lab: Lab) -> None:
    index = json.dumps({"weight_map": {"t": "model-2.safetensors"}}).encode()
    files = {"model.safetensors": SAMPLE_FILES["model.safetensors"], "m.safetensors.index.json": index}
    refused_source(lab, files, r"lacks model-2\.safetensors")
    refused_source(lab, files | {"m.safetensors.index.json": b"[]"}, "not a safetensors index")


@pytest.mark.parametrize(
    ("name", "version"), [("", 1), ("a/b", 1), (".x", 1), ("x" * 200, 1), ("ok", 0), ("ok", 1 << 63)]
)
def test_impossible_names_and_versions_are_refused(lab: Lab, name: str, version: int) -> None:
    with pytest.raises(SealmeshError, match=r"model name|version"):
        lab.seal_into(lab.plain(SAMPLE_FILES), lab.folder(), name=name, version=version)


def test_no_slot_and_folders_within_each_other_are_refused(lab: Lab) -> None:
    plain = lab.plain(SAMPLE_FILES)
    with pytest.raises(SealmeshError, match="at least one key slot"):
        lab.seal_into(plain, lab.folder(), slots=[])
    for target in (plain, plain / "sealed", plain.parent):
        with pytest.raises(SealmeshError, match="contain each other"):
            lab.seal_into(plain, target)


def test_a_sealed_folder_is_not_sealed_again(lab: Lab, sample: Path) -> None:
    with pytest.raises(SealmeshError, match="sealed already"):
        lab.seal_into(sample, lab.folder())


def test_an_existing_target_is_kept_unless_overwriting_is_allowed(lab: Lab) -> None:
    plain = lab.plain(SAMPLE_FILES)
    target = lab.folder()
    target.mkdir()
    (target / "precious").write_text("data")
    with pytest.raises(SealmeshError, match="not empty"):
        lab.seal_into(plain, target)
    assert (target / "precious").read_text() == "data"
    lab.seal_into(plain, target, overwrite=True)
    assert not (target / "precious").exists()
    assert lab.load(target)[0].keys() == SAMPLE_TENSORS.keys()
    file = lab.folder()
    file.write_text("x")
    with pytest.raises(SealmeshError, match="is a file"):
        lab.seal_into(plain, file, overwrite=True)


class _InterruptedError(Exception):
    pass


def test_nothing_is_left_after_a_failure_in_the_middle(lab: Lab) -> None:
    plain = lab.plain(SAMPLE_FILES)
    target = lab.folder("broken")

    def interrupt(done: int, _total: int) -> None:
        if done > 10_000:
            raise _InterruptedError

    with pytest.raises(_InterruptedError):
        lab.seal_into(plain, target, progress=interrupt)
    assert not [path for path in lab.base.iterdir() if "broken" in path.name]


def test_what_a_killed_process_left_is_removed_next_time(lab: Lab) -> None:
    plain = lab.plain(SAMPLE_FILES)
    target = lab.folder("killed")
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    stale = target.with_name(f".{target.name}.staging-{dead}-0123abcd")
    alive = target.with_name(f".{target.name}.staging-{os.getpid()}-0123abcd")
    stale.mkdir()
    alive.mkdir()
    lab.seal_into(plain, target)
    assert not stale.exists()
    assert alive.exists()


def test_unsealing_is_private_complete_and_refuses_to_overwrite(lab: Lab, sample: Path) -> None:
    target = lab.folder("clear")
    with lab.open(sample) as model:
        report = unseal_folder(model, target)
        with pytest.raises(SealmeshError, match="not empty"):
            unseal_folder(model, target)
    assert report.file_count == len(SAMPLE_FILES)
    assert target.stat().st_mode & 0o777 == 0o700
    for path, content in SAMPLE_FILES.items():
        assert (target / path).read_bytes() == content
        assert (target / path).stat().st_mode & 0o777 == 0o600


def test_opening_needs_the_right_kind_of_folder_and_key(lab: Lab, sample: Path) -> None:
    with pytest.raises(SealmeshError, match="cannot open folder"):
        open_sealed(lab.base / "missing", pinned=[lab.verifying_key])
    with pytest.raises(SealmeshError, match="not a sealed model") as caught:
        open_sealed(lab.plain({"a": b""}), pinned=[lab.verifying_key])
    assert caught.value.reason == "NOT_FOUND"
    with open_sealed(sample, pinned=[lab.verifying_key]) as model:
        with pytest.raises(RuntimeError, match="not unlocked"):
            model.read_tensor_into("norm", bytearray(64))
        with pytest.raises(SealmeshError, match="no passphrase slot") as caught:
            model.unlock(Lab.passphrase("wrong"))
        assert caught.value.reason == "KEY_SLOT_MISMATCH"
        with pytest.raises(SealmeshError, match="not the one of the manifest"):
            model.unlock_with(bytes(32))


def test_every_engine_reads_what_every_other_wrote(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lab.plain(SAMPLE_FILES)
    sealed = {}
    for engine in ("libgcrypt", "cryptography"):
        monkeypatch.setenv("SEALMESH_SM4_ENGINE", engine)
        sealed[engine] = lab.seal(plain)
    for engine in sealed:
        monkeypatch.setenv("SEALMESH_SM4_ENGINE", engine)
        for folder in sealed.values():
            assert lab.load(folder)[0]["embed"] == SAMPLE_TENSORS["embed"][2]


def test_defaults_seal_in_chunks_of_one_mebibyte(lab: Lab) -> None:
    target = lab.folder()
    seal_folder(lab.plain(SAMPLE_FILES), target, slots=[lab.root], signer=lab.signer, name="m", version=1)
    assert {file.chunk_bytes for file in describe(target).files} == {1 << 20}
