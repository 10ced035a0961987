"""`sealmesh up`: the whole mesh on this machine."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text
from sealmesh.deploy.cli.console import Step, Terminal, plain_table
from sealmesh.deploy.cli.exits import CommandError, Exit
from sealmesh.deploy.cli.options import JsonOption, StateOption

if TYPE_CHECKING:
    from sealmesh.deploy.local.mesh_config import MeshSettings, Sections
    from sealmesh.deploy.local.record import MeshRecord
    from sealmesh.deploy.local.service import Service
    from sealmesh.deploy.local.state import StateFolder
    from sealmesh.deploy.local.supervisor import Failure, MeshPlan

EPILOG = """
Examples:\n
  sealmesh up                                   the demo model, in the foreground; Ctrl-C stops it\n
  sealmesh up --model ~/models/qwen --workers 2 another model, sealed on first use\n
  sealmesh up --detach && sealmesh chat "Hi"    in the background; `sealmesh down` stops it\n
  sealmesh up --set worker.max_model_len=4096 --engine-arg enforce_eager=true
"""

# Lines that a person at the terminal should see: warnings of the services themselves, and whatever an engine
# calls an error. Engines also warn about every option that we chose for them; that stays in the log file.
_PROBLEM = re.compile(
    r"^[\d:.]+ WARNING|\b(ERROR|CRITICAL|FATAL)\b|\"level\": ?\"(warning|error|critical)\"|^Traceback"
)
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_POLL_S = 0.2
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_SNIPPETS = """\
curl {url}/v1/chat/completions \\
  -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "What is the capital of France?"}}]
)
print(answer.choices[0].message.content)

{tool} chat "What is the capital of France?"
"""


def up(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Model folder: a plain one is sealed into the state first, a sealed one is used in place. "
            "Default: the demo model.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name under which the model is served.")] = None,
    key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Root key of a model that was sealed elsewhere.")
    ] = None,
    passphrase_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Passphrase of a model that was sealed elsewhere.")
    ] = None,
    verifying_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Public key that a model from elsewhere is signed with."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Inference workers, one engine each. Default 1.")
    ] = None,
    kvstore: Annotated[
        bool | None, typer.Option("--kvstore/--no-kvstore", help="Run the KV store. Default: yes.")
    ] = None,
    port_offset: Annotated[
        int | None, typer.Option(min=0, max=50_000, help="Added to every default port.")
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any vLLM engine option (repeatable)."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting of a service (repeatable)."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the mesh is ready; it runs on.")
    ] = False,
    logs: Annotated[
        bool, typer.Option("--logs", help="Show every log line of the services, not only problems.")
    ] = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start the mesh: vault, KV store, worker and gateway under one supervisor.

    The first run makes keys and certificates and seals the model. Exit codes: 0 stopped in order
    (or ready, with --detach), 1 a service failed or the mesh runs already, 2 wrong settings,
    3 refused (integrity, key).
    """
    from sealmesh.deploy.local.mesh_config import load_mesh_settings
    from sealmesh.deploy.local.state import find_state

    terminal = Terminal()
    started = time.monotonic()
    state = find_state(state_dir)
    flags = {
        "model": None if model is None else model.expanduser().absolute(),
        "name": name,
        "key_file": key_file and key_file.absolute(),
        "passphrase_file": passphrase_file and passphrase_file.absolute(),
        "verifying_key": verifying_key and verifying_key.absolute(),
        "workers": workers,
        "kvstore": kvstore,
        "port_offset": port_offset,
    }
    mesh = load_mesh_settings(state, {key: value for key, value in flags.items() if value is not None})
    overrides = [*(settings or ()), *(f"worker.engine_args.{_engine_arg(text)}" for text in engine_arg or ())]
    plan = prepare(state, mesh, overrides, terminal)
    if detach:
        _run_detached(state, plan, terminal, started, as_json=as_json)
    else:
        _run_foreground(state, plan, terminal, started, show_logs=logs, as_json=as_json)


def _engine_arg(text: str) -> str:
    key, separator, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not separator or not key or "." in key:
        raise CommandError(f"--engine-arg {text!r}: write key=value", Exit.USAGE)
    return f"{key}={value}"


