"""`python -m service`: start, announce, serve, drain. `python -m service models`: operate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import uvicorn
from pydantic import SecretStr

from service import cli
from service.app import Service
from service.http.protocol import Connection
from service.settings import Settings, SettingsFault, load
from service.signals.connect import check_url
from service.signals.embedded import embedded_valkey
from service.telemetry.log import start_logging
from service.telemetry.providers import ProviderFault

DEVICE_LOST = 75
"""The exit status of a process whose GPU is gone: start another one."""
_SWITCH_INTERVAL_S = 0.0001
"""The device thread must not wait 5 ms, Python's default, for the interpreter lock."""


class Server(uvicorn.Server):
    """uvicorn that turns readiness off first, waits, and only then closes the listener."""

    def __init__(self, config: uvicorn.Config, app: Service) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, _: FrameType | None) -> None:
        """Begin to drain; a second signal ends at once."""
        if self._app.admission.draining:
            self.should_exit = self.force_exit = True
            return
        self._app.admission.draining = True
        wait_s = self._app.settings.drain_ms / 1e3 if sig == signal.SIGTERM else 0.0
        asyncio.get_event_loop().call_soon_threadsafe(self._exit_in, wait_s)

    def _exit_in(self, wait_s: float) -> None:
        asyncio.get_running_loop().call_later(wait_s, self._exit)

    def _exit(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and announce once a version is warm."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._announcement = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        await self._app.loaded.wait()
        for line in announcement(self._app, f"http://{host}:{port}"):
            print(line, flush=True)


def announcement(app: Service, url: str) -> list[str]:
    """What a person wants to know at the start: the URL, the docs, and a line to paste."""
    primary = app.versions.primary
    if primary is None:
        return [f"ranker at {url} is not ready: {app.versions.fault}"]
    body = {"user_id": "u1", "items": list(primary.manifest.sample_items[:5])}
    words = ["curl", "-s", f"{url}/rank", "-H", "content-type: application/json"]
    words += ["-d", json.dumps(body)]
    return [
        f"ranker at {url} serves {primary.name} {primary.version}",
        f"docs     {url}/docs",
        f"try      {shlex.join(words)}",
    ]


@contextlib.contextmanager
def _with_store(settings: Settings) -> Iterator[Settings]:
    """The settings with a signal store: the one named, or a Valkey of our own."""
    if settings.redis_url is not None:
        yield settings
        return
    with embedded_valkey() as url:
        yield settings.model_copy(update={"redis_url": SecretStr(url)})


def main() -> int:
    """Serve until a signal, or run a command.

    The exit status is 2 for a wrong environment and 75 for a lost device.
    """
    if len(sys.argv) > 1:
        return cli.run(sys.argv[1:])
    try:
        settings = load(checks={"redis_url": check_url})
    except SettingsFault as fault:
        print(f"wrong settings:\n{fault}", file=sys.stderr)
        return 2
    start_logging(settings.log_level)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with _with_store(settings) as complete:
        shown = complete.model_dump(mode="json")
        logging.getLogger("ranker").info("effective settings", extra=shown)
        try:
            app = Service(complete)
        except ProviderFault as fault:
            print(fault, file=sys.stderr)
            return 2
        config = uvicorn.Config(
            app,
            host=complete.host,
            port=complete.port,
            loop="uvloop",
            http=Connection,
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            # without it one request's context leaks into the next on a kept connection
            reset_contextvars=True,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=30,
        )
        server = Server(config, app)
        server.run()
    if app.device_lost:
        # a lost device may hang or abort whoever tidies up after it
        sys.stdout.flush()
        os._exit(DEVICE_LOST)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
