import math
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogReader

from loadtests.driving.samples import FAULTS, AppliedFault, Description, Run, RunFault, Samples
from loadtests.verdicts.charts import Chart, Line
from loadtests.verdicts.comparison import p99_ratio
from loadtests.verdicts.curve import Curve, Point
from loadtests.verdicts.hdrlog import write_log
from loadtests.verdicts.page import comparison_page, run_page
from loadtests.verdicts.pricing import (
    Capacity,
    Case,
    CaseFault,
    Traffic,
    check_claims,
    compute,
)
from loadtests.verdicts.slo import Objective, Verdict
from loadtests.verdicts.summary import by_second, summarise
from loadtests.verdicts.text import curve_text, run_text


def samples_of(
    latency_ms: list[float],
    *,
    status: list[int] | None = None,
    fault: list[str] | None = None,
    late_ms: float = 0.0,
    rate: float = 100.0,
) -> Samples:
    count = len(latency_ms)
    status = [200] * count if status is None else status
    faults = [""] * count if fault is None else fault
    degraded = np.zeros(count, np.uint16)
    degraded[::10] = 1
    return Samples(
        due_s=np.arange(count) / rate,
        late_s=np.full(count, late_ms / 1e3),
        latency_s=np.array(latency_ms) / 1e3,
        kind=np.zeros(count, np.uint8),
        status=np.array(status, np.int16),
        fault=np.array([FAULTS.index(word) for word in faults], np.uint8),
        degraded=degraded,
        version=np.full(count, 2, np.uint16),
        signal_age_ms=np.full(count, np.nan, np.float32),
        behind_ms=np.full(count, np.nan, np.float32),
        stages={"queue": np.full(count, 1.5, np.float32)},
        words=["", "overload", "v1"],
    )


def run_of(samples: Samples) -> Run:
    about = Description(
        name="<b>run</b>",
        url="127.0.0.1:1",
        trace="t.jsonl",
        started_at="2026-01-01T00:00:00+00:00",
        timeout_ms=1000,
        processes=1,
        max_connections=8,
        faults=[AppliedFault(1.0, "stop store for 1 s", "stopped and continued")],
        batches={"8": 12},
        machine={"processor": "x"},
    )
    return Run(about, samples)


def test_time_outs_count_at_their_time_and_quick_refusals_do_not_flatter() -> None:
    samples = samples_of(
        [10.0] * 98 + [1000.0, 0.1],
        status=[200] * 98 + [0, 503],
        fault=[""] * 98 + ["timeout", ""],
    )

    summary = summarise(samples)

    assert summary.latency.count == 99
    assert summary.latency.max_ms == 1000
    assert summary.served_share == 0.98
    assert summary.errors == {"timeout": 1, "status 503": 1}
    assert summary.degraded == {"overload": 10}
    assert summary.versions == {"v1": 98}
    assert summary.stages["queue"].p99_ms == 1.5


@pytest.mark.parametrize(
    ("latency_ms", "late_ms", "objective", "verdict"),
    [
        (40, 0.1, Objective(p99_ms=50), Verdict.PASS),
        (60, 0.1, Objective(p99_ms=50), Verdict.FAIL),
        (40, 5.1, Objective(p99_ms=50), Verdict.INVALID),
        (60, 5.1, Objective(p99_ms=50), Verdict.INVALID),
        (40, 0.1, Objective(p99_ms=50, p50_ms=30), Verdict.FAIL),
        (40, 0.1, Objective(p99_ms=50, degraded=0.05), Verdict.FAIL),
        (40, 0.1, Objective(p99_ms=50, degraded=0.1), Verdict.PASS),
    ],
)
def test_the_verdict_follows_the_objective_and_a_late_generator_proves_nothing(
    latency_ms: float, late_ms: float, objective: Objective, verdict: Verdict
) -> None:
    summary = summarise(samples_of([latency_ms] * 200, late_ms=late_ms))

    assert objective.judge(summary).verdict is verdict
    assert objective.judge(summary, undone=1).verdict is Verdict.INVALID


