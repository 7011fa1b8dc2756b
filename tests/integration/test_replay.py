import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
import pytest

from loadtests.driving import faults, metrics, processes
from loadtests.driving.client import Client
from loadtests.driving.closed import closed_loop
from loadtests.driving.replay import Plan, replay
from loadtests.driving.samples import FAULTS, RunFault
from loadtests.driving.spool import Catalogue, Wire
from loadtests.driving.target import Target
from loadtests.traces import arrivals, synth
from loadtests.traces.trace import Record
from loadtests.verdicts.summary import summarise

pytestmark = pytest.mark.alone


@pytest.fixture
def trivial(tmp_path: Path) -> Iterator[str]:
    """The URL of the server that does nothing but freeze when told."""
    port = processes.free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "loadtests", "trivial", "--port", str(port)]
    log = tmp_path / "trivial.log"
    with processes.running(command, log=log) as process:
        processes.wait_until_ready(url, process, log=log)
        yield url


class _Remembering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, _RememberingServer)
        self.server.seen.append((time.time() * 1e3, self.path, json.loads(body)))
        answer = b'{"signals":{"age_ms":%g}}' % self.server.age_ms
        self.send_response(200 if self.path == "/rank" else 202)
        self.send_header("content-length", str(len(answer)))
        self.send_header("x-model-version", "v7")
        self.send_header("x-degraded", "stale_signals")
        self.send_header("server-timing", 'queue;dur=1.5, cache;desc="x", inference;dur=2')
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's own name
        """Say nothing."""


class _RememberingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Remembering)
        self.age_ms = 12.5
        self.seen: list[tuple[float, str, dict[str, object]]] = []


@pytest.fixture
def remembering() -> Iterator[_RememberingServer]:
    server = _RememberingServer()
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def wire_to(url: str) -> Wire:
    return Wire(target=Target.parse(url), catalogue=Catalogue.numbered(100), run="test")


def quick(**options: object) -> Plan:
    return msgspec.structs.replace(Plan(connections=4, quiet=True), **options)


def poisson(rate: float, duration_s: float) -> list[Record]:
    times = arrivals.poisson(rate, duration_s, np.random.default_rng(1))
    return list(synth.records(times, synth.Population(slates={5: 1.0}), seed=1))


def test_a_freeze_shows_in_the_open_loop_and_hides_in_the_closed_one(trivial: str) -> None:
    freeze = faults.Http(at_s=1.0, path="/freeze?ms=1000")
    run = replay(poisson(200, 3), wire_to(trivial), quick(timeout_s=3.0, schedule=[freeze]))
    open_p99_ms = summarise(run.samples).latency.p99_ms

    async def closed() -> float:
        client = Client(Target.parse(trivial), max_connections=5, timeout_s=3)
        request = client.target.encode("POST", "/rank", b"{}")
        loop = asyncio.create_task(
            closed_loop(client, lambda: request, connections=4, duration_s=3)
        )
        await asyncio.sleep(1)
        await client.request("POST", "/freeze?ms=1000")
        result = await loop
        await client.close()
        assert max(result.latency_s) > 0.8
        return result.percentile_ms(99)

    closed_p99_ms = asyncio.run(closed())
    assert open_p99_ms > 800
    assert closed_p99_ms < 200
    assert [fault.result.split()[0] for fault in run.description.faults] == ["200"]


def test_requests_leave_at_their_times_whatever_the_answers_do(trivial: str) -> None:
    records = poisson(200, 2)
    freeze = faults.Http(at_s=0.5, path="/freeze?ms=800")

    run = replay(records, wire_to(trivial), quick(timeout_s=3.0, schedule=[freeze]))

    assert run.samples.due_s == pytest.approx([r.timestamp / 1e3 for r in records])
    assert np.percentile(run.samples.late_s, 50) < 0.1
    assert run.samples.served.all()


def test_several_generators_share_a_trace_and_lose_nothing(trivial: str) -> None:
    records = poisson(300, 1)

    run = replay(records, wire_to(trivial), quick(processes=2))

    assert len(run.samples) == len(records)
    assert run.samples.served.all()
    assert (np.diff(run.samples.due_s) >= 0).all()
    assert run.description.generator_cpu_s > 0


