"""One HTML page of a run that works offline: verdict, curves, tables, machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from loadtests.driving.samples import Run, Samples
from loadtests.verdicts.charts import Chart, FloatArray, Line, Mark
from loadtests.verdicts.curve import Curve
from loadtests.verdicts.slo import Judgement, Verdict
from loadtests.verdicts.summary import Series, Summary, by_second, judged_rows, summarise
from loadtests.verdicts.text import (
    PERCENTILE_HEADER,
    freshness,
    number,
    offered_and_served,
    percentile_rows,
    populations,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --soft: #667; --paper: #fff; --rule: #dde;
  --c0: #2563eb; --c1: #d97706; --c2: #dc2626; --c3: #7c3aed; --c4: #94a3b8; --c5: #059669;
  --c6: #db2777; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #9aa3b2; --paper: #14171c;
  --rule: #2b313b; --c0: #60a5fa; --c1: #fbbf24; --c2: #f87171; --c3: #a78bfa; --c4: #64748b;
  --c5: #34d399; --c6: #f472b6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p.about { color: var(--soft); margin: .2rem 0 1rem; }
.verdict { border-left: .5rem solid; padding: .6rem 1rem; font-size: 1.2rem; margin: 1rem 0;
  background: color-mix(in srgb, currentColor 8%, transparent); }
.PASS { color: var(--c5); } .FAIL { color: var(--c2); } .INVALID, .UNDECIDED { color: var(--c1); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; }
figure { margin: 0; } svg { width: 100%; height: auto; font-size: 11px; }
svg path { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg text { fill: var(--soft); } .up { text-anchor: end; } .across { text-anchor: middle; }
.grid { stroke: var(--rule); } .bound { stroke: var(--c2); stroke-dasharray: 6 4; }
.mark line { stroke: var(--soft); stroke-dasharray: 2 3; } .mark text { font-weight: 600; }
figcaption span { margin-right: 1.2rem; color: var(--ink); }
figcaption span::before { content: ""; display: inline-block; width: .8rem; height: .2rem;
  margin-right: .4rem; vertical-align: middle; background: currentColor; }
""" + "".join(
    f"path.c{n} {{ stroke: var(--c{n}); }} circle.c{n} {{ fill: var(--c{n}); }} "
    f"figcaption .c{n}::before {{ background: var(--c{n}); }}\n"
    for n in range(7)
)


def run_page(run: Run, summary: Summary, judged: Judgement, curve: Curve | None = None) -> str:
    """The page of one replay; with a curve, that too."""
    about = run.description
    series = by_second(run.samples)
    sections = [
        _verdict(judged.verdict),
        f"<p>{escape(offered_and_served(summary))}.</p>",
        _table(
            ("check", "measured", "bound", ""),
            [
                (
                    check.what,
                    number(check.measured),
                    f"{check.relation} {number(check.bound)}",
                    "holds" if check.holds else "missed",
                )
                for check in judged.checks
            ],
        ),
        *([f"<p>{escape(freshness(summary))}.</p>"] if summary.after_click else []),
        *_charts(run, series, judged),
        _section("Percentiles", _table(PERCENTILE_HEADER, percentile_rows(populations(summary)))),
    ]
    if curve is not None:
        sections.append(curve_section(curve))
    for title, counts in (
        ("Errors by class", summary.errors),
        ("Degraded answers by reason", summary.degraded),
        ("Answers by model version", summary.versions),
        ("Batches by size, up to", about.batches),
    ):
        if counts:
            rows = [(word, f"{count:.0f}") for word, count in counts.items()]
            sections.append(_section(title, _table(("", "count"), rows)))
    sections.append(_section("Machine and versions", _table(("", ""), about.machine.items())))
    subtitle = (
        f"{about.trace} against {about.url}, {about.started_at}; {about.processes} generator "
        f"process(es), {about.generator_cpu_s / max(summary.offered, 1) * 1e6:.0f} µs of CPU a "
        f"request; time-out {about.timeout_ms:g} ms"
    )
    return document(about.name, subtitle, sections)


