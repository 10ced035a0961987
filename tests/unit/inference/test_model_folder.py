import json
from pathlib import Path

import pytest
from sealmesh.inference.model_folder import (
    check_plain_folder,
    own_dtype,
    plain_weights_digest,
    weight_bytes,
)
from sealmesh.telemetry.runtime.errors import SealmeshError


def write_weights(path: Path, tensors: dict[str, tuple[str, int]], fill: bytes = b"\1") -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + fill * end)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    write_weights(tmp_path / "a.safetensors", {"w": ("BF16", 20), "f": ("F32", 40), "i": ("I64", 16)})
    write_weights(tmp_path / "b.safetensors", {"v": ("F16", 10), "q": ("I8", 7)})
    return tmp_path


def test_size_in_the_computations_format(folder: Path) -> None:
    assert weight_bytes(folder, "auto") == 93
    assert weight_bytes(folder, "float32") == 40 + 40 + 16 + 20 + 7
    assert weight_bytes(folder, "bfloat16") == 20 + 20 + 16 + 10 + 7


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, ""),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": 7}, ""),
        ({"dtype": "float16", "quantization_config": {"quant_method": "awq"}}, "auto"),
    ],
)
def test_the_models_own_format(folder: Path, config: dict[str, object], dtype: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert own_dtype(folder) == dtype


def test_a_good_folder_passes(folder: Path) -> None:
    check_plain_folder(folder)


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        ("missing", "does not exist"),
        ("no config", "no config.json"),
        ("bad config", "not valid JSON"),
        ("no architecture", "names no architecture"),
        ("no weights", "no weights"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(folder: Path, breakage: str, words: str) -> None:
    match breakage:
        case "missing":
            folder = folder / "nowhere"
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "no architecture":
            (folder / "config.json").write_text("{}")
        case "no weights":
            for path in folder.glob("*.safetensors"):
                path.unlink()
    with pytest.raises(SealmeshError, match=words) as refused:
        check_plain_folder(folder)
    assert refused.value.reason == "CONFIGURATION_INVALID"


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, (8).to_bytes(8, "little") + b"[1,2,3] ", b"\0" * 8])
def test_a_broken_weight_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "a.safetensors").write_bytes(content)
    with pytest.raises(SealmeshError, match=r"a\.safetensors is not a safetensors file"):
        weight_bytes(folder, "auto")


def test_the_digest_changes_with_any_byte_and_any_name(folder: Path) -> None:
    before = plain_weights_digest(folder)
    assert len(bytes.fromhex(before)) == 32
    (folder / "tokenizer.json").write_text("{}")
    assert plain_weights_digest(folder) == before
    write_weights(folder / "b.safetensors", {"v": ("F16", 10), "q": ("I8", 7)}, fill=b"\2")
    changed = plain_weights_digest(folder)
    assert changed != before
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert plain_weights_digest(folder) != changed
