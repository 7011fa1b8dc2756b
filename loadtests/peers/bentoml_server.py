"""BentoML: one worker, adaptive batching, and a latency bound that refuses nobody."""

from __future__ import annotations

from typing import Any

import bentoml
import msgspec

from loadtests.peers.scoring import MAX_BATCH, Answer, Request, Scorer


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Ranker:
    """A batchable route takes lists; each caller's list holds one request."""

    def __init__(self) -> None:
        self._scorer = Scorer()

    # the default bound of its batches' latency turned most requests away with 503
    @bentoml.api(route="/rank", batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=60_000)
    def rank(self, requests: list[dict[str, Any]], /) -> list[Answer]:
        return self._scorer.rank(msgspec.convert(requests, list[Request]))