def prepare(state: StateFolder, mesh: MeshSettings, overrides: list[str], terminal: Terminal) -> MeshPlan:
    """Everything before the first process starts; raises what stands in the way, one line each."""
    from sealmesh.deploy.local.first_run import expected_model, prepare_model, prepare_secrets
    from sealmesh.deploy.local.mesh_config import (
        complete_sections,
        parse_override,
        plan_mesh,
        write_mesh_config,
    )
    from sealmesh.deploy.local.record import lock_is_held
    from sealmesh.deploy.local.supervisor import describe_running

    parsed = [parse_override(text) for text in overrides]
    if lock_is_held(state.lock_file):
        raise CommandError(f"{describe_running(state)}; `sealmesh down` stops it")
    # Ports before the long steps, with the model as it will be.
    _refuse_taken_ports(mesh, complete_sections(state, mesh, expected_model(state, mesh), parsed))
    terminal.note(f"State folder: {state.root}")
    with terminal.progress():
        prepare_secrets(state, mesh, terminal)
        model = prepare_model(state, mesh, terminal)
    sections = complete_sections(state, mesh, model, parsed)
    write_mesh_config(state.mesh_config, mesh, sections)
    return plan_mesh(state, mesh, sections)


def _refuse_taken_ports(mesh: MeshSettings, sections: Sections) -> None:
    from sealmesh.deploy.local.addresses import taken_addresses
    from sealmesh.deploy.local.mesh_config import configuration_error, listen_addresses

    try:
        problems = taken_addresses(listen_addresses(mesh, sections))
    except ValueError as error:
        raise configuration_error(str(error)) from error
    if problems:
        listed = "; ".join(f"{purpose} {problem}" for purpose, problem in problems.items())
        raise CommandError(
            f"{listed}. Stop what listens there (`sealmesh down`?), or move the mesh with "
            "--port-offset 100 or --set section.http_address=host:port"
        )


class _View:
    """Draws the life of a mesh in the foreground."""

    def __init__(self, terminal: Terminal, on_ready: Callable[[], None], *, show_logs: bool) -> None:
        self._terminal = terminal
        self._on_ready = on_ready
        self._show_logs = show_logs
        self._steps: dict[str, Step] = {}
        self._colours: dict[str, str] = {}
        self._was_ready: set[str] = set()

    def service_changed(self, service: Service, message: str) -> None:
        name, state = service.spec.name, service.state.value
        if (step := self._steps.pop(name, None)) is not None:
            step.remove()
        if state == "starting":
            self._steps[name] = self._terminal.start_step(f"{name} {message}")
        elif state == "ready":
            again = " again" if name in self._was_ready else ""
            self._was_ready.add(name)
            self._terminal.done(f"{name} is ready{again}", service.ready_after_s)
        elif state in ("restarting", "failed"):
            self._terminal.failed(f"{name} {message}")

    def log_line(self, service: str, line: str) -> None:
        text = printable(line)
        if (step := self._steps.get(service)) is not None:
            step.update(text)
        if self._show_logs or _PROBLEM.search(text):
            colour = self._colours.setdefault(service, _COLOURS[len(self._colours) % len(_COLOURS)])
            self._terminal.err.print(Text.assemble((f"{service:<9}| ", colour), text))

    def mesh_ready(self, elapsed_s: float) -> None:
        self._on_ready()

    def stopping(self, reason: str) -> None:
        self._terminal.note(f"Stopping in reverse order ({reason}); once more ends the wait.")


