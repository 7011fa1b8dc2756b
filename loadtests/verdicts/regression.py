"""Has a request become dearer? CPU of the service against a stored baseline of it.

CPU µs are told in units of the bare engine's, measured in the same run: a slower machine
makes both dearer, a regression only one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtests.driving.samples import RunFault
from loadtests.verdicts.slo import Verdict


class CpuCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CPU µs a request, of one run."""

    service_us: float
    """The service and its Redis."""
    engine_us: float
    """The bare engine alone, on batches of 8."""

    @property
    def ratio(self) -> float:
        """What does not depend on the machine, in the main."""
        return self.service_us / self.engine_us

    def save(self, path: Path) -> None:
        """Write the file that `read_cost` reads."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_cost(path: Path) -> CpuCost:
    """A stored cost; raises RunFault."""
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=CpuCost)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFault(f"baseline {path}: {error}") from error
    if min(cost.service_us, cost.engine_us) <= 0:
        raise RunFault(f"baseline {path}: a cost is not above 0")
    return cost


def judge(now: CpuCost, baseline: CpuCost, *, at_most: float) -> tuple[Verdict, str]:
    """Pass if the ratio has grown by at most this factor; and the sentence that says so."""
    growth = now.ratio / baseline.ratio
    verdict = Verdict.PASS if growth <= at_most else Verdict.FAIL
    return verdict, (
        f"{verdict.name}: {now.service_us:.0f} µs a request, {now.ratio:.2f} times the bare "
        f"engine's {now.engine_us:.0f} µs; the baseline's {baseline.ratio:.2f} times {growth:.2f}, "
        f"at most {at_most:.2f}"
    )
