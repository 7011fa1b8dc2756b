import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtests.__main__ import main as loadtests
from loadtests.traces import arrivals, importers, synth, trace
from loadtests.traces.shape import Shape, faster, loop, superpose, times_s
from loadtests.traces.trace import Record, TraceFault


def chance() -> np.random.Generator:
    return np.random.default_rng(7)


def rankings(*times_ms: float) -> list[Record]:
    return [
        Record(timestamp=time, user=f"u{at}", items_seed=at, items_count=3)
        for at, time in enumerate(times_ms)
    ]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_trace_reads_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    records = [
        Record(timestamp=0, user="u", items=["a", "b"], surface="home", deadline_ms=40),
        Record(timestamp=1.5, user="u", event="click", item="a"),
        Record(timestamp=2, user="u", event="dwell", item="a", dwell_ms=900),
        Record(timestamp=3, path="/x", method="PUT", body={"k": [1]}),
        Record(timestamp=4, path="/y", body="as it is"),
    ]

    assert trace.write(tmp_path / name, records) == 5
    assert list(trace.read(tmp_path / name)) == records
    assert [record.kind for record in records] == ["rank", "event", "event", "http", "http"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ('{"user":"u","items":["a"]}', "timestamp"),
        ('{"timestamp":-1,"user":"u","items":["a"]}', "`timestamp` is negative"),
        ('{"timestamp":1,"items":["a"]}', "`user` is missing"),
        ('{"timestamp":1,"user":"u"}', "a line has one of"),
        ('{"timestamp":1,"user":"u","items":["a"],"event":"click"}', "a line has one of"),
        ('{"timestamp":1,"user":"u","items_seed":1}', "go together"),
        ('{"timestamp":1,"user":"u","items_seed":1,"items_count":0}', "`items_count`"),
        ('{"timestamp":1,"user":"u","event":"sneeze"}', r"\$.event"),
        ('{"timestamp":1,"user":"u","items":["a"],"colour":"red"}', "colour"),
        ('{"timestamp":5,"path":"/"}\n{"timestamp":4,"path":"/"}', "4 comes before"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"timestamp":0,"path":"/"}}\n{line}\n')

    with pytest.raises(TraceFault, match=rf"line [23]:.*{reason}"):
        list(trace.read(path))


def test_a_cut_archive_is_a_fault_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"timestamp":0,"path":"/"}\n' * 50)[:-12])

    with pytest.raises(TraceFault, match="after line"):
        list(trace.read(path))


def test_counts_give_exactly_their_arrivals_in_each_second(tmp_path: Path) -> None:
    path = tmp_path / "counts.txt"
    path.write_text("3 0 2\n")

    times = arrivals.from_counts(synth.read_counts(path), chance())

    assert np.bincount(times.astype(int), minlength=3).tolist() == [3, 0, 2]
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("text", ["", "1 two", "1 -2"])
def test_counts_that_are_no_counts_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counts.txt"
    path.write_text(text)

    with pytest.raises(TraceFault, match="per-second counts"):
        synth.read_counts(path)


