"""Operating a live service: a caller that never pauses, acts, and waiting for what must come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import httpx

from tests.live import LiveService, client_of

TOKEN = "a-token-for-tests"
BEARER = {"authorization": f"Bearer {TOKEN}"}
WIDE = {
    "timeout_ms": "20000",
    "signals_budget_ms": "10000",
    "redis_timeout_ms": "10000",
    "max_queue_ms": "20000",
    "stall_ms": "20000",
}
"""Deadlines for a busy machine, whose engines seem to hang now and then."""


class Caller:
    """Asks for rankings without pause, and keeps what matters of every answer."""

    def __init__(self, service: LiveService, items: tuple[str, ...] = ("sku-00001", "b")) -> None:
        self._items = items
        self.statuses: list[int] = []
        self.versions: list[str] = []
        self.backends: list[str] = []
        self.degraded: list[str] = []
        self._client = client_of(service)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = self._client.post("/rank", json={"user_id": "u", "items": self._items})
            self.statuses.append(answer.status_code)
            self.versions.append(answer.headers["x-model-version"])
            self.backends.append(answer.json()["model"]["backend"])
            self.degraded.append(answer.headers.get("x-degraded", ""))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


def eventually(what: Callable[[], bool], within_s: float = 30) -> None:
    ends_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < ends_s, "it never happened"
        time.sleep(0.02)


def roles(client: httpx.Client) -> dict[str, str]:
    found: dict[str, str] = client.get("/v1/models").json()["roles"]
    return found


def act(client: httpx.Client, act: str, **order: Any) -> httpx.Response:
    return client.post(f"/v1/models/shop/{act}", json=order, headers=BEARER)