def test_quick_errors_fail_by_the_served_share() -> None:
    samples = samples_of([1.0] * 100, status=[503] * 2 + [200] * 98)

    judged = Objective(p99_ms=50).judge(summarise(samples))

    assert judged.verdict is Verdict.FAIL
    assert [check.what for check in judged.checks if not check.holds] == ["served share"]


def test_slow_events_do_not_hide_in_rankings_nor_rankings_in_events() -> None:
    samples = samples_of([10.0] * 50 + [90.0] * 50)
    samples.kind[50:] = 1
    assert Objective(p99_ms=50).judge(summarise(samples)).verdict is Verdict.PASS

    samples.kind[:] = 1 - samples.kind
    assert Objective(p99_ms=50).judge(summarise(samples)).verdict is Verdict.FAIL


def test_rankings_that_miss_an_acknowledged_click_are_counted() -> None:
    samples = samples_of([1.0] * 100)
    samples.behind_ms[:8] = [0, 0, 0, 0, 0, 0, 40, math.inf]

    summary = summarise(samples)

    assert (summary.after_click, summary.fresh_share) == (8, 0.75)
    assert (summary.behind.count, summary.behind.max_ms) == (7, 40)
    judged = Objective(p99_ms=50).judge(summary)
    assert "75.000% of 8 rankings" in run_text(run_of(samples), summary, judged)


def test_a_run_that_served_nothing_fails() -> None:
    summary = summarise(samples_of([1.0] * 10, status=[503] * 10))

    assert math.isnan(summary.latency.p99_ms)
    assert Objective(p99_ms=50).judge(summary).verdict is Verdict.FAIL


def test_series_belong_to_the_second_in_which_a_request_was_due() -> None:
    latency_ms = [5.0] * 100 + [900.0] * 100 + [5.0] * 50

    series = by_second(samples_of(latency_ms))

    assert series.offered.tolist() == [100, 100, 50]
    assert series.p50_ms.tolist() == [5, 900, 5]
    assert series.degraded.tolist() == [10, 10, 5]
    assert series.versions["v1"].tolist() == [100, 100, 50]


def test_samples_survive_the_disk_and_generators_merge_in_order(tmp_path: Path) -> None:
    first, second = samples_of([1.0, 2.0, 3.0]), samples_of([4.0, 5.0])
    second.words = ["", "v2", "deadline"]  # the same places, other words
    second.stages = {"inference": np.array([7, 8], np.float32)}
    run = run_of(Samples.merge([first, second]))
    run.save(tmp_path / "run")

    back = Run.load(tmp_path / "run")

    assert back.description == run.description
    assert back.samples.due_s.tolist() == sorted(back.samples.due_s.tolist())
    assert summarise(back.samples).versions == {"v1": 3, "deadline": 2}
    assert summarise(back.samples).degraded == {"overload": 1, "v2": 1}
    assert np.isnan(back.samples.stages["inference"]).sum() == 3
    with pytest.raises(RunFault, match="not the folder of a run"):
        Run.load(tmp_path)


def test_the_same_server_twice_has_a_ratio_of_one_inside_the_interval() -> None:
    chance = np.random.default_rng(1)
    legs = [
        (samples_of(chance.exponential(10, 1000).tolist()), samples_of(side.tolist()))
        for side in chance.exponential(10, (2, 1000))
    ]

    ratio = p99_ratio(legs)

    assert ratio.low < 1 < ratio.high
    assert ratio.blocks == 20
    assert ratio.judge(0.8) is not Verdict.PASS


def test_a_server_faster_by_a_third_passes_at_eight_tenths_and_its_rival_fails() -> None:
    chance = np.random.default_rng(1)
    slow = [samples_of(side.tolist()) for side in chance.exponential(10, (4, 1000))]
    fast = [samples_of(side.tolist()) for side in chance.exponential(6.5, (4, 1000))]

    ratio = p99_ratio(list(zip(slow, fast, strict=True)))

    assert ratio.estimate == pytest.approx(0.65, rel=0.2)
    assert ratio.judge(0.8) is Verdict.PASS
    assert p99_ratio(list(zip(fast, slow, strict=True))).judge(1.0) is Verdict.FAIL


