"""Settings of the gateway, and its process."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from sealmesh.gateway.access.keys import add_api_key
from sealmesh.gateway.access.tenants import create_secret_file
from sealmesh.gateway.settings import GatewaySettings, is_loopback

from tests.support.scripted_worker import ScriptedWorker


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)
    GatewaySettings(http_address=address)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.com:1", "localhost.evil:1"]
)
@pytest.mark.parametrize("name", ["http_address", "grpc_address"])
def test_other_addresses_need_tls_or_an_explicit_word(address: str, name: str, tmp_path: Path) -> None:
    assert not is_loopback(address)
    with pytest.raises(ValidationError, match=f"{name} .* is not loopback and has no TLS"):
        GatewaySettings(**{name: address})
    GatewaySettings(**{name: address}, insecure_front=True)
    GatewaySettings(**{name: address}, front_tls_certificate=tmp_path / "c", front_tls_key=tmp_path / "k")


def test_half_of_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="must be set together"):
        GatewaySettings(front_tls_certificate=tmp_path / "c")


def write_config(folder: Path, worker: str, extra: str = "") -> Path:
    config = folder / "mesh.toml"
    config.write_text(
        f"""
[gateway]
http_address = "127.0.0.1:0"
grpc_address = "127.0.0.1:0"
workers = ["{worker}"]
access_keys_file = "keys.toml"
secret_file = "gateway.secret"
log_format = "json"
{extra}
"""
    )
    return config


async def start(config: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sealmesh.gateway", "--config", str(config), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_the_process_serves_and_stops(tmp_path: Path) -> None:
    import json

    key = add_api_key(tmp_path / "keys.toml", "acme")
    create_secret_file(tmp_path / "gateway.secret")
    async with ScriptedWorker() as worker:
        process = await start(write_config(tmp_path, worker.address))
        assert process.stderr is not None
        try:
            async with asyncio.timeout(30):
                while True:
                    line = json.loads(await process.stderr.readline())
                    if line["event"] == "ready":
                        break
            async with httpx.AsyncClient(base_url=f"http://{line['http']}") as http:
                reply = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert reply.json()["data"][0]["id"] == "echo"
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 15) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize(
    ("case", "flags", "text"),
    [
        ("no secret", (), "gateway.secret: No such file or directory"),
        ("no keys", (), "keys.toml: No such file or directory"),
        ("good", ("--http-address", "0.0.0.0:8080"), "is not loopback and has no TLS"),
        (
            "good",
            ("--front-tls-certificate", "/none.pem", "--front-tls-key", "/none.key"),
            "front_tls_certificate",
        ),
    ],
)
async def test_a_wrong_setting_is_one_clear_line(
    tmp_path: Path, case: str, flags: tuple[str, ...], text: str
) -> None:
    if case != "no keys":
        add_api_key(tmp_path / "keys.toml", "acme")
    if case != "no secret":
        create_secret_file(tmp_path / "gateway.secret")
    process = await start(write_config(tmp_path, "127.0.0.1:1", 'log_level = "error"'), *flags)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    lines = err.decode().splitlines()
    assert len(lines) == 1, lines
    assert text in lines[0]
