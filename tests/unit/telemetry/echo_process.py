"""A service process for tests of its life: `python echo_process.py [flags of ServiceSettings]`.

What `HOLD` answers takes one second; `FAIL` in the environment makes a part of the start-up fail.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
from sealmesh.telemetry.runtime.errors import Reason, SealmeshError
from sealmesh.telemetry.runtime.http import Receive, Scope, Send
from sealmesh.telemetry.runtime.server import ServerSpec, serve
from sealmesh.telemetry.runtime.settings import ServiceSettings, load_settings
from sealmesh.telemetry.telemetry import Telemetry


@dataclass
class Part:
    name: str

    async def start(self) -> None:
        fail = os.environ.get("FAIL")
        if fail == self.name:
            raise SealmeshError(
                grpc.StatusCode.UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", "Redis at nowhere:1 does not answer"
            )
        if fail == f"{self.name}-refused":
            reason = cast("Reason", os.environ["REASON"])
            raise SealmeshError(grpc.StatusCode.DATA_LOSS, reason, "a tensor was changed")
        if fail == f"{self.name}-defect":
            raise ValueError("a defect")
        if fail == f"{self.name}-slow":
            print(f"starting {self.name}", flush=True)
            await asyncio.sleep(60)
        print(f"started {self.name}", flush=True)

    async def close(self) -> None:
        print(f"closed {self.name}", flush=True)


async def allow(context: Any, full_method: str) -> None:
    return


async def hold(request: bytes, context: Any) -> bytes:
    print("holding", flush=True)
    await asyncio.sleep(float(request))
    print("answered", flush=True)
    return request


async def forever(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    await asyncio.Event().wait()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    print("http", flush=True)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first ", "more_body": True})
    await asyncio.sleep(0.5)
    await send({"type": "http.response.body", "body": b"second"})


async def watch() -> None:
    if os.environ.get("FAIL") == "watch":
        raise SealmeshError(grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED", "the engine process ended")


def register(server: grpc.aio.Server) -> None:
    handlers: dict[str, Any] = {
        "Hold": grpc.unary_unary_rpc_method_handler(hold),
        "Forever": grpc.unary_stream_rpc_method_handler(forever),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.v1.Echo", handlers),))


async def main() -> int:
    settings = load_settings(ServiceSettings, "kvstore")
    return await serve(
        ServerSpec(
            settings=settings,
            telemetry=Telemetry.build("kvstore", settings),
            service_names=["test.v1.Echo"],
            register=register,
            authorize=allow,
            components=[Part("one"), Part("two")],
            http_app=app,
            endless=["/test.v1.Echo/Forever"],
            watch=watch,
        )
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
