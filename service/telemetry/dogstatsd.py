"""Datagrams to a DogStatsD agent, sent by a thread of their own; the only importer of datadog."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from datadog.dogstatsd.base import DogStatsd

from service.telemetry.distributions import Send
from service.telemetry.providers import Tags

_LONGEST_LINE_BYTES = 1_432
_MOST_WAITING = 1_000
"""Lines that wait while the agent's name is looked up or its socket is full; more are lost."""
_CLOSE_S = 1.0


def sender(url: str, tags: Tags) -> tuple[Send, Callable[[], object]]:
    """What sends to `udp://host:port` or `unix:///path`, and what ends it.

    An agent that is away loses values.
    """
    parts = urlsplit(url)
    where: dict[str, Any] = {"host": parts.hostname, "port": parts.port}
    if parts.scheme == "unix":
        where = {"socket_path": parts.path}
    client = DogStatsd(
        **where,
        max_buffer_size=_LONGEST_LINE_BYTES,
        disable_telemetry=True,
        disable_background_sender=False,
        sender_queue_size=_MOST_WAITING,
        sender_queue_timeout=0,
    )
    # in place of what it takes from DD_ variables, which ddtrace may have got from us
    client.constant_tags[:] = [
        f"service:{tags.service}",
        f"env:{tags.env}",
        f"version:{tags.version}",
    ]

    def send(name: str, values: list[float], own_tags: list[str]) -> None:
        # the protocol takes many values in a line, and the client passes on what it is given
        line: Any = ":".join([f"{value:.6f}" for value in values])
        client.distribution(name, line, own_tags)

    return send, partial(client.disable_background_sender, timeout=_CLOSE_S)
