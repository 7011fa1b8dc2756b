"""What a trace costs to serve: replicas, money, and when an engineering effort pays. Pure.

Every input is an assumption and is told with the result. Little's law ties them: requests on
the way = rate x latency, so a replica that holds c requests at once serves c / latency.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

HOURS_A_YEAR = 8766.0
MONTHS_A_YEAR = 12
_CLOSE = 0.005


class CaseFault(Exception):
    """A case that cannot be computed: says which field, and why."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests a second: the peak decides the replicas, the mean the cost of a request."""

    peak_per_s: float
    mean_per_s: float


class Capacity(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a replica serves: a rate, a concurrency with a latency, a speedup, or a given count."""

    requests_per_s: float | None = None
    """As measured, such as a curve's knee."""
    concurrency: float | None = None
    """Requests that a replica holds at once; needs `latency_ms`."""
    replicas: int | None = None
    """Given, not derived: taken at its word."""
    speedup: float | None = None
    """Of a candidate: its rate over the baseline's."""
    latency_ms: float | None = None
    """Mean time of a request in the service."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question: a baseline, perhaps a candidate, and what was claimed of them."""

    price_per_hour: float
    currency: str = "USD"
    traffic: Traffic | None = None
    utilization: float = 0.6
    """Share of its capacity that a replica is loaded with at the peak."""
    spare_replicas: int = 0
    hours_per_year: float = HOURS_A_YEAR
    baseline: Capacity
    candidate: Capacity | None = None
    engineering_cost: float | None = None
    claims: dict[str, float] = {}
    """Results by name, such as `saving.year`, as somebody else states them."""


class Line(msgspec.Struct, frozen=True):
    """One result and where it comes from."""

    name: str
    value: float
    unit: str
    how: str


class Claim(msgspec.Struct, frozen=True):
    """A stated result against the computed one."""

    name: str
    stated: float
    computed: float | None
    """None where the inputs do not determine it."""

    @property
    def verdict(self) -> Literal["holds", "does not hold", "cannot be computed"]:
        """Within half a percent holds."""
        if self.computed is None:
            return "cannot be computed"
        holds = math.isclose(self.stated, self.computed, rel_tol=_CLOSE)
        return "holds" if holds else "does not hold"


def compute(case: Case) -> list[Line]:
    """All results that the case determines; raises CaseFault."""
    if not 0 < case.utilization <= 1:
        raise CaseFault(f"utilization is {case.utilization:g}, not above 0 and at most 1")
    if case.price_per_hour <= 0:
        raise CaseFault("price_per_hour is not above 0")
    lines = _side("baseline", case.baseline, case)
    if case.candidate is None:
        return lines
    served_by = next(line.value for line in lines if line.name == "baseline.replicas")
    lines += _side("candidate", case.candidate, case, baseline_replicas=served_by)
    value = {line.name: line.value for line in lines}
    replicas, year = "replicas", "year"
    saved = value[f"baseline.{year}"] - value[f"candidate.{year}"]
    kept = value[f"candidate.{replicas}"] / value[f"baseline.{replicas}"]
    lines += [
        Line("saving.year", saved, case.currency, "baseline's year less the candidate's"),
        Line("saving.month", saved / MONTHS_A_YEAR, case.currency, "a twelfth of the year"),
        Line("saving.share", 1 - kept, "", "replicas saved over the baseline's"),
        Line("speedup", 1 / kept, "x", "throughput a replica that this many replicas imply"),
    ]
    if case.engineering_cost is not None and saved > 0:
        months = case.engineering_cost / (saved / MONTHS_A_YEAR)
        lines.append(
            Line("break_even.months", months, "months", "engineering cost over a month's saving")
        )
    return lines


def _side(
    name: str, capacity: Capacity, case: Case, *, baseline_replicas: float | None = None
) -> list[Line]:
    lines = []
    replicas, speedup = capacity.replicas, capacity.speedup
    ways = (capacity.requests_per_s, capacity.concurrency, replicas, speedup)
    if sum(way is not None for way in ways) != 1:
        raise CaseFault(
            f"{name} has one of requests_per_s, concurrency with latency_ms, speedup, or replicas"
        )
    if speedup is not None:
        if baseline_replicas is None or speedup <= 0:
            raise CaseFault(f"{name}.speedup is above 0, and of a candidate alone")
        needed = baseline_replicas / speedup
        replicas = math.ceil(needed - 1e-9)
        how = f"{baseline_replicas:g} over {speedup:g} = {needed:.2f}, rounded up"
        lines.append(Line(f"{name}.replicas", replicas, "", how))
    elif replicas is None:
        rate, how = _rate(name, capacity)
        if case.traffic is None:
            raise CaseFault(f"{name} is given by its rate: `traffic` is needed")
        target = rate * case.utilization
        needed = case.traffic.peak_per_s / target
        replicas = math.ceil(needed - 1e-9) + case.spare_replicas
        lines += [
            Line(f"{name}.requests_per_s", rate, "/s", how),
            Line(
                f"{name}.replicas",
                replicas,
                "",
                f"peak {case.traffic.peak_per_s:g}/s over {rate:g}/s x {case.utilization:g} = "
                f"{needed:.2f}, rounded up, plus {case.spare_replicas} spare",
            ),
        ]
        if capacity.latency_ms is not None:
            on_the_way = case.traffic.peak_per_s * capacity.latency_ms / 1e3
            lines.append(
                Line(f"{name}.in_flight", on_the_way, "", "Little's law: peak rate x latency")
            )
    else:
        lines.append(Line(f"{name}.replicas", replicas, "", "as given, not derived"))
    year = replicas * case.price_per_hour * case.hours_per_year
    hours = case.hours_per_year
    lines += [
        Line(
            f"{name}.year",
            year,
            case.currency,
            f"{replicas} x {case.price_per_hour:g} an hour x {hours:g} hours",
        ),
        Line(f"{name}.month", year / MONTHS_A_YEAR, case.currency, "a twelfth of the year"),
    ]
    if case.traffic is not None:
        if case.traffic.mean_per_s <= 0:
            raise CaseFault("traffic.mean_per_s is not above 0")
        per_million = year / (case.traffic.mean_per_s * hours * 3600) * 1e6
        lines.append(
            Line(
                f"{name}.million_requests",
                per_million,
                case.currency,
                f"the year over {case.traffic.mean_per_s:g}/s all year",
            )
        )
    return lines


def _rate(name: str, capacity: Capacity) -> tuple[float, str]:
    if capacity.requests_per_s is not None:
        if capacity.requests_per_s <= 0:
            raise CaseFault(f"{name}.requests_per_s is not above 0")
        return capacity.requests_per_s, "measured or given"
    assert capacity.concurrency is not None
    if not capacity.latency_ms or capacity.latency_ms <= 0 or capacity.concurrency <= 0:
        raise CaseFault(f"{name}.latency_ms and {name}.concurrency must be above 0")
    rate = capacity.concurrency / (capacity.latency_ms / 1e3)
    return rate, f"Little's law: {capacity.concurrency:g} at once over {capacity.latency_ms:g} ms"


def check_claims(case: Case, lines: list[Line]) -> list[Claim]:
    """Each stated result against the computed one."""
    computed = {line.name: line.value for line in lines}
    return [Claim(name, stated, computed.get(name)) for name, stated in case.claims.items()]
