"""`sealmesh`: the command line. Modules of commands import what they need when they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from sealmesh.deploy.cli import bench, chat, config, doctor, keys, lifecycle, pii, sealing, serve, trace, up
from sealmesh.deploy.cli.console import Terminal
from sealmesh.deploy.cli.exits import Exit, report
from typer.main import get_command

_RUN = "Run"
_USE = "Use"
_MODELS = "Models and keys"
_LOOK = "Look and measure"


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"sealmesh {version('sealmesh')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SEALMESH_DEBUG", help="Show where an error comes from.")
    ] = False,
) -> None:
    """Serve language models from sealed weights, behind a privacy filter, with a cache that lasts.

    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 refused (integrity, key, policy).
    """


def build_app() -> typer.Typer:
    """The whole command tree."""
    app = typer.Typer(
        name="sealmesh",
        callback=_root,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("up", rich_help_panel=_RUN, epilog=up.EPILOG)(up.up)
    app.command("down", rich_help_panel=_RUN, epilog=lifecycle.DOWN_EPILOG)(lifecycle.down)
    app.command("status", rich_help_panel=_RUN, epilog=lifecycle.STATUS_EPILOG)(lifecycle.status)
    app.command("serve", rich_help_panel=_RUN, epilog=serve.EPILOG, context_settings=serve.CONTEXT)(
        serve.serve
    )
    app.command("chat", rich_help_panel=_USE, epilog=chat.CHAT_EPILOG)(chat.chat)
    app.command("models", rich_help_panel=_USE, epilog=chat.MODELS_EPILOG)(chat.models)
    app.add_typer(pii.app, name="pii", rich_help_panel=_USE)
    app.command("seal", rich_help_panel=_MODELS, epilog=sealing.SEAL_EPILOG)(sealing.seal)
    app.command("inspect", rich_help_panel=_MODELS, epilog=sealing.INSPECT_EPILOG)(sealing.inspect)
    app.command("verify", rich_help_panel=_MODELS, epilog=sealing.VERIFY_EPILOG)(sealing.verify)
    app.command("unseal", rich_help_panel=_MODELS, epilog=sealing.UNSEAL_EPILOG)(sealing.unseal)
    app.add_typer(keys.app, name="keys", rich_help_panel=_MODELS)
    app.command("doctor", rich_help_panel=_LOOK, epilog=doctor.EPILOG)(doctor.doctor)
    app.add_typer(bench.app, name="bench", rich_help_panel=_LOOK)
    app.add_typer(trace.app, name="trace", rich_help_panel=_LOOK)
    app.add_typer(config.app, name="config", rich_help_panel=_LOOK)
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    debug = "--debug" in arguments or os.environ.get("SEALMESH_DEBUG", "") not in ("", "0", "false")
    try:
        get_command(build_app())(args=list(arguments), prog_name="sealmesh")
    except SystemExit as exit_request:
        code = exit_request.code
        return code if isinstance(code, int) else Exit.DONE if code is None else Exit.FAILED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        if debug:
            raise
        return report(error, Terminal())
    return Exit.DONE


def main() -> None:
    """Entry point of the `sealmesh` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