def test_a_few_seconds_decide_nothing() -> None:
    chance = np.random.default_rng(0)
    fast, slow = (
        [samples_of(list(chance.exponential(mean_ms, 500))) for _ in range(3)]
        for mean_ms in (1.0, 9.0)
    )
    few = p99_ratio(list(zip(fast, slow, strict=True)))
    assert few.blocks == 15
    assert few.low > 1
    assert few.judge(1.0) is Verdict.UNDECIDED


def test_runs_without_a_common_second_cannot_be_compared() -> None:
    nothing = samples_of([1.0] * 10, status=[503] * 10)

    with pytest.raises(ValueError, match="no second in common"):
        p99_ratio([(nothing, nothing)])


def point(rate: float, verdict: Verdict, p99_ms: float | None = 20.0) -> Point:
    return Point(
        offered_rate=rate, served_rate=rate, served_share=1, p50_ms=5, p99_ms=p99_ms,
        verdict=verdict,
    )  # fmt: skip


def test_the_knee_is_the_last_rate_before_the_first_miss(tmp_path: Path) -> None:
    points = [
        point(100, Verdict.PASS),
        point(200, Verdict.PASS),
        point(300, Verdict.FAIL, None),
        point(400, Verdict.PASS),
    ]
    curve = Curve(name="c", objective=Objective(p99_ms=50), points=points)
    curve.save(tmp_path / "curve.json")

    back = Curve.load(tmp_path / "curve.json")

    assert back == curve
    assert back.knee == points[1]
    assert "knee: 200 requests/s" in curve_text(back)
    assert Curve(name="c", objective=curve.objective, points=points[2:]).knee is None


