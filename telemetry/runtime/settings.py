"""Settings of a service: defaults < TOML section < environment < flags, checked before anything starts.

One model per service describes every field once: type, default, unit and meaning. From it come the
flags, the environment variables, `--help` and `sealmesh config show`. A key that nobody reads is an
error, because a misspelt security setting that is silently ignored is worse than a service that does not
start.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, Self, TypeVar

import grpc
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from sealmesh.telemetry.logging import LogFormat, LogLevel
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = [
    "EXIT_USAGE",
    "SECTIONS",
    "Origin",
    "Resolved",
    "ServiceSettings",
    "effective",
    "load_settings",
    "resolve_settings",
]

SECTIONS: Final = ("mesh", "gateway", "worker", "vault", "kvstore")
EXIT_USAGE: Final = 2

Origin = Literal["default", "file", "environment", "flag"]
JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]

_Settings = TypeVar("_Settings", bound=BaseModel)
_MASK: Final = "********"
_URL_PASSWORD: Final = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]*@")


class ServiceSettings(BaseModel):
    """What every service can be told. Services subclass it and add their own fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grpc_address: str = Field(default="127.0.0.1:0", description="host:port of the gRPC server")
    http_address: str = Field(
        default="127.0.0.1:0", description="host:port of /healthz, /readyz and /metrics; empty: none"
    )
    tls_ca: Path | None = Field(
        default=None, description="PEM file of the authority that peers are checked against"
    )
    tls_certificate: Path | None = Field(default=None, description="PEM file of this service's certificate")
    tls_key: Path | None = Field(default=None, description="PEM file of this service's private key")
    log_level: LogLevel = Field(default="info", description="least severe level that is logged")
    log_format: LogFormat = Field(default="text", description="text for people, json for machines")
    otlp_endpoint: str = Field(
        default="",
        pattern=r"^$|^https?://",
        description="http(s)://host:port of an OTLP gRPC collector; empty: none",
    )
    trace_dir: Path | None = Field(default=None, description="folder for local traces (bounded JSON lines)")
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of new traces that are recorded"
    )
    drain_grace_ms: int = Field(
        default=10_000, ge=0, le=600_000, description="how long running calls may take to finish at shutdown"
    )
    max_message_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=64 * 1024,
        le=1024 * 1024 * 1024,
        description="largest gRPC message, each way",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        missing = [
            name for name in ("tls_ca", "tls_certificate", "tls_key") if getattr(self, name, None) is None
        ]
        if len(missing) in (1, 2):
            raise ValueError(f"{' and '.join(missing)} must be set too: mTLS needs all three files")
        return self


@dataclass(frozen=True)
class Resolved(typing.Generic[_Settings]):
    """Settings and where each value came from."""

    settings: _Settings
    origins: Mapping[str, Origin]


