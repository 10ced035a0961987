"""The calls that a worker has open, and how they are ended when it drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
from sealmesh.inference.engine_call import EngineCall
from sealmesh.telemetry.runtime.errors import SealmeshError

__all__ = ["InFlight"]


class InFlight:
    """Open calls by request id. While draining, new ones are refused."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[object] | None] = {}
        self._aborted: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextlib.contextmanager
    def admitted(self, call: EngineCall) -> Iterator[None]:
        """Counts a call for the block.

        Raises:
            SealmeshError: OVERLOADED while draining, and when the drain's grace ends during the block;
                INVALID_REQUEST for a request id that is empty, too long or open already.
        """
        if self.draining:
            raise _drains("the worker drains; send new requests to another one")
        name = call.request_id
        if not 0 < len(name) <= 128 or not name.isascii() or not name.isprintable():
            raise _invalid("request_id must be 1 to 128 printable ASCII characters")
        if name in self._tasks:
            raise _invalid("a request with this request_id is open already")
        self._tasks[name] = asyncio.current_task()
        self._empty.clear()
        try:
            yield
        except asyncio.CancelledError:
            task = self._tasks[name]
            if name in self._aborted and task is not None:
                task.uncancel()
                raise _drains("the worker drained and this request took longer than its grace") from None
            raise
        finally:
            del self._tasks[name]
            self._aborted.discard(name)
            if not self._tasks:
                self._empty.set()

    async def drain(self, grace_s: float) -> int:
        """Refuses new calls, waits up to `grace_s` for the open ones, then ends them; returns how many."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        ended = dict(self._tasks)
        for name, task in ended.items():
            if task is not None:
                self._aborted.add(name)
                task.cancel()
        await self._empty.wait()
        return len(ended)


def _drains(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.UNAVAILABLE, "OVERLOADED", message, retry_after_s=1)


def _invalid(message: str) -> SealmeshError:
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, field="request_id")
