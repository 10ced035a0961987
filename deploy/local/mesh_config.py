"""The settings of a mesh on one machine: what the user said, completed to what the services read.

`run/mesh.toml` has a section per service. Its values are the defaults of a local mesh, overridden by the
user's `config.toml` and then by `--set section.field=value`.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

import grpc
from pydantic import BaseModel, ConfigDict, Field
from sealmesh.deploy.local.addresses import split_address
from sealmesh.deploy.local.specs import ProbePolicy, RestartPolicy, ServiceSpec
from sealmesh.deploy.local.state import StateFolder
from sealmesh.deploy.local.supervisor import MeshPlan
from sealmesh.deploy.local.toml_text import TomlValue, dump_toml
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.runtime.server import EXIT_REFUSED
from sealmesh.telemetry.runtime.settings import EXIT_USAGE, ServiceSettings, resolve_settings

DEMO_MODEL_NAME: Final = "smollm2-135m-instruct"

_SETTINGS_CLASSES: Final[Mapping[str, str]] = {
    "vault": "sealmesh.security.vault.settings:VaultSettings",
    "kvstore": "sealmesh.kvstore.settings:KVStoreSettings",
    "worker": "sealmesh.inference.settings:WorkerSettings",
    "gateway": "sealmesh.gateway.settings:GatewaySettings",
}
SERVICE_MODULES: Final[Mapping[str, str]] = {
    "vault": "sealmesh.security.vault",
    "kvstore": "sealmesh.kvstore",
    "worker": "sealmesh.inference",
    "gateway": "sealmesh.gateway",
}
DEFAULT_PORTS: Final = (8080, 9090, 9101, 9201, 9102, 9202, 9111, 9211)
"""Every port of a mesh with one worker."""
LOCAL_NAME: Final = "local"
_MAX_WORKERS: Final = 64
_DRAIN_MARGIN_S: Final = 5.0
_DEFAULT_DRAIN_GRACE_MS: Final = 10_000

Table = dict[str, TomlValue]
Sections = dict[str, Table]


class MeshSettings(BaseModel):
    """Section [mesh]: what `sealmesh up` runs. Flags of `sealmesh up` win over all else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path | None = Field(
        default=None, description="model folder, plain or sealed; none: the demo model"
    )
    name: str = Field(default="", pattern=r"^$|^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", description="served name")
    key_file: Path | None = Field(default=None, description="root key of a sealed model from elsewhere")
    passphrase_file: Path | None = Field(
        default=None, description="passphrase of a sealed model from elsewhere"
    )
    verifying_key: Path | None = Field(
        default=None, description="public key that signed a model from elsewhere"
    )
    workers: int = Field(default=1, ge=1, le=_MAX_WORKERS, description="inference workers")
    kvstore: bool = Field(default=True, description="run the KV store")
    port_offset: int = Field(default=0, ge=0, le=50_000, description="added to every default port")
    probe_interval_ms: int = Field(default=1_000, ge=50, le=60_000, description="time between health checks")
    probe_timeout_ms: int = Field(
        default=5_000, ge=50, le=60_000, description="a health check's time to answer"
    )
    probe_failures: int = Field(
        default=3, ge=1, le=100, description="failed checks in a row before a restart"
    )
    startup_timeout_ms: int = Field(
        default=60_000, ge=1_000, le=3_600_000, description="time to become ready"
    )
    worker_startup_timeout_ms: int = Field(
        default=600_000, ge=1_000, le=7_200_000, description="a worker's time to become ready"
    )
    max_quick_failures: int = Field(default=4, ge=1, le=100, description="failures in a row before giving up")


@dataclass(frozen=True)
class ServedModel:
    """The sealed model of a mesh and what opens it."""

    name: str
    models_dir: Path
    """Holds the sealed folder under the model's name."""
    root_key_file: Path | None
    passphrase_file: Path | None
    verifying_key_file: Path


def configuration_error(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)


