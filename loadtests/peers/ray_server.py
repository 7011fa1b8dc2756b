"""Ray Serve: one replica on one CPU, with `serve.batch` and its switch for throughput."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from loadtests.peers import scoring


class Ranker:
    """Bodies go through the proxy as bytes; a batch is decoded where it is ranked.

    Ray sends this class to its processes by value and what it names by reference.
    """

    def __init__(self) -> None:
        self._scorer = scoring.Scorer()

    @serve.batch(max_batch_size=scoring.MAX_BATCH, batch_wait_timeout_s=scoring.MAX_WAIT_MS / 1e3)
    async def rank(self, bodies: list[bytes]) -> list[bytes]:
        answers = await self._scorer.rank_async([scoring.decode(body) for body in bodies])
        return [scoring.encode(answer) for answer in answers]

    async def __call__(self, request: Request) -> Response:
        return Response(await self.rank(await request.body()), media_type="application/json")


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=128 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": scoring.PORT})
    deployment: Any = serve.deployment(
        num_replicas=1,
        max_ongoing_requests=4 * scoring.MAX_BATCH,
        logging_config={"enable_access_log": False},
    )(Ranker)
    serve.run(deployment.bind(), route_prefix="/rank")
    while True:
        time.sleep(60)
