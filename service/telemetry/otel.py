"""Spans to an OpenTelemetry collector; the only importer of opentelemetry.sdk and its exporter."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from service.telemetry.providers import SCOPE, Provider, Tags

_SEND_TIMEOUT_S = 5
_MOST_SPANS = 8_192
"""That wait to be sent; more are dropped."""


def provider(tags: Tags, url: str) -> Provider:
    """OpenTelemetry's SDK with OTLP over HTTP to `url`, from a thread of its own."""
    resource = Resource.create(
        {
            "service.name": tags.service,
            "service.version": tags.version,
            "deployment.environment.name": tags.env,
            "deployment.environment": tags.env,  # the older name, which Datadog's intake reads
        }
    )
    # whoever writes a span has decided already that it is kept
    made = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT_S)
    made.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MOST_SPANS))
    return Provider(made.get_tracer(SCOPE), made.shutdown)