def load_mesh_settings(state: StateFolder, flags: Mapping[str, object]) -> MeshSettings:
    """Raises SealmeshError for an unknown key or a value that does not fit."""
    config = state.user_config if state.user_config.exists() else None
    return resolve_settings(MeshSettings, "mesh", config=config, environ=os.environ, flags=flags).settings


def settings_class(section: str) -> type[ServiceSettings]:
    """The settings model of a service."""
    module, _, name = _SETTINGS_CLASSES[section].partition(":")
    found: type[ServiceSettings] = getattr(import_module(module), name)
    return found


def local_sections(state: StateFolder, mesh: MeshSettings, model: ServedModel) -> Sections:
    """The sections of a local mesh before anybody overrides them."""

    def address(port: int) -> str:
        return f"127.0.0.1:{port + mesh.port_offset}"

    def tls(role: str, name: str = LOCAL_NAME) -> Table:
        certificate, key = tls_files(state, role, name)
        return {
            "tls_ca": str(state.tls / "ca.pem"),
            "tls_certificate": str(certificate),
            "tls_key": str(key),
        }

    shared: Table = {"trace_dir": str(state.traces)}
    workers = [worker_name(index) for index in range(mesh.workers)]
    allowed: list[TomlValue] = [f"worker/{name}" for name in workers]
    vault: Table = {
        "grpc_address": address(9101),
        "http_address": address(9201),
        **tls("vault"),
        **shared,
        "models_dir": str(model.models_dir),
        "state_dir": str(state.vault),
        "verifying_key_file": str(model.verifying_key_file),
        "allow": {model.name: allowed, "tenant:*": allowed},
    }
    if model.passphrase_file is not None:
        vault["passphrase_file"] = str(model.passphrase_file)
    else:
        vault["root_key_file"] = str(model.root_key_file or state.root_key)
    kvstore: Table = {
        "grpc_address": address(9102),
        "http_address": address(9202),
        **tls("kvstore"),
        **shared,
        "data_dir": str(state.kv),
    }
    worker: Table = {
        "grpc_address": address(9111),
        "http_address": address(9211),
        **tls("worker", workers[0]),
        **shared,
        "name": workers[0],
        "model": model.name,
        "vault_address": vault["grpc_address"],
        "kvstore_address": kvstore["grpc_address"] if mesh.kvstore else "",
        "verifying_key_file": str(model.verifying_key_file),
        # All services share one machine here, so a look-up may wait for a core; computing a prompt again
        # on that machine takes seconds.
        "kv_lookup_deadline_ms": 250,
    }
    gateway: Table = {
        "http_address": address(8080),
        "grpc_address": address(9090),
        **tls("gateway"),
        **shared,
        "workers": [address(9111 + index) for index in range(mesh.workers)],
        "access_keys_file": str(state.access_keys),
        "secret_file": str(state.gateway_secret),
    }
    sections: Sections = {"vault": vault, "kvstore": kvstore, "worker": worker, "gateway": gateway}
    if not mesh.kvstore:
        del sections["kvstore"]
    return sections


# What a service must be told and the mesh always tells it: values that only stand in while the user's
# file is checked alone.
_OF_THE_MESH: Final[Mapping[str, str]] = {
    "model": "model",
    "vault_address": "127.0.0.1:9101",
    "tls_ca": "ca.pem",
    "tls_certificate": "service.pem",
    "tls_key": "service.key",
}


def user_sections(state: StateFolder) -> Sections:
    """The service sections of `config.toml`, with relative paths counted from its folder.

    Raises SealmeshError when the file is not TOML or has an unknown key.
    """
    path = state.user_config
    if not path.exists():
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise configuration_error(f"cannot read {path}: {error}") from error
    sections: Sections = {}
    for section in SERVICE_MODULES:
        if section not in document:
            continue
        cls = settings_class(section)
        # Only for its errors, which name this file and not the generated one.
        absent = cls.model_fields.keys() - document[section].keys()
        missing = {name: value for name, value in _OF_THE_MESH.items() if name in absent}
        resolve_settings(cls, section, config=path, flags=missing)
        sections[section] = {
            name: str(path.parent / value)
            if isinstance(value, str) and value and _is_path(cls, name)
            else value
            for name, value in document[section].items()
        }
    return sections