def printable(line: str) -> str:
    """A log line without the control sequences that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in _ESCAPE_SEQUENCE.sub("", line))


def _run_foreground(
    state: StateFolder,
    plan: MeshPlan,
    terminal: Terminal,
    started: float,
    *,
    show_logs: bool,
    as_json: bool,
) -> None:
    import asyncio

    from sealmesh.deploy.local.supervisor import AlreadyRunsError, Supervisor

    with ExitStack() as bars:
        bars.enter_context(terminal.progress())

        def ready() -> None:
            bars.close()
            show_ready(state, terminal, time.monotonic() - started, as_json=as_json)
            terminal.note("Ctrl-C stops the mesh.")

        view = _View(terminal, ready, show_logs=show_logs)
        try:
            failure = asyncio.run(Supervisor(state, plan, view).run())
        except AlreadyRunsError as error:
            raise CommandError(f"{error}; `sealmesh down` stops it") from error
    if failure is not None:
        _show_failure(state, failure, terminal)
        raise typer.Exit(_exit_of_service(failure.exit_code))
    terminal.note("The mesh has stopped.")


def _show_failure(state: StateFolder, failure: Failure, terminal: Terminal) -> None:
    for line in failure.tail:
        terminal.err.print(Text.assemble((f"{failure.service:<9}| ", "red"), printable(line)))
    log = state.log_of(failure.service)
    terminal.error(f"{failure.service} was given up: {failure.reason}; its whole log: {log}")


def _exit_of_service(code: int | None) -> Exit:
    """What the exit code of a service that was given up means for this command."""
    from sealmesh.telemetry.runtime.server import EXIT_REFUSED
    from sealmesh.telemetry.runtime.settings import EXIT_USAGE

    known = {EXIT_USAGE: Exit.USAGE, EXIT_REFUSED: Exit.REFUSED}
    return Exit.FAILED if code is None else known.get(code, Exit.FAILED)


def _run_detached(
    state: StateFolder, plan: MeshPlan, terminal: Terminal, started: float, *, as_json: bool
) -> None:
    import subprocess

    from sealmesh.deploy.local.record import read_record

    log = state.log_of("supervisor")
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "sealmesh.deploy.local.background", str(state.root)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    names = [spec.name for spec in plan.services]
    steps: dict[str, Step] = {}
    ready: set[str] = set()
    try:
        with terminal.progress():
            while (code := supervisor.poll()) is None:
                record = read_record(state.mesh_record)
                if record is not None and record.supervisor_pid == supervisor.pid:
                    for service in record.services:
                        if service.state == "starting" and service.name not in steps:
                            steps[service.name] = terminal.start_step(f"{service.name} starting")
                        elif service.state == "ready" and service.name not in ready:
                            ready.add(service.name)
                            if service.name in steps:
                                steps[service.name].remove()
                            terminal.done(f"{service.name} is ready")
                    if record.state == "ready" and ready.issuperset(names):
                        break
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        raise
    if code is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        problem = next((line for line in lines if line.startswith("error: ")), f"error: exit code {code}")
        for line in lines[lines.index(problem) + 1 :] if problem in lines else lines[-20:]:
            terminal.err.print(Text(printable(line)))
        raise CommandError(problem.removeprefix("error: "), _exit_of_service(code))
    show_ready(state, terminal, time.monotonic() - started, as_json=as_json)
    terminal.note("It runs in the background: `sealmesh status` shows it, `sealmesh down` stops it.")


def show_ready(state: StateFolder, terminal: Terminal, elapsed_s: float, *, as_json: bool) -> None:
    """The services with their addresses, the API key, and what to paste."""
    from sealmesh.deploy.local.record import read_record

    record = read_record(state.mesh_record)
    if record is None:
        raise CommandError("the mesh stopped as soon as it was ready; see its logs")
    key = state.api_key.read_text(encoding="ascii").strip()
    if as_json:
        terminal.json(ready_document(state, record, elapsed_s))
        return
    out = terminal.out
    out.print(f"\n[bold green]The mesh is ready after {elapsed_s:.1f} s[/]")
    table = plain_table("Service", "Address", "Health and metrics", "Process")
    for service in record.services:
        table.add_row(
            service.name, service.address, f"http://{service.http_address}/metrics", str(service.pid)
        )
    out.print(table)
    out.print(f"[bold]Model[/]    {escape(record.model)}")
    out.print(f"[bold]OpenAI[/]   {record.gateway_url}/v1")
    out.print(f"[bold]API key[/]  {escape(key)}  [dim]({escape(str(state.api_key))})[/]\n")
    out.print(Text(_SNIPPETS.format(url=record.gateway_url, key=key, model=record.model, tool=_own_name())))


def _own_name() -> str:
    """This tool as the reader can type it: by its name where PATH finds it, else by its place."""
    own = Path(sys.argv[0]).absolute()
    if shutil.which(own.name) == str(own) or not own.is_file():
        return "sealmesh"
    here = Path.cwd()
    return str(own.relative_to(here)) if own.is_relative_to(here) else str(own)


def ready_document(state: StateFolder, record: MeshRecord, elapsed_s: float) -> dict[str, object]:
    """What `up --json` prints. The key itself stays in its file."""
    return {
        "state": str(state.root),
        "gateway_url": record.gateway_url,
        "model": record.model,
        "api_key_file": str(state.api_key),
        "elapsed_s": round(elapsed_s, 3),
        "services": [
            {"name": service.name, "address": service.address, "http_address": service.http_address}
            for service in record.services
        ],
    }