def test_stamps_keep_their_fractions_of_a_second(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("AT,x\n2023-11-16 18:17:03.9799600,1\n2023-11-16 18:17:04.0319600,2\n")

    assert synth.read_stamps(path, "AT") == pytest.approx([0, 0.052], abs=1e-5)
    with pytest.raises(TraceFault, match="no column 'WHEN'; there are AT, x"):
        synth.read_stamps(path, "WHEN")


def test_gamma_gaps_have_the_rate_and_variation_asked_for() -> None:
    gaps = np.diff(arrivals.gamma(200, 3, 400, chance()))

    assert 1 / gaps.mean() == pytest.approx(200, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(3, rel=0.1)


def test_dispersion_tells_poisson_from_bursts() -> None:
    calm = arrivals.poisson(100, 300, chance())
    bursty = arrivals.mmpp((20, 500), (5, 1), 300, chance())

    assert arrivals.dispersion(calm) == pytest.approx(1, abs=0.3)
    assert arrivals.dispersion(bursty) > 20


@pytest.mark.parametrize(
    ("rate", "window", "expected"),
    [
        (arrivals.step(50, 400, 50), (60, 90), 400),
        (arrivals.spike(50, 400, 50, 10), (50, 60), 400),
        (arrivals.spike(50, 400, 50, 10), (60, 100), 50),
        (arrivals.ramp(0, 400, 100), (45, 55), 200),
        (arrivals.diurnal(50, 400, 100), (40, 60), 391.5),
        (arrivals.flash_sale(50, 400, 50, 10), (60, 60.5), 222),
    ],
)
def test_models_have_their_rate_where_it_belongs(
    rate: arrivals.Rate, window: tuple[float, float], expected: float
) -> None:
    draws = chance()
    times = np.concatenate([arrivals.varying(rate, 400, 100, draws) for _ in range(20)])
    start, end = window

    measured = np.count_nonzero((times >= start) & (times < end)) / (end - start) / 20
    assert measured == pytest.approx(expected, rel=0.15)


def test_users_follow_zipf_and_events_follow_their_request() -> None:
    times = arrivals.poisson(200, 60, chance())
    people = synth.Population(users=100, zipf=1.0, slates={20: 3, 100: 1}, clicks=0.3, dwell_s=5)

    records = list(synth.records(times, people, seed=1))

    ranks = [record for record in records if record.kind == "rank"]
    users = [record.user for record in ranks]
    assert users.count("u0") / max(users.count("u9"), 1) == pytest.approx(10, rel=0.4)
    sizes = [record.items_count for record in ranks]
    assert sizes.count(20) / sizes.count(100) == pytest.approx(3, rel=0.15)
    stamps = [record.timestamp for record in records]
    assert stamps == sorted(stamps)
    clicks = [record for record in records if record.event == "click"]
    assert len(clicks) / len(ranks) == pytest.approx(0.3, abs=0.04)
    first = clicks[0]
    assert any(r.user == first.user and r.timestamp < first.timestamp for r in ranks)
    assert records == list(synth.records(times, people, seed=1))


def test_speed_changes_time_alone() -> None:
    fast = faster(rankings(0, 100, 400), 4)

    assert [record.timestamp for record in fast] == [0, 25, 100]
    assert [record.user for record in fast] == ["u0", "u1", "u2"]


def test_superposed_copies_keep_the_length_and_have_users_of_their_own() -> None:
    records = rankings(*np.linspace(0, 60_000, 2000).tolist())

    more = superpose(records, 2.5, seed=3)

    assert len(more) == pytest.approx(5000, rel=0.05)
    assert max(times_s(more)) <= 60
    assert len({record.user for record in more}) == len(more)


def test_a_thinned_trace_keeps_all_that_its_users_do() -> None:
    records = [Record(timestamp=float(at), user=f"u{at % 50}", event="click") for at in range(1000)]

    fewer = superpose(records, 0.4, seed=3)

    counts = {user: sum(r.user == user for r in fewer) for user in {r.user for r in fewer}}
    assert set(counts.values()) == {20}
    assert 10 <= len(counts) <= 30


def test_loops_follow_without_a_gap_or_an_overlap_and_draw_new_slates() -> None:
    twice = loop(rankings(0, 10, 20), 2, seed=1)

    assert [record.timestamp for record in twice] == [0, 10, 20, 30, 40, 50]
    assert twice[3].items_seed != twice[0].items_seed
    assert twice == loop(rankings(0, 10, 20), 2, seed=1)


def test_the_peak_is_the_busiest_stretch() -> None:
    quiet = np.arange(0, 100_000, 1000).tolist()
    busy = np.arange(50_100, 55_000, 10).tolist()

    peak = Shape(peak_s=5).apply(rankings(*sorted(quiet + busy)))

    assert len(peak) == 495
    assert peak[0].timestamp == 0


def test_nothing_left_is_said() -> None:
    with pytest.raises(TraceFault, match="nothing of the trace is left"):
        Shape(start_s=10).apply(rankings(0, 100))


def test_nginx_lines_become_requests(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text(
        '10.0.0.1 - - [10/Oct/2025:13:55:36 +0200] "GET /a?b=1 HTTP/1.1" 200 12 "-" "curl"\n'
        '10.0.0.2 - eve [1760097337.250] "POST /b HTTP/2.0" 503 0 "-" "-"\n'
    )

    records = trace.in_order(importers.read("nginx", path))

    assert [(r.timestamp, r.method, r.path) for r in records] == [
        (0, "GET", "/a?b=1"),
        (1250, "POST", "/b"),
    ]
    ranked = list(importers.as_rankings(records, slate=30))
    assert [(r.user, r.items_count, r.kind) for r in ranked] == [
        ("10.0.0.1", 30, "rank"),
        ("10.0.0.2", 30, "rank"),
    ]


def test_goreplay_requests_are_read_and_its_answers_left_out(tmp_path: Path) -> None:
    path = tmp_path / "traffic.gor"
    break_ = "\n🐵🙈🙉\n".encode()
    first = b'POST /rank HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{"a":1}'
    second = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    path.write_bytes(
        b"1 aa 1000000000\n" + first + break_
        + b"2 aa 1001000000 99\nHTTP/1.1 200 OK\r\n\r\n" + break_
        + b"1 bb 1500000000\n" + second + break_
    )  # fmt: skip

    records = trace.in_order(importers.read("gor", path))

    assert [(r.timestamp, r.method, r.path, r.body) for r in records] == [
        (0, "POST", "/rank", '{"a":1}'),
        (500, "GET", "/livez", None),
    ]


def test_har_entries_become_requests(tmp_path: Path) -> None:
    path = tmp_path / "page.har"
    entry = {
        "startedDateTime": "2025-10-10T10:00:00.250Z",
        "request": {"method": "POST", "url": "https://h/x/y?z", "postData": {"text": "{}"}},
        "response": {},
    }
    path.write_text(json.dumps({"log": {"entries": [entry], "version": "1.2"}}))

    (record,) = trace.in_order(importers.read("har", path))

    assert (record.method, record.path, record.body) == ("POST", "/x/y?z", "{}")


def test_mooncake_lines_become_rankings(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 27482, "input_length": 6955, "output_length": 52, '
                    '"hash_ids": [46, 47]}\n')  # fmt: skip

    (record,) = trace.in_order(importers.read("mooncake", path))

    assert (record.user, record.items_count, record.timestamp) == ("u46", 70, 0)


@pytest.mark.parametrize(
    ("source", "content"),
    [("nginx", "hello\n"), ("har", "{}"), ("mooncake", "{}\n"), ("gor", "1 a x\nGET /\n")],
)
def test_a_source_that_is_something_else_is_refused(
    tmp_path: Path, source: str, content: str
) -> None:
    path = tmp_path / "source"
    path.write_text(content)

    with pytest.raises(TraceFault, match=str(path)):
        list(importers.read(source, path))
    with pytest.raises(TraceFault, match="No such file"):
        list(importers.read(source, tmp_path / "absent"))


def test_every_record_of_a_trace_is_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace.write(path, rankings(0, 1))

    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert lines[1] == {"timestamp": 1, "user": "u1", "items_seed": 1, "items_count": 3}


@pytest.mark.parametrize("option", ["--rate", "--high", "--duration-s", "--cv"])
def test_a_model_of_nothing_is_refused_with_its_option(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["loadtests", "synth", "poisson", str(tmp_path / "t.jsonl"), option, "-4"]
    monkeypatch.setattr("sys.argv", words)
    assert loadtests() == 2
    assert capsys.readouterr().err == f"synth: {option} is not above 0\n"