def document(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """A whole page around sections of HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="about">{escape(subtitle)}</p>'
        f"{''.join(sections)}</body></html>\n"
    )


def curve_section(curve: Curve) -> str:
    """Throughput against latency, with the knee."""
    offered = np.array([point.offered_rate for point in curve.points])
    chart = Chart(
        lines=[
            Line(name, offered, np.array([value or np.nan for value in values]))
            for name, values in (
                ("p50", [point.p50_ms for point in curve.points]),
                ("p99", [point.p99_ms for point in curve.points]),
            )
        ],
        marks=[Mark(curve.knee.offered_rate, "knee")] if curve.knee is not None else [],
        x_label="offered requests/s",
        y_label="ms",
        bound=curve.objective.p99_ms,
        log_y=True,
        dots=True,
    )
    rows = [
        (
            f"{point.offered_rate:.0f}",
            f"{point.served_rate:.0f}",
            f"{point.served_share:.2%}",
            number(point.p50_ms),
            number(point.p99_ms),
            number(point.server_cpu_us),
            point.verdict.name,
        )
        for point in curve.points
    ]
    header = ("offered/s", "served/s", "share", "p50 ms", "p99 ms", "server CPU µs", "verdict")
    knee = "no rate passes" if curve.knee is None else f"knee at {curve.knee.offered_rate:.0f}/s"
    title = f"Throughput and latency of {curve.name}: {knee}"
    return _section(title, chart.svg() + _table(header, rows))


def comparison_page(
    legs: dict[str, list[Samples]], *, verdict: Verdict, lines: Sequence[str]
) -> str:
    """The page of two sides: what was found, and the two distributions on one chart."""
    found = "".join(f"<p>{escape(line)}</p>" for line in lines)
    merged = {name: Samples.merge(parts) for name, parts in legs.items()}
    named = {name: summarise(samples).judged for name, samples in merged.items()}
    sections = [
        _verdict(verdict),
        found,
        _section("Percentiles", _table(PERCENTILE_HEADER, percentile_rows(named))),
        _section("Latency by percentile", _percentile_chart(merged, None)),
    ]
    return document(" against ".join(legs), "legs interleaved, latency from the due time", sections)


def _verdict(verdict: Verdict) -> str:
    told = {
        Verdict.PASS: "Pass: the objective was met.",
        Verdict.FAIL: "Fail: the objective was missed.",
        Verdict.INVALID: "Invalid: the generator itself was late; this says nothing of the server.",
        Verdict.UNDECIDED: "Undecided: the interval holds both answers.",
    }[verdict]
    return f'<div class="verdict {verdict.name}"><strong>{told}</strong></div>'


def _charts(run: Run, series: Series, judged: Judgement) -> list[str]:
    faults = run.description.faults
    marks = [Mark(fault.at_s, f"{fault.what}: {fault.result}") for fault in faults]
    seconds = np.arange(len(series.offered), dtype=np.float64)
    bound = next(check.bound for check in judged.checks if check.what == "p99 ms")

    def over_time(
        y_label: str,
        named: dict[str, FloatArray],
        *,
        log_y: bool = False,
        bound: float | None = None,
    ) -> str:
        return Chart(
            lines=[Line(name, seconds, values) for name, values in named.items()],
            marks=marks,
            x_label="second of the run",
            y_label=y_label,
            log_y=log_y,
            bound=bound,
        ).svg()

    percentiles = {
        "p50": series.p50_ms,
        "p90": series.p90_ms,
        "p99": series.p99_ms,
        "p99.9": series.p999_ms,
        "max": series.max_ms,
    }
    charts = [
        _section(
            "Offered and served",
            over_time("a second", {"offered": series.offered, "served": series.served}),
        ),
        _section(
            "Latency from the due time", over_time("ms", percentiles, log_y=True, bound=bound)
        ),
    ]
    if faults:
        rows = [
            (place, f"{fault.at_s:.2f} s", fault.what, fault.result)
            for place, fault in enumerate(faults, 1)
        ]
        charts.append(_section("Faults", _table(("", "at", "what", "result"), rows)))
    if series.degraded.any() or series.errors.any():
        charts.append(
            _section(
                "Errors and degraded answers",
                over_time("a second", {"errors": series.errors, "degraded": series.degraded}),
            )
        )
    if len(series.versions) > 1:
        charts.append(_section("Model versions", over_time("answers a second", series.versions)))
    charts.append(
        _section("Latency by percentile", _percentile_chart({"latency": run.samples}, bound))
    )
    return charts


def _percentile_chart(named: dict[str, Samples], bound: float | None) -> str:
    lines = []
    for name, samples in named.items():
        latency_ms = samples.latency_s[judged_rows(samples)] * 1e3
        if len(latency_ms):
            slower = np.geomspace(1, 1 / len(latency_ms), 200)  # share of slower requests
            lines.append(Line(name, 1 / slower, np.percentile(latency_ms, 100 * (1 - slower))))
    return Chart(
        lines=lines,
        x_label="one request in so many is slower (10 is p90, 100 is p99)",
        y_label="ms",
        log_x=True,
        log_y=True,
        bound=bound,
    ).svg()


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
