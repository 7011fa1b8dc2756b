"""`python -m tests.show_trace`: one request's trace, as Datadog's test agent received it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.agent import running_agent
from tests.live import client_of, live_service

TRACEPARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
TAGS = ("framework", "model.version", "model.precision", "fallback.reason", "kept.because")
FIGURES = ("batch.size", "queue.wait_ms", "signals.age_ms")
WIDTH = 36


def bar(span: dict[str, Any], root: dict[str, Any]) -> str:
    """Where the span lies within its request."""
    scale = WIDTH / root["duration"]
    before = int((span["start"] - root["start"]) * scale)
    length = max(1, round(span["duration"] * scale))
    return f"{' ' * before}{'=' * length}".ljust(WIDTH)[:WIDTH]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running_agent(Path(folder, "log")) as agent:
        settings = {"tracing": "datadog", "trace_sample": "0", "agent_url": agent.url}
        with (
            live_service(**settings, signals_budget_ms="500") as service,
            client_of(service) as client,
        ):
            body = {"user_id": "u1", "items": [f"sku-{at:05d}" for at in range(100)]}
            client.post("/rank", json=body)
            event = {"type": "click", "user_id": "u1", "item_id": "sku-00007"}
            client.post("/v1/events", json=event).raise_for_status()
            client.post("/rank", json=body, headers=TRACEPARENT).raise_for_status()
            spans = agent.datadog_spans(
                lambda spans: any(span["name"] == "ranker.batch" for span in spans)
            )
    (root,) = [span for span in spans if span["parent_id"] == 0xB7AD6B7169203331]
    children = [span for span in spans if span["parent_id"] == root["span_id"]]
    (batch,) = [span for span in spans if "_dd.span_links" in span["meta"]]
    print(f"trace {root['meta']['_dd.p.tid']}{root['trace_id']:016x}, service {root['service']}")
    for indent, span in [("", root), *(("  ", child) for child in children), ("", batch)]:
        name = f"{indent}{span['name']}"
        print(f"{name:<20} {span['duration'] / 1e6:7.3f} ms |{bar(span, root)}| {span['resource']}")
    print("batch links to", batch["meta"]["_dd.span_links"])
    shown = {tag: root["meta"][tag] for tag in TAGS} | {
        tag: root["metrics"][tag] for tag in FIGURES
    }
    print("tags", ", ".join(f"{name}={value}" for name, value in shown.items()))


if __name__ == "__main__":
    main()
