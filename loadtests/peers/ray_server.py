"""Ray Serve: one replica on one CPU, with `serve.batch`, behind its own proxy."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from loadtests.peers.scoring import MAX_BATCH, MAX_WAIT_MS, PORT, Scorer, decode, encode


class Ranker:
    """Bodies go through the proxy as bytes; a batch is decoded where it is ranked."""

    def __init__(self) -> None:
        self._scorer = Scorer()

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT_MS / 1e3)
    async def rank(self, bodies: list[bytes]) -> list[bytes]:
        answers = await self._scorer.rank_async([decode(body) for body in bodies])
        return [encode(answer) for answer in answers]

    async def __call__(self, request: Request) -> Response:
        return Response(await self.rank(await request.body()), media_type="application/json")


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=128 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deployment: Any = serve.deployment(num_replicas=1, max_ongoing_requests=4 * MAX_BATCH)(Ranker)
    serve.run(deployment.bind(), route_prefix="/rank")
    while True:
        time.sleep(60)
