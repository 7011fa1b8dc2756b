"""What the connection knows and ASGI does not tell: when a request came, and who has left.

ASGI offers `receive()` to hear of a leaving caller, which costs a task a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.asgi import CallerLeft, Scope

_ON_LEAVE = "ranker.on_leave"
_RECEIVED = "ranker.received_s"


class Connection(HttpToolsProtocol):
    """uvicorn's connection; it stamps requests, and calls their `ranker.on_leave` as it closes."""

    def on_headers_complete(self) -> None:
        """Stamp the request: a busy loop may run it much later."""
        scope = cast("Scope", self.scope)
        scope[_RECEIVED] = time.monotonic()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close as uvicorn does, then tell the request."""
        super().connection_lost(exc)
        cycle = self.cycle
        if cycle is not None:
            leave = cast("Scope", cycle.scope).get(_ON_LEAVE)
            if leave is not None:
                leave()


def received_s(scope: Scope) -> float:
    """When the request came, on the monotonic clock; now, if another server runs the app."""
    received: float = scope.get(_RECEIVED) or time.monotonic()
    return received


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
