"""A run, a curve and a judgement as plain text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from loadtests.driving.samples import Run
from loadtests.verdicts.curve import Curve
from loadtests.verdicts.slo import Judgement, Verdict
from loadtests.verdicts.summary import Percentiles, Summary


def table(rows: Iterable[Sequence[object]], *, header: Sequence[str]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(header))]
    lines = []
    for row in cells:
        first, *others = row
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three figures or the whole part; a dash for what was not measured."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percentile_rows(named: dict[str, Percentiles]) -> list[list[str]]:
    return [
        [name, str(of.count)]
        + [number(value) for value in (of.p50_ms, of.p90_ms, of.p99_ms, of.p999_ms, of.max_ms)]
        for name, of in named.items()
    ]


PERCENTILE_HEADER = ("ms", "count", "p50", "p90", "p99", "p99.9", "max")


def populations(summary: Summary) -> dict[str, Percentiles]:
    """Everything of a run that has percentiles, by name."""
    named = {"all": summary.latency}
    if len(summary.latency_by_kind) > 1:
        named |= summary.latency_by_kind
    named |= {f"stage {name}": of for name, of in summary.stages.items()}
    if summary.signal_age.count:
        named["age of signals"] = summary.signal_age
    if summary.behind.count:
        named["behind the last click"] = summary.behind
    named["generator's lateness"] = summary.lateness
    return named


def verdict_lines(judged: Judgement) -> list[str]:
    lines = [f"verdict: {judged.verdict.name}"]
    lines += [
        f"  {'ok  ' if check.holds else 'MISS'} {check.what} {number(check.measured)}, "
        f"{check.relation} {number(check.bound)}"
        for check in judged.checks
    ]
    if judged.verdict is Verdict.INVALID:
        lines.append("  The generator itself was late: this run says nothing of the server.")
    return lines


def offered_and_served(summary: Summary) -> str:
    return (
        f"offered {summary.offered} ({summary.offered_rate:.1f}/s), served {summary.served} "
        f"({summary.served_rate:.1f}/s, {summary.served_share:.3%}) in {summary.duration_s:.1f} s"
    )


def freshness(summary: Summary) -> str:
    return (
        f"freshness: {summary.fresh_share:.3%} of {summary.after_click} rankings after an "
        "acknowledged click used it"
    )


def run_text(run: Run, summary: Summary, judged: Judgement) -> str:
    """The whole report as text."""
    about = run.description
    cpu_us = about.generator_cpu_s / max(summary.offered, 1) * 1e6
    lines = [
        f"{about.name}: {about.trace} against {about.url}, {about.started_at}",
        offered_and_served(summary),
        table(percentile_rows(populations(summary)), header=PERCENTILE_HEADER),
    ]
    for name, counts in (
        ("errors", summary.errors),
        ("degraded", summary.degraded),
        ("model versions", summary.versions),
        ("batches up to size", about.batches),
    ):
        if counts:
            told = ", ".join(f"{word} {count:.0f}" for word, count in counts.items())
            lines.append(f"{name}: {told}")
    if summary.after_click:
        lines.append(freshness(summary))
    lines += [f"fault at {f.at_s:.2f} s: {f.what}: {f.result}" for f in about.faults]
    lines.append(f"generator: {about.processes} process(es), {cpu_us:.0f} µs of CPU a request")
    lines += verdict_lines(judged)
    return "\n".join(lines)


def curve_text(curve: Curve) -> str:
    rows = [
        [
            f"{point.offered_rate:.0f}/s",
            f"{point.served_rate:.0f}",
            f"{point.served_share:.2%}",
            number(point.p50_ms),
            number(point.p99_ms),
            number(point.server_cpu_us),
            point.verdict.name,
        ]
        for point in curve.points
    ]
    knee = curve.knee
    header = ("offered", "served/s", "share", "p50 ms", "p99 ms", "server µs", "verdict")
    told = "none" if knee is None else f"{knee.offered_rate:.0f} requests/s"
    bound = f"p99 at most {number(curve.objective.p99_ms)} ms, {curve.objective.served:.1%} served"
    return f"{table(rows, header=header)}\nknee: {told} ({bound})"
