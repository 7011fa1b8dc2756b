"""Where spans go: the one OpenTelemetry provider of this process, chosen by a setting."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Literal

import msgspec
from opentelemetry.trace import Tracer

from service.errors import RankerError

Tracing = Literal["off", "otel", "datadog"]
SCOPE = "ranker"


class ProviderFault(RankerError):
    """The chosen tracing provider is not installed."""


class Tags(msgspec.Struct, frozen=True):
    """Datadog's unified tags, which are OpenTelemetry's resource attributes too."""

    service: str
    env: str
    version: str


class Provider(msgspec.Struct, frozen=True):
    """A tracer, and how to send what it still holds."""

    tracer: Tracer
    close: Callable[[], None]


def provider(tracing: Tracing, *, tags: Tags, otlp_url: str, agent_url: str) -> Provider | None:
    """The provider of a setting, None if off; raises ProviderFault if it is not installed."""
    if tracing == "off":
        return None
    if tracing == "datadog":
        _configure_ddtrace(tags, agent_url)
    try:
        # only the chosen library is imported: it costs half a second and memory
        chosen = import_module(f"service.telemetry.{tracing}")
    except ImportError as error:
        raise ProviderFault(
            f"tracing with {tracing} needs the extra of this name: {error}"
        ) from error
    made: Provider = chosen.provider(tags, otlp_url)
    return made


def _configure_ddtrace(tags: Tags, url: str) -> None:
    """Set what ddtrace reads when it is imported; an operator's own DD_ variables win."""
    for name, value in {
        "DD_SERVICE": tags.service,
        "DD_ENV": tags.env,
        "DD_VERSION": tags.version,
        "DD_TRACE_AGENT_URL": url,
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    }.items():
        os.environ.setdefault(name, value)
