"""Blocking work off the event loop that does not hold the process up at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_daemon_thread"]

_T = TypeVar("_T")


async def in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Runs `work` in a daemon thread and waits for it.

    Unlike with `asyncio.to_thread`, a process that is told to stop meanwhile need not wait for the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where _T is None

    def run() -> None:
        try:
            result = work()
        except BaseException as exc:  # noqa: BLE001  # handed to the waiter, whatever it is
            deliver(None, exc)
        else:
            deliver(result, None)

    def deliver(result: _T | None, error: BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=getattr(work, "__qualname__", "work"), daemon=True).start()
    return await future
