"""What is learnt from a request after its reply: counts for the gates, copies for the shadow."""

from __future__ import annotations

from collections.abc import Sequence

from service.domain import DegradedReason, Event
from service.ranking.query import Ranking
from service.versions.shadow import Shadow
from service.versions.traffic import Answered, Traffic

_ITS_OWN_FAULT: frozenset[DegradedReason] = frozenset(
    {"fallback_backend", "deadline", "overload", "warming"}
)
"""What a version may be blamed for; signals are not its business."""


class Onlookers:
    """Hands finished requests on to whoever watches versions."""

    def __init__(self, *, traffic: Traffic, shadow: Shadow) -> None:
        self._traffic = traffic
        self._shadow = shadow

    def answered(self, ranking: Ranking) -> None:
        """Look at one answered ranking."""
        scored = ranking.sample is not None
        if self._traffic.counting and ranking.model_version:
            degraded = not _ITS_OWN_FAULT.isdisjoint(ranking.degraded)
            self._traffic.count(
                Answered(
                    version=ranking.model_version,
                    seconds=ranking.times.total_s,
                    failed=not scored and "fallback_backend" in ranking.degraded,
                    degraded=degraded,
                    scores=ranking.scores if scored else (),
                )
            )
        if ranking.sample is not None:
            self._traffic.keep(ranking.sample)
            self._shadow.offer(ranking.sample, ranking.indexes, ranking.times.inference_s)

    def stored(self, events: Sequence[Event]) -> None:
        """Look at events that were stored."""
        if self._traffic.counting:
            for event in events:
                if event.type == "click" and event.ranking_id is not None:
                    self._traffic.clicked(event.ranking_id)
