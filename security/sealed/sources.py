"""Which files of a plain model folder are sealed, and which stay behind and why."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealmesh.security.errors import invalid_request, not_found
from sealmesh.security.files import check_relative_path
from sealmesh.security.sealed.format import MANIFEST_NAME, SEALED_SUFFIX, FileKind
from sealmesh.telemetry.runtime.errors import SealmeshError

_WEIGHTS: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_BLOBS: Final = frozenset(
    {".json", ".jsonl", ".txt", ".jinja", ".model", ".tiktoken", ".md", ".yaml", ".yml"}
)
_LEGAL: Final = frozenset({"LICENSE", "LICENCE", "NOTICE", "COPYING"})
_OTHER_WEIGHTS: Final = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}
)


@dataclass(frozen=True)
class SourceFile:
    """A file to seal."""

    path: str  # relative, POSIX
    kind: FileKind
    size_bytes: int


@dataclass(frozen=True)
class SkippedFile:
    """A file that stays behind."""

    path: str
    reason: str


def survey(folder: Path, *, allow_code: bool = False) -> tuple[list[SourceFile], list[SkippedFile]]:
    """The files of a plain model folder in order of path.

    Links to files are followed (the Hugging Face cache is made of them), links to folders are not.
    Raises NOT_FOUND for a missing folder, INVALID_REQUEST when there is nothing to seal: no safetensors
    file, a shard that the index names and that is missing, or a folder that is sealed already.
    """
    if not folder.is_dir():
        raise not_found(f"{folder} is not a folder")
    if (folder / MANIFEST_NAME).exists():
        raise invalid_request(f"{folder} is sealed already")
    files: list[SourceFile] = []
    skipped: list[SkippedFile] = []
    for base, folders, names in os.walk(folder):
        relative = Path(base).relative_to(folder)
        for name in sorted(folders):
            if name.startswith(".") or name == "__pycache__" or (Path(base) / name).is_symlink():
                folders.remove(name)
                skipped.append(
                    SkippedFile((relative / name).as_posix() + "/", "hidden, cache or linked folder")
                )
        folders.sort()
        for name in sorted(names):
            path = (relative / name).as_posix()
            kind, reason = _classify(name, allow_code)
            if kind is None:
                skipped.append(SkippedFile(path, reason))
                continue
            try:
                check_relative_path(path)
                size = (folder / path).stat().st_size
            except SealmeshError as exc:
                raise invalid_request(f"{folder / path} has a name that cannot be sealed") from exc
            except OSError as exc:
                raise invalid_request(f"cannot read {folder / path}: {exc.strerror}") from exc
            files.append(SourceFile(path, kind, size))
    files.sort(key=lambda file: file.path)
    if not any(file.kind is FileKind.TENSORS for file in files):
        others = sorted({Path(s.path).suffix for s in skipped if Path(s.path).suffix in _OTHER_WEIGHTS})
        hint = f"; convert its {', '.join(others)} weights first" if others else ""
        raise invalid_request(f"{folder} has no weights: no {_WEIGHTS} file{hint}")
    for file in files:
        if file.path.endswith(_INDEX):
            _check_shards(folder, file.path, {other.path for other in files})
    return files, skipped


def _classify(name: str, allow_code: bool) -> tuple[FileKind | None, str]:
    suffix = Path(name).suffix
    if name.startswith("."):
        return None, "hidden"
    if suffix == _WEIGHTS:
        return FileKind.TENSORS, ""
    if suffix in _BLOBS or name in _LEGAL:
        return FileKind.BLOB, ""
    if suffix == ".py":
        return (FileKind.BLOB, "") if allow_code else (None, "code; sealed only with --allow-code")
    if suffix in _OTHER_WEIGHTS:
        return None, "weights in another format than safetensors"
    if suffix == SEALED_SUFFIX:
        return None, "sealed already"
    return None, "of no use to a model server"


def _check_shards(folder: Path, index: str, present: set[str]) -> None:
    try:
        weight_map = json.loads((folder / index).read_bytes())["weight_map"]
        shards = {str(shard) for shard in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise invalid_request(f"{folder / index} is not a safetensors index: {exc}") from exc
    missing = sorted(s for s in shards if (Path(index).parent / s).as_posix() not in present)
    if missing:
        raise invalid_request(f"{folder} lacks {missing[0]}, which {index} names ({len(missing)} missing)")
