"""A real kvstore process with its embedded Redis, mTLS and all, for tests."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
import psutil
from sealmesh.protos.kvstore.v1 import kvstore_pb2_grpc
from sealmesh.security.tls import LocalAuthority, TlsFiles, channel_credentials
from sealmesh.telemetry.runtime.channel import open_sync_channel


class KVStoreProcess:
    """`python -m sealmesh.kvstore` on free ports; `with` starts and stops it."""

    def __init__(self, folder: Path, *flags: str, authority: LocalAuthority | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = authority or LocalAuthority(folder / "tls").create()
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None
        self._events: queue.Queue[dict[str, object] | None] = queue.Queue()
        self.log: list[str] = []
        self.grpc_address = ""
        self.http_address = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, wait_ready: bool = True, timeout_s: float = 30.0) -> None:
        """Starts the process; with `wait_ready` returns when it serves."""
        tls = self.authority.issue("kvstore", "kvstore-0")
        command = [
            *(sys.executable, "-m", "sealmesh.kvstore", "--log-format", "json"),
            *("--grpc-address", self.grpc_address or "127.0.0.1:0"),
            *("--http-address", self.http_address or "127.0.0.1:0"),
            *("--data-dir", str(self.folder / "data"), "--probe-interval-ms", "100"),
            *("--tls-ca", str(tls.ca), "--tls-certificate", str(tls.certificate)),
            *("--tls-key", str(tls.key), *self._flags),
        ]
        environment = {name: value for name, value in os.environ.items() if "SEALMESH" not in name}
        environment["PYTHONFAULTHANDLER"] = "1"
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self._events = queue.Queue()
        reader = threading.Thread(target=self._read_log, args=(self._process, self._events), daemon=True)
        reader.start()
        if wait_ready:
            listening = self.wait_for("listening", timeout_s)
            self.grpc_address = str(listening["grpc"])
            self.http_address = str(listening["http"])
            self.wait_for("ready", timeout_s)

    def stop(self, timeout_s: float = 20.0) -> int | None:
        """SIGTERM; returns the exit code, or fails with the stacks of a process that does not stop."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # faulthandler writes every thread's stack to the log.
            process.send_signal(signal.SIGABRT)
            process.wait()
            raise AssertionError(f"the kvstore does not stop; log: {self.log[-80:]}") from None

    def wait_exit(self, timeout_s: float = 20.0) -> int:
        """Waits until the process ends by itself."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def send(self, number: int) -> None:
        """Sends a signal to the service."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()
            self._process = None

    def wait_for(self, event: str, timeout_s: float = 20.0) -> dict[str, object]:
        """The next log line whose event starts so."""
        while True:
            try:
                line = self._events.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(f"no {event!r} within {timeout_s} s; log: {self.log}") from None
            if line is None:
                raise AssertionError(f"the kvstore ended before {event!r}; log: {self.log}")
            if str(line.get("event", "")).startswith(event):
                return line

    @property
    def redis(self) -> psutil.Process:
        """The embedded server's process."""
        assert self._process is not None
        (child,) = psutil.Process(self._process.pid).children()
        return child

    def tls(self, role: str = "worker") -> TlsFiles:
        """A certificate of a role."""
        return self.authority.issue(role, f"{role}-0")

    def channel(self, role: str = "worker") -> grpc.Channel:
        """A channel with a certificate of a role."""
        return open_sync_channel(
            self.grpc_address, channel_credentials(self.tls(role)), expected_role="kvstore"
        )

    def stub(self, role: str = "worker") -> kvstore_pb2_grpc.KVStoreServiceStub:
        """A client with a certificate of a role."""
        return kvstore_pb2_grpc.KVStoreServiceStub(self.channel(role))

    def _read_log(
        self, process: subprocess.Popen[str], events: "queue.Queue[dict[str, object] | None]"
    ) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.log.append(line.rstrip())
                try:
                    events.put(json.loads(line))
                except ValueError:
                    continue
        events.put(None)


def key_of(number: int) -> bytes:
    """A distinct key."""
    return number.to_bytes(32, "big")


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    """Distinct keys."""
    return [key_of(number) for number in numbers]