class _Page(HTMLParser):
    """Checks that tags close in order, and gathers what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_loads_nothing_and_tells_what_the_text_tells() -> None:
    samples = samples_of([5.0] * 200 + [70.0] * 10, status=[200] * 205 + [503] * 5)
    run, summary = run_of(samples), summarise(samples)
    judged = Objective(p99_ms=50).judge(summary)
    curve = Curve(name="c", objective=Objective(p99_ms=50), points=[point(1, Verdict.PASS)])

    page = _Page()
    page.feed(run_page(run, summary, judged, curve))

    assert page.open == []
    assert page.links == []
    told = " ".join(page.text)
    for word in ("<b>run</b>", "Fail", "status 503", "overload", "stop store for 1 s", "knee"):
        assert word in told
    text = run_text(run, summary, judged)
    assert "verdict: FAIL" in text
    assert "status 503 5" in text


def test_the_page_of_two_sides_names_both() -> None:
    legs = {"tortoise": [samples_of([9.0] * 50)], "hare": [samples_of([3.0] * 50)]}

    page = _Page()
    page.feed(comparison_page(legs, verdict=Verdict.UNDECIDED, lines=["a line"]))

    assert page.open == []
    assert {"tortoise", "hare", "a line"} <= set(page.text)


def test_a_chart_leaves_gaps_and_keeps_spikes() -> None:
    x = np.arange(5000, dtype=np.float64)
    y = np.ones(5000)
    y[100:200] = np.nan
    y[2500] = 77.0

    svg = Chart(lines=[Line("a", x, y)], x_label="s", y_label="ms", dots=True).svg()

    assert "a: 77" in svg
    assert svg.count("M") == 2
    assert not Chart(lines=[], x_label="s", y_label="ms").svg()


def test_the_histogram_log_holds_every_timed_request(tmp_path: Path) -> None:
    samples = samples_of([float(at % 50 + 1) for at in range(500)], status=[503] + [200] * 499)
    write_log(tmp_path / "latency.hlog", samples)

    total = HdrHistogram(1, 3_600_000_000, 3)
    reader = HistogramLogReader(str(tmp_path / "latency.hlog"), total)
    intervals = 0
    while reader.add_next_interval_histogram(total):
        intervals += 1
    reader.close()

    assert intervals == 5
    assert total.get_total_count() == 499
    assert total.get_value_at_percentile(50) == pytest.approx(25_000, rel=0.05)


def test_replicas_come_from_the_peak_and_money_from_their_hours() -> None:
    case = Case(
        price_per_hour=2.0,
        traffic=Traffic(peak_per_s=1000, mean_per_s=250),
        utilization=0.5,
        baseline=Capacity(requests_per_s=100),
        candidate=Capacity(latency_ms=20, concurrency=8),
        engineering_cost=10_000,
        hours_per_year=8760,
        claims={"baseline.replicas": 20, "saving.year": 1.0, "happiness": 3},
    )

    lines = compute(case)
    value = {line.name: line.value for line in lines}

    assert value["baseline.replicas"] == 20
    assert value["candidate.requests_per_s"] == 400
    assert value["candidate.in_flight"] == 20
    assert value["candidate.replicas"] == 5
    assert value["baseline.year"] == 20 * 2 * 8760
    assert value["saving.year"] == 15 * 2 * 8760
    assert value["saving.share"] == 0.75
    assert value["baseline.million_requests"] == pytest.approx(20 * 2 / (250 * 3600) * 1e6)
    assert value["break_even.months"] == pytest.approx(10_000 / (15 * 2 * 8760 / 12))
    verdicts = {claim.name: claim.verdict for claim in check_claims(case, lines)}
    assert verdicts == {
        "baseline.replicas": "holds",
        "saving.year": "does not hold",
        "happiness": "cannot be computed",
    }


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(price_per_hour=1, baseline=Capacity()), "baseline has one of"),
        (Case(price_per_hour=1, baseline=Capacity(replicas=1, concurrency=1)), "has one of"),
        (Case(price_per_hour=1, baseline=Capacity(requests_per_s=1)), "`traffic` is needed"),
        (Case(price_per_hour=0, baseline=Capacity(replicas=1)), "price_per_hour"),
        (Case(price_per_hour=1, utilization=0, baseline=Capacity(replicas=1)), "utilization"),
        (
            Case(
                price_per_hour=1,
                traffic=Traffic(peak_per_s=1, mean_per_s=1),
                baseline=Capacity(concurrency=5),
            ),
            "latency_ms",
        ),
    ],
)
def test_a_case_that_cannot_be_computed_says_why(case: Case, reason: str) -> None:
    with pytest.raises(CaseFault, match=reason):
        compute(case)


def example(name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Results and verdicts on the claims of a case among the examples."""
    case = msgspec.json.decode(Path("loadtests/examples", name).read_bytes(), type=Case)
    lines = compute(case)
    claims: dict[str, str] = {claim.name: claim.verdict for claim in check_claims(case, lines)}
    return {line.name: line.value for line in lines}, claims


def test_the_int8_example_holds_in_its_sums_and_not_in_its_speedup() -> None:
    value, claims = example("int8.json")

    assert value["baseline.month"] == pytest.approx(60 * 3.06 * 730)
    assert value["candidate.year"] == pytest.approx(26 * 3.06 * 8760)
    assert value["saving.year"] == pytest.approx(34 * 3.06 * 8760)
    assert value["speedup"] == pytest.approx(60 / 26)
    assert claims == {"baseline.month": "holds", "saving.year": "holds", "speedup": "does not hold"}


def test_a_doubled_throughput_halves_the_replicas_and_no_more() -> None:
    value, claims = example("int8-by-speedup.json")

    assert value["candidate.replicas"] == 30
    assert value["saving.year"] == pytest.approx(30 * 3.06 * 8760)
    assert set(claims.values()) == {"does not hold"}


def test_only_a_candidate_has_a_speedup() -> None:
    with pytest.raises(CaseFault, match=r"baseline\.speedup"):
        compute(Case(price_per_hour=1, baseline=Capacity(speedup=2)))
