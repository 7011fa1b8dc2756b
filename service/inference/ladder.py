"""The ladder: the lanes of one version in the order in which they are tried. Decides only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from service.domain import BackendKind, Priority
from service.errors import BackendRecoverable, NotFound, Overloaded
from service.inference.lane import Lane, LaneReport

_LOST_AFTER_S = 10.0
"""A rung that hangs so long is as good as lost."""


class Ladder:
    """Which rung takes a job, and which one takes over."""

    def __init__(
        self,
        lanes: Iterable[Lane],
        *,
        max_queue_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lanes = list(lanes)
        """The first choice first."""
        self._preferred: BackendKind | None = None
        self._max_queue_s = max_queue_s
        self._clock = clock

    def prefer(self, kind: BackendKind) -> None:
        """Try this backend first from now on; raises NotFound if the version has none.

        The others stay warm behind it, in their order.
        """
        chosen = [lane for lane in self.lanes if lane.kind == kind]
        if not chosen:
            kinds = ", ".join(lane.kind for lane in self.lanes)
            raise NotFound(f"no backend {kind!r} is loaded, only {kinds}", field="backend")
        self._preferred = kind
        self.lanes = chosen + [lane for lane in self.lanes if lane.kind != kind]

    def add(self, lane: Lane) -> None:
        """Try one more rung, before all others but the one that an operator prefers."""
        at = 1 if self._preferred == self.lanes[0].kind else 0
        self.lanes = [*self.lanes[:at], lane, *self.lanes[at:]]

    def choose(self, tiles: int, left_s: float, priority: Priority) -> Lane:
        """The first rung that is predicted to score so many tiles in the time left.

        Raises Overloaded if none is, BackendRecoverable if no rung takes jobs at all.
        """
        shortest: float | None = None
        for lane in self.lanes:
            if not lane.usable():
                continue
            wait = lane.wait_s(priority)
            # an idle rung runs whatever is predicted, so that a prediction
            # which a stall has spoilt is corrected by the next measurement
            if wait == 0 or (
                wait <= self._max_queue_s and wait + lane.cost.predict_s(tiles) <= left_s
            ):
                return lane
            shortest = wait if shortest is None else min(shortest, wait)
        if shortest is None:
            raise BackendRecoverable("no rung takes jobs now")
        raise Overloaded(
            f"the queue needs {shortest * 1e3:.0f} ms", retry_after_s=max(1.0, shortest)
        )

    def after(self, lane: Lane) -> Lane | None:
        """The next usable rung behind this one."""
        return next((lower for lower in self.lanes[self.place(lane) + 1 :] if lower.usable()), None)

    def alone(self, lane: Lane) -> bool:
        """Whether nobody could take over from this rung."""
        return self.after(lane) is None

    def place(self, lane: Lane) -> int:
        """0 for the first choice."""
        return self.lanes.index(lane)

    def wait_s(self) -> float:
        """Predicted seconds until a job that came now would start on the first usable rung."""
        return next((lane.wait_s() for lane in self.lanes if lane.usable()), 0.0)

    def lost_s(self) -> float | None:
        """Seconds since a device was lost, or an engine taken for lost; None if all are well."""
        now = self._clock()
        gone = [now - lane.lost_s for lane in self.lanes if lane.lost_s is not None]
        stuck = [now - lane.stuck_s for lane in self.lanes if lane.stuck_s is not None]
        gone += [seconds - _LOST_AFTER_S for seconds in stuck if seconds > _LOST_AFTER_S]
        return max(gone, default=None)

    def reports(self) -> list[LaneReport]:
        """How each rung stands, in the order in which they are tried."""
        return [lane.report() for lane in self.lanes]
