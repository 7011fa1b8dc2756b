"""The throughput-latency curve, and its knee."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from loadtests.driving.samples import RunFault
from loadtests.verdicts.slo import Judgement, Objective, Verdict
from loadtests.verdicts.summary import Summary


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One rate: what was offered a second, what came of it, and how it was judged."""

    offered_rate: float
    served_rate: float
    served_share: float
    p50_ms: float | None
    p99_ms: float | None
    """None where nothing was served."""
    verdict: Verdict
    server_cpu_us: float | None = None
    """CPU µs a served request of the processes that were named."""

    @classmethod
    def of(cls, summary: Summary, judged: Judgement, *, server_cpu_s: float | None) -> Self:
        return cls(
            offered_rate=summary.offered_rate,
            served_rate=summary.served_rate,
            served_share=summary.served_share,
            p50_ms=summary.judged.p50_ms,
            p99_ms=summary.judged.p99_ms,
            verdict=judged.verdict,
            server_cpu_us=(
                None if server_cpu_s is None else server_cpu_s / max(summary.served, 1) * 1e6
            ),
        )


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Points by rising rate, measured against one objective."""

    name: str
    objective: Objective
    points: list[Point]

    @property
    def knee(self) -> Point | None:
        """The last point before the first that does not pass; None if the first does not."""
        last = None
        for point in self.points:
            if point.verdict is not Verdict.PASS:
                break
            last = point
        return last

    def save(self, path: Path) -> None:
        content = msgspec.json.format(msgspec.json.encode(self), indent=2)
        path.write_bytes(content + b"\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `save`; raises RunFault."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise RunFault(f"{path}: not a curve: {error}") from error
