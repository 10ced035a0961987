"""The examples, run as a user runs them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.gateway import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).parents[2] / "examples"


async def run(gateway: RunningGateway, *command: str) -> str:
    environment = os.environ | {
        "SEALMESH_API_KEY": gateway.key,
        "SEALMESH_URL": gateway.http,
        "SEALMESH_GRPC": gateway.grpc,
        "SEALMESH_MODEL": "echo",
    }
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("name", ["chat_openai.py", "chat_openai_stream.py", "chat_grpc.py"])
async def test_python(gateway: RunningGateway, name: str) -> None:
    assert "one two three" in await run(gateway, sys.executable, str(EXAMPLES / name), "one", "two", "three")


@pytest.mark.parametrize("key", [None, ""])
async def test_grpc_without_a_key_says_what_to_set(key: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SEALMESH_API_KEY"}
    if key is not None:
        environment["SEALMESH_API_KEY"] = key
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / "chat_grpc.py"), env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert err.decode().startswith("SEALMESH_API_KEY is not set: ")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("curl.sh", ['"What is the capital of France?"', "data: [DONE]"]),
        ("generate_text_rest.sh", ['"textDelta"', "FINISH_REASON_LENGTH", "[PHONE_"]),
    ],
)
async def test_shell(gateway: RunningGateway, name: str, texts: list[str]) -> None:
    assert shutil.which("curl"), "the shell examples need curl: install it"
    out = await run(gateway, "sh", str(EXAMPLES / name))
    for text in texts:
        assert text in out