def test_a_generator_goes_before_others_where_it_may(trivial: str) -> None:
    plan = quick(realtime=True)
    if os.geteuid() == 0:
        assert replay(poisson(100, 0.5), wire_to(trivial), plan).samples.served.all()
    else:
        with pytest.raises(RunFault, match="not permitted"):
            replay(poisson(100, 0.5), wire_to(trivial), plan)


def test_bodies_events_and_headers_arrive_as_the_trace_says(
    remembering: _RememberingServer,
) -> None:
    records = [
        Record(timestamp=0, user="u", items=["a", "b"], surface="home", deadline_ms=40),
        Record(timestamp=30, user="u", event="click"),
        Record(timestamp=60, user="u", event="dwell", dwell_ms=700),
        Record(timestamp=90, user="v", items_seed=5, items_count=3, priority="batch"),
        Record(timestamp=120, path="/rank", body={"any": 1}),
    ]

    run = replay(records, wire_to(f"http://127.0.0.1:{remembering.server_port}"), quick())

    bodies = [(path, body) for _, path, body in remembering.seen]
    assert bodies[0] == (
        "/rank",
        {"user_id": "u", "items": ["a", "b"], "context": {"surface": "home"}, "timeout_ms": 40},
    )
    at_ms, path, click = remembering.seen[1]
    assert (path, click["type"], click["item_id"]) == ("/v1/events", "click", "b")
    stamp = click["ts"]
    assert isinstance(stamp, int)
    assert abs(at_ms - stamp) < 1000
    assert bodies[2][1]["item_id"] == "b"
    assert bodies[2][1]["dwell_ms"] == 700
    assert bodies[3][1]["items"] == Catalogue.numbered(100).slate(5, 3)
    assert bodies[4] == ("/rank", {"any": 1})
    summary = summarise(run.samples)
    assert summary.versions == {"v7": 5}
    assert summary.degraded == {"stale_signals": 5}
    assert summary.stages["inference"].p50_ms == 2
    assert summary.stages["queue"].count == 5
    assert summary.signal_age.p50_ms == 12.5
    assert set(summary.latency_by_kind) == {"rank", "event", "http"}


@pytest.mark.parametrize(("older_ms", "fresh"), [(0, 1), (3000, 0)])
def test_a_ranking_after_a_click_shows_whether_the_click_was_used(
    remembering: _RememberingServer, older_ms: int, fresh: int
) -> None:
    # the click is 900 ms old when the user's next ranking is sent
    records = [
        Record(timestamp=0, user="u", items=["a"]),
        Record(timestamp=100, user="u", event="click", item="a"),
        Record(timestamp=200, user="v", items=["a"]),
        Record(timestamp=1000, user="u", items=["a"]),
    ]
    remembering.age_ms = 850 + older_ms

    run = replay(records, wire_to(f"http://127.0.0.1:{remembering.server_port}"), quick())

    summary = summarise(run.samples)
    assert summary.after_click == 1
    assert summary.fresh_share == fresh


def test_a_silent_server_is_time_outs_at_their_time(trivial: str) -> None:
    freeze = faults.Http(at_s=0.0, path="/freeze?ms=1500")

    run = replay(
        [Record(timestamp=200 + at * 10.0, path="/") for at in range(20)],
        wire_to(trivial),
        quick(timeout_s=0.3, max_connections=8, schedule=[freeze]),
    )

    words = [FAULTS[place] for place in run.samples.fault]
    assert set(words) == {"timeout"}
    assert run.samples.latency_s.min() >= 0.3
    assert summarise(run.samples).served == 0


def test_a_server_without_metrics_has_no_batches(trivial: str) -> None:
    assert metrics.batch_sizes(f"{trivial}/metrics", "ranker_batch_requests") == {}
    nobody = f"http://127.0.0.1:{processes.free_port()}"
    assert metrics.batch_sizes(f"{nobody}/metrics", "ranker_batch_requests") == {}