def load_settings(cls: type[_Settings], section: str, argv: Sequence[str] | None = None) -> _Settings:
    """The settings of this process, from `--config FILE`, the environment and flags.

    Prints help and exits 0 for `--help`; prints one line that names the key and what to do and exits 2
    when anything is wrong. For use in `__main__` only.

    Args:
        cls: the settings model.
        section: TOML section and middle of the environment variables, one of SECTIONS.
        argv: flags; default: those of the process.
    """
    parser = _parser(cls, section)
    try:
        flags, config = _parse_flags(parser, cls, sys.argv[1:] if argv is None else argv)
        return resolve_settings(cls, section, config=config, environ=os.environ, flags=flags).settings
    except SealmeshError as exc:
        print(f"{parser.prog}: {exc}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


def resolve_settings(
    cls: type[_Settings],
    section: str,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Resolved[_Settings]:
    """The settings from the given sources; reads no other.

    Relative paths in the file count from the file's folder, all others from the working directory.

    Raises:
        SealmeshError: CONFIGURATION_INVALID, one line, for an unreadable file, an unknown key or a value
            that does not fit.
    """
    values: dict[str, object] = {}
    origins: dict[str, Origin] = dict.fromkeys(cls.model_fields, "default")
    sources: tuple[tuple[Origin, Mapping[str, object]], ...] = (
        ("file", _from_file(cls, section, config) if config is not None else {}),
        ("environment", _from_environment(cls, section, environ or {})),
        ("flag", flags or {}),
    )
    for origin, source in sources:
        for name, value in source.items():
            values[name] = value
            origins[name] = origin
    try:
        return Resolved(cls.model_validate(values), origins)
    except ValidationError as exc:
        raise _invalid(_describe(exc, section, origins, config)) from None


def effective(settings: BaseModel) -> dict[str, JsonValue]:
    """All values as plain JSON, for `sealmesh config show`: SecretStr and passwords in URLs are masked."""
    return {name: _plain(getattr(settings, name)) for name in type(settings).model_fields}


def _plain(value: object) -> JsonValue:
    match value:
        case SecretStr():
            return _MASK if value.get_secret_value() else ""
        case BaseModel():
            return dict(effective(value))
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case str():
            return _masked(value)
        case None | bool() | int() | float():
            return value
        case Iterable():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _masked(text: str) -> str:
    return _URL_PASSWORD.sub(rf"\1:{_MASK}@", text)


# --- sources -----------------------------------------------------------------------------------------


def _from_file(cls: type[BaseModel], section: str, path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as exc:
        raise _invalid(f"cannot read {path}: {exc.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise _invalid(f"{path} is not valid TOML: {exc}") from None
    for name, body in document.items():
        if name not in SECTIONS:
            raise _invalid(f"{path}: unknown section [{name}]{_nearest(name, SECTIONS)}")
        if not isinstance(body, dict):
            raise _invalid(f"{path}: {name} must be a section: write [{name}]")
    values: dict[str, object] = document.get(section, {})
    for name, value in values.items():
        field = cls.model_fields.get(name)
        if field is None:
            raise _invalid(f"{path}: unknown setting {name} in [{section}]{_nearest(name, cls.model_fields)}")
        if isinstance(value, str) and _accepts_path(field):
            values[name] = path.parent / value if value else None
    return values


def _from_environment(cls: type[BaseModel], section: str, environ: Mapping[str, str]) -> dict[str, object]:
    prefix = f"SEALMESH_{section.upper()}_"
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        field = cls.model_fields.get(name)
        if field is None or variable != prefix + name.upper():
            known = [prefix + known_name.upper() for known_name in cls.model_fields]
            raise _invalid(f"unknown environment variable {variable}{_nearest(variable, known)}")
        values[name] = _from_text(field, text, variable)
    return values


def _parse_flags(
    parser: argparse.ArgumentParser, cls: type[BaseModel], argv: Sequence[str]
) -> tuple[dict[str, object], Path | None]:
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags = ["--config", *(_flag(name) for name in cls.model_fields)]
        raise _invalid(f"unknown flag {flag}{_nearest(flag, flags)}; --help lists them all")
    given: dict[str, object] = {key: value for key, value in vars(known).items() if value is not None}
    config = given.pop("config", None)
    values: dict[str, object] = {}
    for name, value in given.items():
        field = cls.model_fields[name]
        if isinstance(value, list):
            values[name] = _from_repeated(field, [str(item) for item in value], _flag(name))
        elif isinstance(value, str):
            values[name] = _from_text(field, value, _flag(name))
        else:
            values[name] = value
    return values, Path(str(config)) if config is not None else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _invalid(f"{message}; --help lists all flags")


def _parser(cls: type[BaseModel], section: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"sealmesh {section}",
        description=(cls.__doc__ or "").strip().partition("\n")[0],
        epilog=(
            f"Every setting can also stand in [{section}] of the --config file or in the environment; "
            "flags win over the environment, the environment over the file."
        ),
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the settings")
    for name, field in cls.model_fields.items():
        shape = _shape(field)
        text = f"{field.description or ''}\ndefault: {_default_text(field)}; {_variable(section, name)}"
        text = text.replace("%", "%%")
        if shape == "bool":
            parser.add_argument(
                _flag(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        elif shape in ("list", "dict"):
            metavar = "KEY=VALUE" if shape == "dict" else "VALUE"
            text = text.replace("\n", " (repeatable)\n", 1)
            parser.add_argument(
                _flag(name), dest=name, action="append", default=None, metavar=metavar, help=text
            )
        else:
            parser.add_argument(_flag(name), dest=name, default=None, metavar="VALUE", help=text)
    return parser


# --- text to values ----------------------------------------------------------------------------------


def _from_text(field: FieldInfo, text: str, where: str) -> object:
    """One text (environment or flag) for a field; lists and tables as JSON or separated by commas."""
    shape = _shape(field)
    if shape in ("list", "dict"):
        if text.lstrip().startswith(("[", "{")):
            return _json(text, where)
        return _from_repeated(field, [part.strip() for part in text.split(",") if part.strip()], where)
    if not text and _optional(field):
        return None
    return text


def _from_repeated(field: FieldInfo, texts: list[str], where: str) -> object:
    if len(texts) == 1 and texts[0].lstrip().startswith(("[", "{")):
        return _json(texts[0], where)
    if _shape(field) == "list":
        return [part.strip() for text in texts for part in text.split(",") if part.strip()]
    table: dict[str, object] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise _invalid(f"{where}: {text!r} must have the form key=value")
        table[key.strip()] = _scalar(value)
    return table


def _scalar(text: str) -> object:
    """A value inside a table: JSON where it is JSON (4, true, [1,2]), else the text itself."""
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value


def _json(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as exc:
        raise _invalid(f"{where} is not valid JSON: {exc.msg} at character {exc.pos + 1}") from None
    return value


# --- reading the model -------------------------------------------------------------------------------


def _members(annotation: object) -> tuple[object, ...]:
    """The types that a union allows; any other annotation alone."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return tuple(part for arg in typing.get_args(annotation) for part in _members(arg))
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    return (annotation,)


def _shape(field: FieldInfo) -> Literal["bool", "list", "dict", "scalar"]:
    for member in _members(field.annotation):
        kind = typing.get_origin(member) or member
        if kind is bool:
            return "bool"
        if isinstance(kind, type) and issubclass(kind, (list, tuple, set, frozenset)):
            return "list"
        if isinstance(kind, type) and issubclass(kind, (Mapping, BaseModel)):
            return "dict"
    return "scalar"


def _optional(field: FieldInfo) -> bool:
    return type(None) in _members(field.annotation)


def _accepts_path(field: FieldInfo) -> bool:
    return Path in _members(field.annotation)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(section: str, name: str) -> str:
    return f"SEALMESH_{section.upper()}_{name.upper()}"


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "none, must be set"
    value = _plain(field.get_default(call_default_factory=True, validated_data={}))
    if value is None or value in ("", [], {}):
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


# --- errors ------------------------------------------------------------------------------------------


def _describe(exc: ValidationError, section: str, origins: Mapping[str, Origin], config: Path | None) -> str:
    """The first problem as one line; how many more there are."""
    problems = exc.errors(include_url=False, include_context=False)
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    name = path[0] if path else ""
    message = first["msg"].removeprefix("Value error, ")
    places: dict[Origin, str] = {
        "default": f"set it in [{section}], by {_flag(name)} or {_variable(section, name)}",
        "file": f"in [{section}] of {config}",
        "environment": f"from {_variable(section, name)}",
        "flag": f"from {_flag(name)}",
    }
    subject = ".".join(path) or f"[{section}]"
    place = f" ({places[origins.get(name, 'default')]})" if name else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{subject}: {message}{place}{more}"


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def _invalid(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION_INVALID", message)
