"""Trace context of a request's headers: W3C `traceparent`, or Datadog's own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_DATADOG_HIGH = re.compile(rb"(?:^|,)_dd\.p\.tid=([0-9a-f]{16})(?:,|$)")
_FIRST_LETTERS = frozenset({b"trace", b"x-dat"})
_LOW = (1 << 64) - 1


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> SpanContext | None:
    """The caller's span, or None; `traceparent` wins, and what does not parse is ignored."""
    found = {name: value for name, value in headers if name[:5] in _FIRST_LETTERS}
    if not found:
        return None
    return _from_w3c(found) or _from_datadog(found)


def _from_w3c(found: dict[bytes, bytes]) -> SpanContext | None:
    match = _TRACEPARENT.fullmatch(found.get(b"traceparent", b"").strip())
    if match is None:
        return None
    state = found.get(b"tracestate", b"").decode("latin-1")
    return _context(
        int(match[1], 16),
        int(match[2], 16),
        sampled=bool(int(match[3], 16) & TraceFlags.SAMPLED),
        state=TraceState.from_header([state]) if state else None,
    )


def _from_datadog(found: dict[bytes, bytes]) -> SpanContext | None:
    try:
        low = int(found[b"x-datadog-trace-id"])
        span_id = int(found[b"x-datadog-parent-id"])
        priority = int(found.get(b"x-datadog-sampling-priority", b"1"))
    except (KeyError, ValueError):
        return None
    high = _DATADOG_HIGH.search(found.get(b"x-datadog-tags", b""))
    trace_id = (int(high[1], 16) << 64 if high else 0) | (low & _LOW)
    return _context(trace_id, span_id & _LOW, sampled=priority > 0, state=None)


def _context(
    trace_id: int, span_id: int, *, sampled: bool, state: TraceState | None
) -> SpanContext | None:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags, trace_state=state)
    return context if context.is_valid else None


def log_ids(context: SpanContext) -> dict[str, str]:
    """The ids under the names by which OpenTelemetry and Datadog join logs to traces."""
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "dd.trace_id": str(context.trace_id & _LOW),
        "dd.span_id": str(context.span_id),
    }
