"""The sealed models below the vault's folder, found anew at every call: sealing one needs no restart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from sealmesh.security.errors import configuration_invalid, integrity_failure
from sealmesh.security.files import Folder
from sealmesh.security.keys.signing import VerifyingKey
from sealmesh.security.sealed.format import MANIFEST_MAGIC, MANIFEST_NAME
from sealmesh.security.sealed.keyring import read_manifest_bytes
from sealmesh.security.sealed.manifest import Manifest
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.errors import SealmeshError

# Names that an error lists; more would no longer be one line.
_MAX_NAMES: Final = 10


@dataclass(frozen=True)
class CatalogEntry:
    """A sealed folder whose manifest verified."""

    path: Path
    manifest: Manifest

    def check_files(self) -> None:
        """Checks that every file is there with its signed size; raises INTEGRITY_FAILURE naming it.

        The worker checks indexes and tags; reading all ciphertext here would only delay it.
        """
        with Folder(self.path) as folder:
            for file in self.manifest.files:
                fd = folder.open_file(file.sealed_path)
                try:
                    size = os.fstat(fd).st_size
                finally:
                    os.close(fd)
                if size != file.size_bytes:
                    raise integrity_failure(
                        f"file has {size} bytes where the manifest says {file.size_bytes}",
                        file=self.path / file.sealed_path,
                    )


class ModelCatalog:
    """Reads manifests below a folder. Blocking; to be called from one thread at a time.

    Args:
        models_dir: its direct subfolders with a manifest are the models.
        pinned: keys that must have signed them.
        log: gets one warning for each sealed folder that is left out; other folders show at debug level only.
    """

    def __init__(self, models_dir: Path, pinned: list[VerifyingKey], log: StructuredLogger) -> None:
        self._models_dir = models_dir
        self._pinned = pinned
        self._log = log
        self._known: dict[Path, tuple[tuple[int, int, int], CatalogEntry | SealmeshError]] = {}
        self._warned: set[Path] = set()

    def scan(self) -> dict[str, CatalogEntry]:
        """The models by name; of several sealings of one name, the highest version.

        Raises CONFIGURATION_INVALID when the folder cannot be read.
        """
        models: dict[str, CatalogEntry] = {}
        for entry in self._read_all().values():
            if isinstance(entry, SealmeshError):
                continue
            name = entry.manifest.name
            if name not in models or entry.manifest.version > models[name].manifest.version:
                models[name] = entry
        return dict(sorted(models.items()))

    def find(self, name: str) -> CatalogEntry:
        """The model of a name.

        Raises MODEL_NOT_FOUND, or the reason why the folder of that name does not verify.
        """
        models = self.scan()
        entry = models.get(name)
        if entry is not None:
            return entry
        broken = self._known.get(self._models_dir / name)
        if broken is not None and isinstance(broken[1], SealmeshError):
            raise broken[1]
        raise SealmeshError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"no sealed model {name!r} below {self._models_dir}; {self._instead(name, models)}",
        )

    def _instead(self, name: str, models: dict[str, CatalogEntry]) -> str:
        """What is there: a model keeps the name under which it was sealed, whatever its folder is called."""
        if not models:
            return "seal one with: sealmesh seal"
        known = self._known.get(self._models_dir / name)
        if known is not None and isinstance(known[1], CatalogEntry):
            sealed_as = known[1].manifest.name
            return f"the folder {name} holds a model that was sealed as {sealed_as!r}: use that name"
        names = ", ".join(list(models)[:_MAX_NAMES]) + (", …" if len(models) > _MAX_NAMES else "")
        return f"there are: {names}"

    def _read_all(self) -> dict[Path, CatalogEntry | SealmeshError]:
        try:
            folders = sorted(path for path in self._models_dir.iterdir() if not path.name.startswith("."))
        except OSError as exc:
            raise configuration_invalid(f"cannot read models_dir {self._models_dir}: {exc.strerror}") from exc
        found: dict[Path, tuple[tuple[int, int, int], CatalogEntry | SealmeshError]] = {}
        for path in folders:
            try:
                status = (path / MANIFEST_NAME).stat()
            except OSError:
                # A folder without a manifest is no model.
                continue
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._known.get(path)
            found[path] = known if known is not None and known[0] == stamp else (stamp, self._read(path))
        self._known = found
        return {path: entry for path, (_, entry) in found.items()}

    def _read(self, path: Path) -> CatalogEntry | SealmeshError:
        encoded = b""
        try:
            with Folder(path) as folder:
                encoded = read_manifest_bytes(folder)
            manifest = Manifest.decode(encoded, str(path / MANIFEST_NAME), self._pinned)
        except SealmeshError as exc:
            if encoded.startswith(MANIFEST_MAGIC) and path not in self._warned:
                self._warned.add(path)
                self._log.warning("a model is left out", folder=str(path), cause=exc.message)
            else:
                self._log.debug("a folder is left out", folder=str(path), cause=exc.message)
            return exc
        # Good now: should it break again, that is news.
        self._warned.discard(path)
        self._log.info("model found", model=manifest.name, version=manifest.version, folder=str(path))
        return CatalogEntry(path, manifest)
