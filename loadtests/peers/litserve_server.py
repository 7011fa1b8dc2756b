"""LitServe: one API process, one worker, batches, and its ZeroMQ queues for high throughput.

Annotations are evaluated: it looks at those of the first and the last step.
"""

from typing import Any

import litserve
import msgspec
from fastapi import Request as Call
from fastapi import Response

from loadtests.peers.scoring import MAX_BATCH, MAX_WAIT_MS, PORT, Request, Scorer, encode


class Ranker(litserve.LitAPI):
    """Requests in batches, neither stacked nor split as tensors."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - the base gives it
        self._scorer = Scorer()

    # with this annotation it is given the body as JSON; with dict, pydantic would copy it
    def decode_request(self, request: Call) -> Request:
        body: Any = request
        return msgspec.convert(body, Request)

    def batch(self, inputs: list[Request]) -> list[Request]:
        return inputs

    def predict(self, requests: list[Request]) -> list[bytes]:
        return [encode(answer) for answer in self._scorer.rank(requests)]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/json")


if __name__ == "__main__":
    api = Ranker(api_path="/rank", max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_MS / 1e3)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=PORT,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
