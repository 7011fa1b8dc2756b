"""Which rungs are out, and since when; tells of each change once. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec

from service.domain import BackendKind
from service.inference.ladder import Ladder
from service.inference.lane import Lane


class RungChange(msgspec.Struct, frozen=True, kw_only=True):
    """A rung went out, came back, joined or was put first, for telemetry."""

    kind: Literal["fallback", "backend"]
    """`fallback` where one went out, `backend` for every other change."""
    rung: BackendKind
    first: Lane | None
    """Who takes jobs now; None if nobody does."""
    reason: str
    began_s: float
    """On the monotonic clock; where a rung is back, since when it was out."""
    ended_s: float


class Outages:
    """The rungs of one ladder that take no jobs."""

    def __init__(
        self,
        ladder: Ladder,
        tell: Callable[[RungChange], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ladder = ladder
        self._tell = tell
        self._clock = clock
        self._out_s: dict[BackendKind, float] = {}
        self._lost: set[BackendKind] = set()

    def begin(self, lane: Lane, reason: str, *, began_s: float) -> None:
        """A rung takes no more jobs; told once, and once more if it is lost."""
        lost = lane.lost_s is not None
        if lane.kind in (self._lost if lost else self._out_s):
            return
        self._out_s.setdefault(lane.kind, began_s)
        if lost:
            self._lost.add(lane.kind)
        self._change("fallback", lane.kind, reason, began_s)

    def end(self, lane: Lane) -> None:
        """A rung scored a batch; told if it was out."""
        began_s = self._out_s.pop(lane.kind, None)
        if began_s is not None:
            self._change("backend", lane.kind, "is back", began_s)

    def note(self, kind: BackendKind, reason: str) -> None:
        """The order of the rungs was changed."""
        self._change("backend", kind, reason, self._clock())

    def _change(
        self, kind: Literal["fallback", "backend"], rung: BackendKind, reason: str, began_s: float
    ) -> None:
        self._tell(
            RungChange(
                kind=kind,
                rung=rung,
                first=self._ladder.first(),
                reason=reason,
                began_s=began_s,
                ended_s=self._clock(),
            )
        )
