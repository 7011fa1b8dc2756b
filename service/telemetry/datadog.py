"""Spans to a Datadog agent; the only importer of ddtrace, which patches nothing here.

Import it through `providers`, which sets what ddtrace reads at its import.
"""

from __future__ import annotations

from ddtrace.opentelemetry import TracerProvider
from ddtrace.trace import tracer

from service.telemetry.providers import SCOPE, Provider, Tags


def provider(_tags: Tags, _url: str) -> Provider:
    """A tracer of ddtrace behind the OpenTelemetry API."""
    return Provider(TracerProvider().get_tracer(SCOPE), tracer.shutdown)
