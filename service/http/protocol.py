"""Telling a request that its caller has left, without a task that waits for it.

ASGI offers `receive()`, which costs a task a request; the connection itself knows for free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.asgi import CallerLeft, Scope

_ON_LEAVE = "ranker.on_leave"


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which calls the running request's `ranker.on_leave` when it closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Close as uvicorn does, then tell the request."""
        super().connection_lost(exc)
        cycle = self.cycle
        if cycle is not None:
            leave: Callable[[], None] | None = cycle.scope.get(_ON_LEAVE)  # type: ignore[assignment]
            if leave is not None:
                leave()


@contextmanager
def while_connected(scope: Scope) -> Iterator[None]:
    """Run a block that ends with CallerLeft as soon as the caller disconnects."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    scope[_ON_LEAVE] = leave
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise CallerLeft from None
    finally:
        del scope[_ON_LEAVE]
