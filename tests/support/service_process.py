"""Any sealmesh service as a real process on free ports, for tests: start, wait for log events, stop."""

from __future__ import annotations

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

from sealmesh.security.tls import LocalAuthority


class ServiceProcess:
    """`python -m <module>` with a certificate of its role; `with` starts and stops it.

    Args:
        module: for example "sealmesh.inference".
        role: role and name of its certificate, for example ("worker", "worker-0").
        authority: issues the certificate.
        flags: further flags.
        start_timeout_s: until it is ready.
    """

    def __init__(
        self,
        module: str,
        role: tuple[str, str],
        authority: LocalAuthority,
        flags: Sequence[str],
        *,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._module = module
        self._role = role
        self._authority = authority
        self._flags = list(flags)
        self._start_timeout_s = start_timeout_s
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

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait_ready: bool = True) -> None:
        """Starts the process; with `wait_ready` returns once it serves."""
        tls = self._authority.issue(*self._role)
        command = [
            *(sys.executable, "-m", self._module, "--log-format", "json"),
            *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
            *("--tls-ca", str(tls.ca), "--tls-certificate", str(tls.certificate)),
            *("--tls-key", str(tls.key), *self._flags),
        ]
        environment = {name: value for name, value in os.environ.items() if "SEALMESH" not in name}
        environment["PYTHONFAULTHANDLER"] = "1"
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        threading.Thread(target=self._read_log, args=(self._process,), daemon=True).start()
        if not wait_ready:
            return
        try:
            listening = self.wait_for("listening", self._start_timeout_s)
            self.grpc_address, self.http_address = str(listening["grpc"]), str(listening["http"])
            self.wait_for("ready", self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 60.0) -> int | None:
        """SIGTERM; returns the exit code, or fails with the stacks of a process that does not stop."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # faulthandler writes every thread's stack to the log.
            process.send_signal(signal.SIGABRT)
            process.wait()
            raise AssertionError(f"{self._module} does not stop; log: {self.log[-80:]}") from None

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def wait_exit(self, timeout_s: float) -> int:
        """Waits until the process ends by itself; returns its exit code."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def wait_for(self, event: str, timeout_s: float) -> dict[str, object]:
        """The next log line whose event starts so."""
        while True:
            try:
                line = self._events.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(f"no {event!r} within {timeout_s} s; log: {self.log[-40:]}") from None
            if line is None:
                raise AssertionError(f"{self._module} ended before {event!r}; log: {self.log[-40:]}")
            if str(line.get("event", "")).startswith(event):
                return line

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for text in process.stderr:
                self.log.append(text.rstrip())
                try:
                    line: object = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    self._events.put(line)
        self._events.put(None)


def vault_flags(folder: Path, models: Path, verifying_key: Path, root_key: Path, allow: str) -> list[str]:
    """Flags of a vault that offers the models in a folder to one worker identity."""
    return [
        *("--models-dir", str(models), "--state-dir", str(folder / "vault")),
        *("--root-key-file", str(root_key), "--verifying-key-file", str(verifying_key)),
        *("--allow", allow),
    ]
