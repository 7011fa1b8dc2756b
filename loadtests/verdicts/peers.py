"""Servers side by side: a row each, and the verdict on ours. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtests.verdicts.slo import LATE_SHARE, Check, Judgement, Verdict
from loadtests.verdicts.text import number, table

OURS, RIVAL = "ours", "mosec"
LEAST_RATIO = 2.5
MOST_P99_MS = 30.0
HEADER = (
    *("server", "requests/s", "CPU us", "Valkey us", "p50 ms", "p99 ms"),
    *("errors", "at rate/s", "CPU us", "p50 ms", "p99 ms", "errors"),
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one server did: a closed loop, then an open one at a share of that rate."""

    rate: float
    """Good answers a second."""
    cpu_us: float
    """User and system time a good answer, of the server's whole process tree."""
    valkey_us: float
    p50_ms: float
    p99_ms: float
    errors: int
    """Failed or degraded."""
    open_rate: float
    open_cpu_us: float
    """As `cpu_us`: batches are smaller where the server is not full."""
    open_p50_ms: float
    open_p99_ms: float
    open_errors: int
    lateness_p99_ms: float
    """The generator's own, in the open loop."""

    @property
    def per_cpu_s(self) -> float:
        """Requests that a second of CPU serves, Valkey's share of it included."""
        return 1e6 / (self.cpu_us + self.valkey_us)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A server with its figures, or the reason why there are none."""

    name: str
    version: str
    figures: Figures | None = None
    reason: str = ""


def rows_text(rows: Sequence[Row]) -> str:
    """The table; rows without figures follow it with their reasons."""
    lines = []
    for row in rows:
        if (of := row.figures) is not None:
            closed = (of.rate, of.cpu_us, of.valkey_us, of.p50_ms, of.p99_ms)
            opened = (of.open_rate, of.open_cpu_us, of.open_p50_ms, of.open_p99_ms)
            lines.append(
                [
                    *(f"{row.name} {row.version}", *map(number, closed), str(of.errors)),
                    *(*map(number, opened), str(of.open_errors)),
                ]
            )
    told = [table(lines, header=HEADER)]
    told += [f"{row.name} {row.version}: {row.reason}" for row in rows if row.figures is None]
    return "\n".join(told)


def judge(rows: Sequence[Row]) -> Judgement:
    """Ours against the aims; undecided where ours or the rival has no figures."""
    known = {row.name: row.figures for row in rows if row.figures is not None}
    ours, rival = known.get(OURS), known.get(RIVAL)
    if ours is None:
        return Judgement(Verdict.UNDECIDED, [])
    lateness = Check(
        "generator's lateness p99 ms", ours.lateness_p99_ms, "at most", LATE_SHARE * MOST_P99_MS
    )
    checks = [
        Check("p99 ms in the open loop", ours.open_p99_ms, "at most", MOST_P99_MS),
        Check("errors of ours", ours.errors + ours.open_errors, "at most", 0),
    ]
    if rival is not None:
        ratio = ours.per_cpu_s / rival.per_cpu_s
        checks.append(
            Check(f"requests a CPU second over {RIVAL}'s", ratio, "at least", LEAST_RATIO)
        )
    if not lateness.holds:
        return Judgement(Verdict.INVALID, [*checks, lateness])
    if rival is None:
        return Judgement(Verdict.UNDECIDED, [*checks, lateness])
    sound = Check(f"errors of {RIVAL}", rival.errors + rival.open_errors, "at most", 0)
    if not sound.holds:
        return Judgement(Verdict.UNDECIDED, [*checks, sound, lateness])
    passed = all(check.holds for check in checks)
    return Judgement(Verdict.PASS if passed else Verdict.FAIL, [*checks, lateness])
