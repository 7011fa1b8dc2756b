"""Shadow scoring: a sample of requests is scored again by the shadow, after their replies.

It waits for an idle primary, gives up rather than queue, and never touches an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

import msgspec

from service.encoding.slate import best
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.rollout import ShadowWish
from service.versions.traffic import Sample

_log = logging.getLogger("ranker.shadow")
_WAITING = 64
_PATIENCE_S = 1.0
_LOOK_S = 0.002
_TOP = 10


class Agreement(msgspec.Struct, frozen=True):
    """How one request's two orders compare."""

    tau: float
    overlap: float
    live_s: float
    """Engine time of the answer's batch."""
    shadow_s: float


class ShadowTotals(msgspec.Struct):
    """Sums over all compared requests of one shadow version."""

    version: str = ""
    compared: int = 0
    dropped: int = 0
    """Sampled, but there was no quiet moment for them."""
    failed: int = 0
    tau: float = 0.0
    overlap: float = 0.0
    live_s: float = 0.0
    shadow_s: float = 0.0

    def add(self, one: Agreement) -> None:
        """Take one compared request in."""
        self.compared += 1
        self.tau += one.tau
        self.overlap += one.overlap
        self.live_s += one.live_s
        self.shadow_s += one.shadow_s

    def means(self) -> dict[str, float | int | str]:
        """The totals as an operator reads them."""
        n = max(1, self.compared)
        return {
            "version": self.version,
            "compared": self.compared,
            "dropped": self.dropped,
            "failed": self.failed,
            "kendall_tau": round(self.tau / n, 4),
            f"top_{_TOP}_overlap": round(self.overlap / n, 4),
            "live_engine_ms": round(self.live_s / n * 1e3, 3),
            "shadow_engine_ms": round(self.shadow_s / n * 1e3, 3),
        }


class _Copy(msgspec.Struct, frozen=True):
    """An answered request, waiting to be scored again."""

    sample: Sample
    order: Sequence[int]
    """Indexes of the candidates as they were answered."""
    live_s: float
    since_s: float


class Shadow:
    """Takes copies, and scores them one at a time while the primary is idle."""

    def __init__(self, versions: Versions) -> None:
        self.percent = 0.0
        self.totals = ShadowTotals()
        self._versions = versions
        self._credit = 0.0
        self._copies: deque[_Copy] = deque()
        self._pump: asyncio.Task[None] | None = None

    def follow(self, wish: ShadowWish | None) -> None:
        """Sample for this version from now on, or for none."""
        self.percent = wish.percent if wish is not None else 0.0
        version = wish.version if wish is not None else ""
        if version != self.totals.version:
            self.totals = ShadowTotals(version)

    def offer(self, sample: Sample, order: Sequence[int], live_s: float) -> None:
        """Take every so many-th request of those offered; never waits."""
        if self._versions.shadow is None:
            return
        self._credit += self.percent / 100
        if self._credit < 1:
            return
        self._credit -= 1
        if len(self._copies) == _WAITING:
            self.totals.dropped += 1
            return
        self._copies.append(_Copy(sample, order, live_s, time.monotonic()))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._score_all())

    async def _score_all(self) -> None:
        while self._copies:
            copy = self._copies[0]
            primary, shadow = self._versions.primary, self._versions.shadow
            late = time.monotonic() - copy.since_s > _PATIENCE_S
            if shadow is None or primary is None or late:
                self._copies.popleft()
                self.totals.dropped += 1
                continue
            if primary.batcher.wait_s() > 0:
                await asyncio.sleep(_LOOK_S)
                continue
            self._copies.popleft()
            try:
                agreement = await _compare(copy, shadow)
            except Exception as error:  # noqa: BLE001  the shadow's boundary: no fault leaves it
                self.totals.failed += 1
                _log.debug("shadow failed", extra={"reason": f"{type(error).__name__}: {error}"})
                continue
            if shadow.version == self.totals.version:
                self.totals.add(agreement)

    async def close(self) -> None:
        """Forget what waits."""
        self._copies.clear()
        if self._pump is not None:
            await asyncio.wait([self._pump])


async def _compare(copy: _Copy, shadow: LoadedVersion) -> Agreement:
    with shadow:
        scored = await shadow.batcher.submit(
            copy.sample.person,
            copy.sample.slate,
            deadline_s=time.monotonic() + _PATIENCE_S,
            priority="shadow",
        )
    order, _ = best(scored.scores, top_n=len(scored.scores))
    place = {candidate: at for at, candidate in enumerate(order.tolist())}
    return Agreement(
        kendall_tau([place[candidate] for candidate in copy.order]),
        top_overlap(copy.order, order.tolist(), _TOP),
        copy.live_s,
        scored.inference_s,
    )


def kendall_tau(places: Sequence[int]) -> float:
    """Kendall's tau (1938) of one order with another, given as the other's places; exact.

    1 for the same order, -1 for the reverse; 1 for fewer than two. Places are distinct.
    """
    n = len(places)
    if n < 2:
        return 1.0
    seen: list[int] = []
    inversions = 0
    for place in places:
        inversions += len(seen) - bisect_right(seen, place)
        insort(seen, place)
    return 1 - 4 * inversions / (n * (n - 1))


def top_overlap(one: Sequence[int], other: Sequence[int], top: int) -> float:
    """Share of the first `top` of one order that is among the first `top` of the other."""
    top = min(top, len(one), len(other))
    return len(set(one[:top]) & set(other[:top])) / top if top else 1.0
