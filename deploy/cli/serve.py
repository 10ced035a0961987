"""`sealmesh serve`: one service in the foreground, for containers and for development."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from sealmesh.deploy.cli.exits import CommandError, Exit

EPILOG = """
Examples:\n
  sealmesh serve gateway --config /etc/sealmesh.toml\n
  sealmesh serve kvstore --redis-url redis://cache:6379/0\n
  sealmesh serve worker --help      every setting of the worker\n
"""
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h"]}


def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="vault, kvstore, worker or gateway.")],
) -> None:
    """Run one service in place of this process; all further flags are its own.

    Exit codes are the service's: 0 stopped in order, 1 failed, 2 wrong settings, 3 address in use.
    """
    from sealmesh.deploy.local.mesh_config import SERVICE_MODULES

    if service not in SERVICE_MODULES:
        raise CommandError(f"there is no service {service!r}: name {', '.join(SERVICE_MODULES)}", Exit.USAGE)
    os.execv(sys.executable, [sys.executable, "-m", SERVICE_MODULES[service], *context.args])
