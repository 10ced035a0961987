"""Things with a beginning and an end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Component", "running"]


@runtime_checkable
class Component(Protocol):
    """A part of a service that holds resources. Its constructor does no I/O."""

    async def start(self) -> None:
        """Acquires what is needed. Raises SealmeshError when that is impossible, holding nothing."""

    async def close(self) -> None:
        """Releases it all. Safe to call once after a successful start."""


@contextlib.asynccontextmanager
async def running(components: Sequence[Component]) -> AsyncIterator[None]:
    """Starts components in order and closes them in reverse.

    When one cannot start, those before it are closed and its error goes up; when one cannot close,
    the others are closed all the same and the error goes up afterwards.
    """
    async with contextlib.AsyncExitStack() as stack:
        for component in components:
            await component.start()
            stack.push_async_callback(component.close)
        yield
