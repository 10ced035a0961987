"""A configured Redis that cannot be used: one line that says where, why and what to do."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ADVICE = "start Redis there, correct kvstore.redis_url, or run without a store: sealmesh up --no-kvstore"


def refusal(url: str) -> str:
    """The only error that a kvstore prints before it gives up."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sealmesh.kvstore", "--log-format", "json", "--redis-url", url),
            *(
                "--grpc-address",
                "127.0.0.1:0",
                "--http-address",
                "127.0.0.1:0",
                "--connect-timeout-ms",
                "300",
            ),
            *("--command-timeout-ms", "300"),
        ],
        env={name: value for name, value in os.environ.items() if "SEALMESH" not in name},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (error,) = [line for line in lines if line["level"] != "info"]
    assert error["reason"] == "DEPENDENCY_UNAVAILABLE"
    assert "secret" not in done.stderr
    return str(error["event"])


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_nobody_listens(scheme: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        said = refusal(f"{scheme}://user:secret@127.0.0.1:{port}/0")
    address = f"{scheme}://127.0.0.1:{port}/0"
    assert said == f"kvstore.redis_url = {address} cannot be used (Connection refused): {ADVICE}"


def test_somebody_listens_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        said = refusal(url)
    assert said.startswith(f"kvstore.redis_url = {url} cannot be used (Timeout")
    assert said.endswith(ADVICE)


def test_no_such_socket_or_host(tmp_path: Path) -> None:
    assert "(No such file or directory)" in refusal(f"unix://{tmp_path}/redis.sock")
    assert "redis://host.invalid:6379 cannot be used (" in refusal("redis://host.invalid:6379")
