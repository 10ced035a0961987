"""One HTTP request into an ASGI application in this process, streamed, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from sealmesh.telemetry.runtime.http import AsgiApp, Message

__all__ = ["AsgiCall", "BodyReader", "ResponseStart"]

Item = TypeVar("Item")
_Item_co = TypeVar("_Item_co", covariant=True)

_log = logging.getLogger("sealmesh.worker.openai")
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


class BodyReader(Protocol[_Item_co]):
    """Takes the response in where the application sends it: in its task, before it goes on.

    What it notes there belongs to this very piece; the consumer may be many pieces behind.
    """

    def begin(self, head: ResponseStart) -> None:
        """The response begins."""

    def feed(self, chunk: bytes) -> _Item_co:
        """A piece of the body; what it makes of it goes to the consumer, and so does what it raises."""


class AsgiCall(Generic[Item]):
    """A request to an ASGI application; use as `async with`.

    Leaving the block early tells the application that the client is gone, which is what makes vLLM abort
    the engine request.

    Args:
        app: the application.
        reader: of the response.
        method: HTTP method.
        path: path without query.
        headers: names in lower case.
        body: request body.
    """

    def __init__(
        self,
        app: AsgiApp,
        reader: BodyReader[Item],
        *,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> None:
        self._app = app
        self._reader = reader
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
        self._arrived: asyncio.Queue[ResponseStart | _Piece[Item] | Exception | None] = asyncio.Queue(
            _QUEUE_MESSAGES
        )
        self._gone = asyncio.Event()
        self._body_sent = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsgiCall[Item]:
        self._task = asyncio.create_task(self._run(), name="openai layer")
        return self

    async def __aexit__(self, *_: object) -> None:
        task = self._task
        if task is None:
            return
        self._gone.set()
        # The application may be waiting for room: what it still sends goes nowhere.
        while not self._arrived.empty():
            self._arrived.get_nowait()
        done, _pending = await asyncio.wait((task,), timeout=_UNWIND_S)
        if not done:
            task.cancel()
            await asyncio.wait((task,), timeout=_UNWIND_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            # Raised to the consumer already, or nothing to one that left; its text may quote a request.
            _log.debug("the application ended with %s", type(error).__name__)

    async def start(self) -> ResponseStart:
        """Waits for the head of the response.

        Raises:
            ConnectionError: the application ended without one.
            Exception: whatever the application raised.
        """
        head = await self._next()
        if not isinstance(head, ResponseStart):
            raise ConnectionError("the application ended without a response")
        return head

    async def items(self) -> AsyncIterator[Item]:
        """What the reader made of the body, piece by piece.

        Raises:
            ConnectionError: the application ended before the body was complete.
            Exception: whatever the application or the reader raised.
        """
        while isinstance(piece := await self._next(), _Piece):
            yield piece.item
            if piece.last:
                return
        raise ConnectionError("the application ended in the middle of a response")

    async def _next(self) -> ResponseStart | _Piece[Item] | None:
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        if arrived is None and self._task is not None:
            await self._task
        return arrived

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            if not self._gone.is_set():
                await self._arrived.put(None)

    async def _receive(self) -> Message:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        try:
            arrived = self._taken_in(message)
        except Exception as exc:  # noqa: BLE001  # the consumer's to handle, not the application's
            arrived = exc
        if arrived is not None:
            await self._arrived.put(arrived)

    def _taken_in(self, message: Message) -> ResponseStart | _Piece[Item] | Exception | None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            content_type = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            media_type = content_type.decode("latin-1").partition(";")[0].strip().lower()
            head = ResponseStart(int(message["status"]), media_type)
            self._reader.begin(head)
            return head
        if message["type"] == "http.response.body":
            last = not message.get("more_body", False)
            return _Piece(self._reader.feed(bytes(message.get("body", b""))), last)
        return None


@dataclass(frozen=True, slots=True)
class _Piece(Generic[Item]):
    item: Item
    last: bool
