"""A small workshop for sealed models: keys, plain folders of every shape, and what a reader makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from sealmesh.security.keys.signing import Ed25519Signer, VerifyingKey, create_signing_key, load_signer
from sealmesh.security.keys.sources import KeyFileSource, PassphraseSource, create_root_key
from sealmesh.security.sealed.reader import SealedModel, open_sealed
from sealmesh.security.sealed.writer import SealReport, seal_folder
from sealmesh.telemetry.runtime.errors import SealmeshError

CHUNK_BYTES = 4096

# name to (dtype, shape, data)
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]


class Lab:
    """Keys and folders of one test session."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root_key_file = base / "keys" / "root.key"
        self.signing_key_file = base / "keys" / "signing.key"
        self.verifying_key_file = base / "keys" / "signing.pub"
        create_root_key(self.root_key_file)
        self.verifying_key: VerifyingKey = create_signing_key(self.signing_key_file, self.verifying_key_file)
        self.signer: Ed25519Signer = load_signer(self.signing_key_file)
        self.root = KeyFileSource.from_file(self.root_key_file)
        self._count = 0

    def folder(self, name: str = "folder") -> Path:
        """A path that does not exist yet."""
        self._count += 1
        return self.base / f"{name}-{self._count}"

    @staticmethod
    def passphrase(text: str) -> PassphraseSource:
        """A passphrase with a cost that suits tests."""
        return PassphraseSource(text, log2_n=4)

    @staticmethod
    def safetensors(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
        """A safetensors file."""
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        data = b""
        for name, (dtype, shape, content) in tensors.items():
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [len(data), len(data) + len(content)],
            }
            data += content
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        return len(encoded).to_bytes(8, "little") + encoded + data

    def plain(self, files: Mapping[str, bytes]) -> Path:
        """A plain folder."""
        folder = self.folder("plain")
        for path, content in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return folder

    def seal(self, plain: Path, *, name: str = "model", version: int = 1, **options: object) -> Path:
        """A sealed folder under the root key, in small chunks."""
        target = self.folder("sealed")
        self.seal_into(plain, target, name=name, version=version, **options)
        return target

    def seal_into(
        self, plain: Path, target: Path, *, name: str = "model", version: int = 1, **options: object
    ) -> SealReport:
        arguments: dict[str, object] = {
            "slots": [self.root],
            "signer": self.signer,
            "chunk_bytes": CHUNK_BYTES,
            "threads": 2,
        }
        return seal_folder(plain, target, name=name, version=version, **(arguments | options))  # type: ignore[arg-type]

    def open(self, sealed: Path) -> SealedModel:
        """An unlocked model."""
        model = open_sealed(sealed, pinned=[self.verifying_key])
        try:
            model.unlock(self.root)
        except BaseException:
            model.close()
            raise
        return model

    def load(self, sealed: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """All tensors and all small files of a sealed folder."""
        with self.open(sealed) as model:
            tensors: dict[str, bytes] = {}
            streamed = model.stream_tensors(
                lambda info: (made := bytearray(info.size_bytes), made), threads=2
            )
            for info, content in streamed:
                tensors[info.name] = bytes(content)
            blobs = {
                file.listed.path: bytes(model.read_file(file.listed.path))
                for file in model.files()
                if not file.listed.path.endswith(".safetensors")
            }
        return tensors, blobs

    def refused(self, sealed: Path) -> SealmeshError:
        """The error with which loading everything is refused; fails the test when it is not."""
        with pytest.raises(SealmeshError) as caught:
            self.load(sealed)
        return caught.value

    def copy(self, sealed: Path) -> Path:
        """A copy to tamper with."""
        target = self.folder("copy")
        shutil.copytree(sealed, target)
        return target


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


SAMPLE_TENSORS: Tensors = {
    "embed": ("BF16", [101, 64], bytes(range(256)) * 50 + b"x" * 128),
    "norm": ("F32", [16], b"norm" * 16),
    "empty": ("F16", [0, 8], b""),
    "scalar": ("I64", [], b"\x01" * 8),
    "proj": ("U8", [CHUNK_BYTES * 2], b"p" * CHUNK_BYTES * 2),
}
SAMPLE_FILES = {
    "model.safetensors": Lab.safetensors(SAMPLE_TENSORS, {"format": "pt"}),
    "config.json": b'{"model_type": "tiny"}',
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer/vocab.txt": b"".join(b"token%d\n" % i for i in range(2000)),
}


@pytest.fixture(scope="session")
def sample(lab: Lab) -> Path:
    """A sealed model with several tensors, chunks and files; never changed: `lab.copy` it."""
    return lab.seal(lab.plain(SAMPLE_FILES))


@pytest.fixture
def tampered(lab: Lab, sample: Path) -> Iterator[Path]:
    """A copy of the sample for one test."""
    copy = lab.copy(sample)
    yield copy
    shutil.rmtree(copy)
