"""One HTTP request into an ASGI application in this process, streamed, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from sealmesh.telemetry.runtime.http import AsgiApp, Message

__all__ = ["AsgiCall", "ResponseStart"]

# Events that may wait for a slow reader; then the application waits in turn.
_QUEUE_MESSAGES: Final = 64
# From the disconnect message to cancelling an application that does not heed it.
_UNWIND_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """Head of the response."""

    status: int
    content_type: str
    """Media type without parameters, lower case."""


class AsgiCall:
    """A request to an ASGI application; use as `async with`.

    Leaving the block early tells the application that the client is gone, which is what makes vLLM abort
    the engine request.

    Args:
        app: the application.
        method: HTTP method.
        path: path without query.
        headers: names in lower case.
        body: request body.
    """

    def __init__(
        self, app: AsgiApp, *, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        self._app = app
        self._body = body
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"worker"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUE_MESSAGES)
        self._gone = asyncio.Event()
        self._body_sent = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsgiCall:
        self._task = asyncio.create_task(self._run(), name="openai layer")
        return self

    async def __aexit__(self, *_: object) -> None:
        task = self._task
        if task is None:
            return
        self._gone.set()
        # The application may be waiting for room: what it still sends goes nowhere.
        while not self._messages.empty():
            self._messages.get_nowait()
        done, _pending = await asyncio.wait((task,), timeout=_UNWIND_S)
        if not done:
            task.cancel()
            await asyncio.wait((task,), timeout=_UNWIND_S)

    async def start(self) -> ResponseStart:
        """Waits for the head of the response.

        Raises:
            ConnectionError: the application ended without one.
            Exception: whatever the application raised.
        """
        message = await self._next()
        if message is None or message["type"] != "http.response.start":
            raise ConnectionError("the application ended without a response")
        content_type = next(
            (value for name, value in message.get("headers", ()) if name.lower() == b"content-type"), b""
        )
        media_type = content_type.decode("latin-1").partition(";")[0].strip().lower()
        return ResponseStart(int(message["status"]), media_type)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as the application sends it.

        Raises:
            ConnectionError: the application ended before the body was complete.
            Exception: whatever the application raised.
        """
        while (message := await self._next()) is not None:
            if message["type"] != "http.response.body":
                continue
            if body := message.get("body", b""):
                yield bytes(body)
            if not message.get("more_body", False):
                return
        raise ConnectionError("the application ended in the middle of a response")

    async def _next(self) -> Message | None:
        message = await self._messages.get()
        if message is None and self._task is not None:
            await self._task
        return message

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            if not self._gone.is_set():
                await self._messages.put(None)

    async def _receive(self) -> Message:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._gone.is_set():
            await self._messages.put(message)