def test_a_fault_beyond_the_trace_is_told_and_not_waited_for(trivial: str) -> None:
    late = faults.Http(at_s=3600, path="/")

    run = replay(poisson(50, 0.5), wire_to(trivial), quick(schedule=[late]))

    assert [fault.result for fault in run.description.faults] == ["not reached: the trace ended"]


def test_a_server_that_is_not_there_stops_the_run_before_it_begins() -> None:
    nobody = f"http://127.0.0.1:{processes.free_port()}"

    with pytest.raises(RunFault, match="generator 0"):
        replay(poisson(10, 1), wire_to(nobody), quick())


def test_processes_are_stopped_slowed_and_killed_on_schedule(tmp_path: Path) -> None:
    port = processes.free_port()
    command = [sys.executable, "-m", "loadtests", "trivial", "--port", str(port)]
    log = tmp_path / "log"
    with processes.running(command, log=log) as process:
        processes.wait_until_ready(f"http://127.0.0.1:{port}", process, log=log)
        schedule = tmp_path / "faults.json"
        schedule.write_text(
            json.dumps(
                [
                    {"do": "stop", "at_s": 0.2, "process": "server", "for_s": 0.4},
                    {"do": "slow", "at_s": 0.8, "process": "server", "for_s": 0.2, "share": 0.5},
                    {"do": "run", "at_s": 1.0, "command": [sys.executable, "-c", "exit(3)"]},
                    {"do": "signal", "at_s": 1.5, "process": "server", "signal": "KILL"},
                    {"do": "http", "at_s": 1.8, "path": "/"},
                ]
            )
        )
        pids = {"server": process.pid}
        plan = quick(schedule=faults.read_schedule(schedule, pids), pids=pids)
        run = replay(poisson(100, 2.5), wire_to(f"http://127.0.0.1:{port}"), plan)

    samples = run.samples
    during_stop = samples.served & (samples.due_s > 0.25) & (samples.due_s < 0.35)
    assert samples.latency_s[during_stop].min() > 0.1
    killed = samples.due_s > 1.7
    assert not samples.served[killed].any()
    assert set(summarise(samples).errors) <= {"refused", "reset"}
    results = [fault.result for fault in run.description.faults]
    assert results[:4] == ["stopped and continued", "slowed and let go", "exit code 3", "sent"]
    assert results[4].startswith("failed: ")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"do": "stop", "at_s": 1, "process": "store", "for_s": 1}, r"\[0\].process is 'store'"),
        ({"do": "signal", "at_s": 1, "process": "me", "signal": "LOUD"}, "no signal SIGLOUD"),
        ({"do": "slow", "at_s": 1, "process": "me", "for_s": 1, "share": 2}, "between 0 and 1"),
        ({"do": "http", "at_s": 1, "path": "/", "token_env": "NO_SUCH"}, "NO_SUCH is not set"),
        ({"do": "dance", "at_s": 1}, "dance"),
        ({"do": "http", "path": "/"}, "at_s"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(
    tmp_path: Path, entry: dict[str, object], reason: str
) -> None:
    schedule = tmp_path / "faults.json"
    schedule.write_text(json.dumps([entry]))

    with pytest.raises(faults.ScheduleFault, match=reason):
        faults.read_schedule(schedule, {"me": 1})


def test_generators_take_servers_in_turn(remembering: _RememberingServer, trivial: str) -> None:
    """A user's requests all go to one server."""
    host, port = remembering.server_address[:2]
    targets = [Target.parse(f"http://{host!s}:{port}"), Target.parse(trivial)]
    records = [
        Record(timestamp=at * 5.0, user=f"u{at % 20}", items_seed=1, items_count=3)
        for at in range(40)
    ]
    wire = Wire(target=targets[0], catalogue=Catalogue.numbered(10), run="turns")
    done = replay(records, wire, Plan(processes=2, targets=targets, quiet=True))
    assert done.samples.served.all()
    users = [body["user_id"] for _, _, body in remembering.seen]
    assert 0 < len(users) < 40
    assert len(users) == 2 * len(set(users))