def parse_override(text: str) -> tuple[list[str], TomlValue]:
    """`worker.max_model_len=4096` as path and value; a value that is not JSON is taken as text.

    Raises SealmeshError when it has no such form.
    """
    left, separator, right = text.partition("=")
    path = [part.strip() for part in left.split(".")]
    if not separator or len(path) < 2 or not all(path):
        raise configuration_error(f"{text!r} is not a setting: write section.field=value")
    if path[0] not in SERVICE_MODULES:
        raise configuration_error(
            f"{text!r}: there is no section {path[0]!r}; sections are {', '.join(SERVICE_MODULES)}"
        )
    try:
        value: object = json.loads(right)
    except json.JSONDecodeError:
        value = right
    if value is None:
        raise configuration_error(f"{text!r}: null is no value in TOML; leave the setting out")
    return path, typing.cast("TomlValue", value)


def override(sections: Sections, overrides: Iterable[tuple[list[str], TomlValue]]) -> None:
    """Applies overrides in place; a path of three or more parts goes into tables."""
    for path, value in overrides:
        table = sections.setdefault(path[0], {})
        for part in path[1:-1]:
            below = table.get(part)
            copy: Table = dict(below) if isinstance(below, Mapping) else {}
            table[part] = copy
            table = copy
        table[path[-1]] = value


def merge(sections: Sections, over: Sections) -> Sections:
    """`over` wins field by field; the table `engine_args` is merged key by key."""
    merged: Sections = {name: dict(table) for name, table in sections.items()}
    for name, table in over.items():
        if name not in merged:
            continue  # [kvstore] with --no-kvstore
        for field, value in table.items():
            old = merged[name].get(field)
            if field == "engine_args" and isinstance(old, Mapping) and isinstance(value, Mapping):
                value = {**old, **value}
            merged[name][field] = value
    return merged


def complete_sections(
    state: StateFolder,
    mesh: MeshSettings,
    model: ServedModel,
    overrides: Iterable[tuple[list[str], TomlValue]] = (),
) -> Sections:
    """The effective sections: local defaults < the user's config.toml < overrides.

    Raises SealmeshError for an unknown key of the user's file.
    """
    sections = merge(local_sections(state, mesh, model), user_sections(state))
    override(sections, overrides)
    return sections


def write_mesh_config(path: Path, mesh: MeshSettings, sections: Sections) -> None:
    """Writes `run/mesh.toml` and lets every service's settings model check its section.

    Raises SealmeshError, one line, for a key or value that a service would refuse.
    """
    own: Table = mesh.model_dump(mode="json", exclude_none=True)
    text = "# Written by `sealmesh up` each time: change config.toml instead.\n"
    text += dump_toml({"mesh": own, **sections})
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    for section in sections:
        resolve_settings(settings_class(section), section, config=path, environ=os.environ)


def read_mesh_config(path: Path) -> tuple[MeshSettings, Sections]:
    """What `write_mesh_config` wrote. Raises SealmeshError when it cannot be read."""
    if not path.exists():
        raise configuration_error(f"{path} is not there yet: run `sealmesh up` once")
    try:
        document = typing.cast("Sections", tomllib.loads(path.read_text(encoding="utf-8")))
        mesh = MeshSettings.model_validate(document.pop("mesh", {}))
    except (OSError, ValueError) as error:
        raise configuration_error(f"cannot read {path}: {error}; run `sealmesh up` again") from error
    return mesh, document


def worker_name(index: int) -> str:
    return f"worker-{index}"


def identities(mesh: MeshSettings) -> list[tuple[str, str]]:
    """Role and name of every certificate that the mesh and its operator need."""
    workers = [("worker", worker_name(index)) for index in range(mesh.workers)]
    return [(role, LOCAL_NAME) for role in ("vault", "kvstore", "gateway", "operator")] + workers


