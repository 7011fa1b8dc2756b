"""Logs as JSON lines on standard error; they name no user and no item."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from service.ranking.query import Report

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, then what `extra` gave."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def start_logging(level: str) -> None:
    """Send every logger of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers[:] = []
        logging.getLogger(name).propagate = True


def request_line(report: Report) -> dict[str, Any]:
    """The fields of a request's own line."""
    times = report.times
    fields: dict[str, Any] = {
        "request_id": report.request_id,
        "route": report.route,
        "status": report.status,
        "outcome": report.outcome,
        "total_ms": round(times.total_s * 1e3, 3),
    }
    if report.detail:
        fields["detail"] = report.detail
    if report.backend is None:
        return fields
    return fields | {
        "degraded": report.degraded,
        "model": report.model_name,
        "version": report.model_version,
        "backend": report.backend,
        "precision": report.precision,
        "candidates": report.candidates,
        "batch_requests": report.batch.requests if report.batch else 0,
        "signals_source": report.signal_source,
        "signals_age_ms": report.signal_age_ms,
        "signals_ms": round(times.signals_s * 1e3, 3),
        "queue_ms": round(times.queue_s * 1e3, 3),
        "inference_ms": round(times.inference_s * 1e3, 3),
    }
