"""The state folder: where a mesh keeps its keys, sealed models, caches, traces and logs.

Layout (every folder 0700, every secret 0600)::

    config.toml            the user's settings (optional; merged over the generated ones)
    run/mesh.toml          effective settings that the services read
    run/mesh.json          process ids and addresses of the running mesh
    tls/                   local certificate authority and one certificate per role
    keys/                  root.key, gateway.secret, api-key, signing key
    access/keys.toml       hashed API keys
    models/<name>/         sealed models
    kv/ vault/             data of the kvstore and of the vault
    traces/ logs/          bounded JSON-lines traces, rotated logs
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "SEALMESH_STATE"
FOLDER_NAME = ".sealmesh"
PRIVATE_FOLDER_MODE = 0o700
PRIVATE_FILE_MODE = 0o600


@dataclass(frozen=True)
class StateFolder:
    """Paths inside one state folder. Creating the object touches no disk; `create` does."""

    root: Path

    @property
    def user_config(self) -> Path:
        return self.root / "config.toml"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def mesh_config(self) -> Path:
        return self.run / "mesh.toml"

    @property
    def mesh_record(self) -> Path:
        return self.run / "mesh.json"

    @property
    def lock_file(self) -> Path:
        return self.run / "mesh.lock"

    @property
    def tls(self) -> Path:
        return self.root / "tls"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def root_key(self) -> Path:
        return self.keys / "root.key"

    @property
    def api_key(self) -> Path:
        return self.keys / "api-key"

    @property
    def gateway_secret(self) -> Path:
        return self.keys / "gateway.secret"

    @property
    def signing_key(self) -> Path:
        return self.keys / "signing.key"

    @property
    def verifying_key(self) -> Path:
        return self.keys / "signing.pub"

    @property
    def access(self) -> Path:
        return self.root / "access"

    @property
    def access_keys(self) -> Path:
        return self.access / "keys.toml"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def kv(self) -> Path:
        return self.root / "kv"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def vault(self) -> Path:
        return self.root / "vault"

    def log_of(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def create(self) -> None:
        """Makes every folder that is missing and closes each to other users.

        Raises OSError when a folder cannot be made.
        """
        folders = (
            self.run,
            self.tls,
            self.keys,
            self.access,
            self.models,
            self.kv,
            self.traces,
            self.logs,
            self.vault,
        )
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(PRIVATE_FOLDER_MODE)
        for folder in folders:
            folder.mkdir(exist_ok=True)
            folder.chmod(PRIVATE_FOLDER_MODE)


def find_state(
    explicit: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
) -> StateFolder:
    """Finds the state folder: the flag, `$SEALMESH_STATE`, the nearest `.sealmesh/` upward from the
    working folder, or `~/.local/state/sealmesh` (XDG base directory specification), in that order.

    The folder need not exist yet.
    """
    environment = os.environ if environment is None else environment
    if explicit is not None:
        return StateFolder(explicit.expanduser().absolute())
    if named := environment.get(ENVIRONMENT_VARIABLE, ""):
        return StateFolder(Path(named).expanduser().absolute())
    start = (working_folder or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        if (folder / FOLDER_NAME).is_dir():
            return StateFolder(folder / FOLDER_NAME)
    base = environment.get("XDG_STATE_HOME", "")
    state_home = Path(base) if base.startswith("/") else Path.home() / ".local/state"
    return StateFolder(state_home / "sealmesh")


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, all or nothing (temporary file, then rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