def tls_files(state: StateFolder, role: str, name: str) -> tuple[Path, Path]:
    """Certificate and key of an identity, as security.tls.LocalAuthority names them."""
    return state.tls / f"{role}-{name}.pem", state.tls / f"{role}-{name}.key"


def listen_addresses(mesh: MeshSettings, sections: Sections) -> dict[str, str]:
    """Every address that the mesh will listen on, by purpose."""
    found: dict[str, str] = {}
    for section, table in sections.items():
        count = mesh.workers if section == "worker" else 1
        for index in range(count):
            name = worker_name(index) if section == "worker" else section
            found[f"{name} (gRPC)"] = shifted(str(table["grpc_address"]), index)
            found[f"{name} (HTTP)"] = shifted(str(table["http_address"]), index)
    return found


def shifted(address: str, by: int) -> str:
    """The address whose port is `by` higher."""
    host, port = split_address(address)
    return f"[{host}]:{port + by}" if ":" in host else f"{host}:{port + by}"


def plan_mesh(state: StateFolder, mesh: MeshSettings, sections: Sections) -> MeshPlan:
    """Commands, order, addresses and health checks of every process of the mesh."""
    specs: list[ServiceSpec] = []
    stages = {"vault": 0, "kvstore": 1, "worker": 2, "gateway": 3}
    for section, table in sections.items():
        for index in range(mesh.workers if section == "worker" else 1):
            specs.append(_spec(state, mesh, section, table, index, stages[section]))
    gateway = sections["gateway"]
    return MeshPlan(
        services=tuple(specs),
        model=str(sections["worker"]["model"]),
        gateway_url=f"http://{reachable(str(gateway['http_address']))}",
    )


def _spec(
    state: StateFolder, mesh: MeshSettings, section: str, table: Table, index: int, stage: int
) -> ServiceSpec:
    is_worker = section == "worker"
    name = worker_name(index) if is_worker else section
    address = shifted(str(table["grpc_address"]), index)
    http_address = shifted(str(table["http_address"]), index)
    command = [sys.executable, "-m", SERVICE_MODULES[section], "--config", str(state.mesh_config)]
    if index > 0:
        command += ["--name", name, "--grpc-address", address, "--http-address", http_address]
        certificate, key = tls_files(state, "worker", name)
        command += ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    startup_ms = mesh.worker_startup_timeout_ms if is_worker else mesh.startup_timeout_ms
    drain_ms = table.get("drain_grace_ms", _DEFAULT_DRAIN_GRACE_MS)
    url = f"http://{reachable(http_address)}"
    return ServiceSpec(
        name=name,
        command=tuple(command),
        stage=stage,
        ready_url=f"{url}/readyz",
        live_url=f"{url}/healthz",
        address=http_address if section == "gateway" else address,
        http_address=http_address,
        environment={"PYTHONUNBUFFERED": "1"},
        stop_grace_s=float(str(drain_ms)) / 1000 + _DRAIN_MARGIN_S,
        essential=section != "kvstore",
        probe=ProbePolicy(
            interval_s=mesh.probe_interval_ms / 1000,
            timeout_s=mesh.probe_timeout_ms / 1000,
            failures=mesh.probe_failures,
            startup_timeout_s=startup_ms / 1000,
        ),
        restart=RestartPolicy(
            max_quick_failures=mesh.max_quick_failures,
            max_first_failures=min(2, mesh.max_quick_failures),
            final_exit_codes=frozenset({EXIT_USAGE, EXIT_REFUSED}),
        ),
    )


def reachable(address: str) -> str:
    """The address to connect to for one that is listened on: loopback for the wildcard."""
    host, port = split_address(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_path(cls: type[BaseModel], name: str) -> bool:
    field = cls.model_fields.get(name)
    return field is not None and (field.annotation is Path or Path in typing.get_args(field.annotation))
