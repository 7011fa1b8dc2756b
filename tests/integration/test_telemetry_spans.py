"""Spans of a live service, as a real agent receives them from either provider."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.agent import Agent, running_agent
from tests.live import LiveService, client_of, live_service

CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = {"traceparent": f"00-{CALLER[0]:032x}-{CALLER[1]:016x}-01"}
LOW = (1 << 64) - 1
STAGES = ["signals", "queue", "inference", "merge"]
BODY = {"user_id": "u1", "items": [f"sku-{at:05d}" for at in range(30)]}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(tmp_path_factory.mktemp("agent") / "agent.log") as agent:
        yield agent


def settings(agent: Agent, redis_url: str, **more: str) -> dict[str, str]:
    wide = {"timeout_ms": "10000", "signals_budget_ms": "5000", "redis_timeout_ms": "5000"}
    wide |= {"stall_ms": "10000", "max_queue_ms": "5000"}
    tags = {"env": "test", "service": "shop-ranker", "slow_ms": "10000"}
    urls = {"redis_url": redis_url, "agent_url": agent.url, "otlp_url": agent.otlp_url}
    return wide | tags | urls | more


def rank(client: httpx.Client, headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer = client.post("/rank", json=BODY, headers=headers)
    assert answer.status_code == 200, answer.text
    ranking: dict[str, Any] = answer.json()
    return ranking


def named(spans: list[Any], name: str) -> list[Any]:
    return [span for span in spans if span["name"] == name]


@pytest.fixture(scope="module")
def datadog(agent: Agent, valkey_server: str) -> Iterator[LiveService]:
    chosen = settings(agent, valkey_server, tracing="datadog", trace_sample="0")
    with live_service(**chosen) as service:
        # the first load is a swap from nothing; later tests read their own spans alone
        agent.datadog_spans(lambda spans: bool(named(spans, "ranker.swap")))
        yield service


def test_ddtrace_sends_the_tree_that_continues_the_callers_trace(
    agent: Agent, datadog: LiveService
) -> None:
    agent.clear()
    before_ns = time.time_ns()
    with client_of(datadog) as client:
        client.post("/v1/events", json={"type": "click", "user_id": "u1", "item_id": "sku-00003"})
        ranking = rank(client, TRACEPARENT)
    after_ns = time.time_ns()
    spans = agent.datadog_spans(lambda spans: bool(named(spans, "ranker.batch")))
    (root,) = named(spans, "ranker.request")
    assert root["resource"] == "POST /rank"
    assert root["type"] == "web"
    assert root["trace_id"] == CALLER[0] & LOW
    assert root["meta"]["_dd.p.tid"] == f"{CALLER[0] >> 64:016x}"
    assert root["parent_id"] == CALLER[1]
    assert root["metrics"]["_sampling_priority_v1"] == 2
    assert root["meta"]["request.id"] == ranking["request_id"]
    assert before_ns < root["start"] < after_ns
    # the caller may read the answer before the service has noted that it is written
    assert 0 < root["duration"] < after_ns - before_ns + 1_000_000_000
    at_ns = root["start"]
    for stage in STAGES:
        (span,) = named(spans, f"ranker.{stage}")
        assert span["parent_id"] == root["span_id"]
        assert span["start"] >= at_ns - 100_000
        at_ns = span["start"] + span["duration"]
        if stage in ranking["timing_ms"]:
            assert span["duration"] / 1e6 == pytest.approx(ranking["timing_ms"][stage], abs=0.01)
    assert abs(at_ns - root["start"] - root["duration"]) < 100_000
    (batch,) = named(spans, "ranker.batch")
    (link,) = json.loads(batch["meta"]["_dd.span_links"])
    assert int(link["trace_id"], 16) == CALLER[0]
    assert int(link["span_id"], 16) == root["span_id"]
    for span in spans:
        tags = span["meta"] | span["metrics"]
        assert tags["framework"] == "ONNXRuntime"
        assert tags["model.name"] == "shop"
        assert tags["model.version"] == ranking["model"]["version"]
        assert tags["model.precision"] == "fp32"
        assert tags["fallback.reason"] == "none"
        assert tags["batch.size"] == 1
        assert tags["queue.wait_ms"] == pytest.approx(ranking["timing_ms"]["queue"], abs=0.01)
        assert tags["signals.age_ms"] == ranking["signals"]["age_ms"]
        assert (tags["env"], span["service"]) == ("test", "shop-ranker")
        assert tags["version"]


def test_datadogs_own_headers_are_continued(agent: Agent, datadog: LiveService) -> None:
    agent.clear()
    headers = {
        "x-datadog-trace-id": str(CALLER[0] & LOW),
        "x-datadog-parent-id": str(CALLER[1]),
        "x-datadog-sampling-priority": "1",
        "x-datadog-tags": f"_dd.p.tid={CALLER[0] >> 64:016x}",
    }
    with client_of(datadog) as client:
        rank(client, headers)
    spans = agent.datadog_spans(lambda spans: bool(named(spans, "ranker.request")))
    (root,) = named(spans, "ranker.request")
    assert (root["trace_id"], root["parent_id"]) == (CALLER[0] & LOW, CALLER[1])
    assert root["meta"]["_dd.p.tid"] == f"{CALLER[0] >> 64:016x}"


def test_of_unsampled_requests_only_the_notable_ones_are_sent(
    agent: Agent, datadog: LiveService
) -> None:
    agent.clear()
    with client_of(datadog) as client:
        for _ in range(5):
            rank(client)
        late = client.post("/rank", json=BODY, headers={"x-request-timeout-ms": "2.01"})
        assert late.headers["x-degraded"] == "deadline"
    spans = agent.datadog_spans(lambda spans: bool(named(spans, "ranker.request")))
    (root,) = named(spans, "ranker.request")
    assert root["meta"]["kept.because"] == "degraded"
    assert root["meta"]["fallback.reason"] == "deadline"
    line = next(json.loads(line) for line in reversed(datadog.lines) if "deadline" in line)
    assert line["dd.trace_id"] == str(root["trace_id"])
    assert line["dd.span_id"] == str(root["span_id"])


def test_one_batch_span_links_to_all_of_its_requests(agent: Agent, datadog: LiveService) -> None:
    agent.clear()

    def shared(spans: list[Any]) -> list[Any]:
        batches = named(spans, "ranker.batch")
        return [span for span in batches if span["metrics"]["batch.size"] > 1]

    def some_shared(spans: list[Any]) -> bool:
        return bool(shared(spans))

    with client_of(datadog) as client, ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: rank(client, TRACEPARENT), range(64)))
    spans = agent.datadog_spans(some_shared)
    roots = {span["span_id"] for span in named(spans, "ranker.request")}
    for batch in shared(spans):
        links = json.loads(batch["meta"]["_dd.span_links"])
        assert len(links) == batch["metrics"]["batch.size"]
        assert {int(link["span_id"], 16) for link in links} <= roots


def test_opentelemetry_sends_the_same_tree_by_otlp(agent: Agent, valkey_server: str) -> None:
    agent.clear()
    chosen = settings(agent, valkey_server, tracing="otel", trace_sample="1")
    with live_service(**chosen) as service, client_of(service) as client:
        ranking = rank(client, TRACEPARENT)
        assert service.stop() == 0  # what is left is sent before the end
    (resource, *_) = resources = agent.otlp_resources(bool)
    tags = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert tags["service.name"] == "shop-ranker"
    assert tags["deployment.environment.name"] == "test"
    assert tags["service.version"]
    found = [s for sent in resources for scope in sent.scope_spans for s in scope.spans]
    spans = {span.name: span for span in found}
    assert set(spans) == {"swap", "POST /rank", "batch", *STAGES}
    root = spans["POST /rank"]
    assert root.trace_id == CALLER[0].to_bytes(16)
    assert root.parent_span_id == CALLER[1].to_bytes(8)
    assert [link.span_id for link in spans["batch"].links] == [root.span_id]
    for stage in STAGES:
        assert spans[stage].parent_span_id == root.span_id
    for span in spans.values():
        attributes = {entry.key: entry.value for entry in span.attributes}
        assert attributes["framework"].string_value == "ONNXRuntime"
        assert attributes["model.version"].string_value == ranking["model"]["version"]
        assert attributes["fallback.reason"].string_value == "none"


def test_a_provider_that_is_not_there_does_not_slow_or_break_the_service(
    valkey_server: str,
) -> None:
    chosen = {"tracing": "otel", "trace_sample": "1", "otlp_url": "http://127.0.0.1:9"}
    wide = {"timeout_ms": "10000", "signals_budget_ms": "5000", "redis_timeout_ms": "5000"}
    wide |= {"stall_ms": "10000", "max_queue_ms": "5000"}
    with (
        live_service(redis_url=valkey_server, **wide, **chosen) as service,
        client_of(service) as client,
    ):
        for _ in range(20):
            assert rank(client)["degraded"] == []
        assert service.stop() == 0
