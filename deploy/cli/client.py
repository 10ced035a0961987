"""The gateway as the commands see it: its address, an API key, and its errors as exit codes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from sealmesh.deploy.cli.exits import CommandError, Exit

if TYPE_CHECKING:
    import httpx
    from sealmesh.deploy.local.state import StateFolder

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="SEALMESH_URL", metavar="URL", help="Gateway. Default: the mesh of the state folder."
    ),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File with the API key. Default: $SEALMESH_API_KEY, else the state folder's.",
    ),
]
API_KEY_VARIABLE = "SEALMESH_API_KEY"

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Gateway:
    """Where to send requests and the key to send along."""

    url: str
    api_key: str

    def client(self) -> httpx.Client:
        """A client with the key set; the caller closes it."""
        import httpx

        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.api_key}"},
            timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            # A proxy of the environment is for the world outside, not for loopback.
            trust_env=not _is_local(self.url),
        )


def find_gateway(state: StateFolder, url: str | None, api_key_file: Path | None) -> Gateway:
    """The gateway that the options, the environment or the running mesh name.

    Raises CommandError when no mesh runs or there is no key.
    """
    from sealmesh.deploy.local.record import read_record

    if url is None:
        try:
            record = read_record(state.mesh_record)
        except ValueError as error:
            raise CommandError(str(error)) from error
        if record is None or not record.supervisor.is_alive():
            raise CommandError(f"no mesh runs in {state.root}: start it with `sealmesh up`, or give --url")
        url = record.gateway_url
    if api_key_file is None and (key := os.environ.get(API_KEY_VARIABLE, "")):
        return Gateway(url.rstrip("/"), key)
    path = api_key_file or state.api_key
    try:
        return Gateway(url.rstrip("/"), path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise CommandError(
            f"no API key: cannot read {path}; name a file with --api-key-file or set {API_KEY_VARIABLE}",
            Exit.USAGE,
        ) from error


def unreachable(gateway: Gateway, error: httpx.HTTPError) -> CommandError:
    """A request that got no answer."""
    return CommandError(
        f"{gateway.url} does not answer ({str(error) or type(error).__name__}); see `sealmesh status`"
    )


def refused(status: int, body: bytes) -> CommandError:
    """A request that got an error answer, in OpenAI's shape or another."""
    try:
        document = json.loads(body)
        message = str(document["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace").strip() or "no reason given"
    code = Exit.REFUSED if status in (401, 403) else Exit.USAGE if 400 <= status < 500 else Exit.FAILED
    return CommandError(f"{message} (HTTP {status})", Exit.FAILED if status == 429 else code)


def _is_local(url: str) -> bool:
    import httpx

    return httpx.URL(url).host in ("127.0.0.1", "::1", "localhost")
