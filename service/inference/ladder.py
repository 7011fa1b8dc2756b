"""The ladder: the lanes of one version in the order in which they are tried. Decides only."""

from __future__ import annotations

import threading
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
        self._best_first = self.lanes = list(lanes)
        """`lanes` is the order in which they are tried."""
        self.preferred: BackendKind | None = None
        """An operator's choice, which goes before the best."""
        self._order = threading.Lock()
        self._max_queue_s = max_queue_s
        self._clock = clock

    def prefer(self, kind: BackendKind | None) -> None:
        """Try this backend first from now on, or the best one again.

        The others stay warm behind it, in their order. Raises NotFound, and changes nothing,
        if the version has none of this kind.
        """
        self.check(kind)
        with self._order:
            self.preferred = kind
            self._arrange()

    def check(self, kind: BackendKind | None) -> None:
        """Raise NotFound, which names what is there, if no rung is of this kind."""
        kinds = [lane.kind for lane in self._best_first]
        if kind is not None and kind not in kinds:
            raise NotFound(
                f"no backend {kind!r} is loaded, only {', '.join(kinds)}", field="backend"
            )

    def add(self, lane: Lane) -> None:
        """Try one more rung, before all others but the one that an operator prefers."""
        with self._order:
            self._best_first = [lane, *self._best_first]
            self._arrange()

    def _arrange(self) -> None:
        self.lanes = sorted(self._best_first, key=lambda lane: lane.kind != self.preferred)

    def first(self) -> Lane | None:
        """The rung that takes jobs now, unless their queue is too long for it."""
        return next((lane for lane in self.lanes if lane.usable()), None)

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
        lane = self.first()
        return lane.wait_s() if lane is not None else 0.0

    def lost_s(self) -> float | None:
        """Seconds since a device was lost, or an engine taken for lost; None if all are well."""
        now = self._clock()
        gone = [now - lane.lost_s for lane in self.lanes if lane.lost_s is not None]
        stuck = [now - lane.stuck_s for lane in self.lanes if lane.stuck_s is not None]
        gone += [seconds - _LOST_AFTER_S for seconds in stuck if seconds > _LOST_AFTER_S]
        return max(gone, default=None)

    def reports(self) -> list[LaneReport]:
        """How each rung stands, in the order in which they are tried."""
        first = self.first()
        return [lane.report(serves=lane is first) for lane in self.lanes]
