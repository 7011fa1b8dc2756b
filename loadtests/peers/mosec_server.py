"""mosec: its HTTP server in Rust, and one worker process that gets whole batches."""

from __future__ import annotations

from mosec import Server, Worker

from loadtests.peers.scoring import MAX_BATCH, MAX_WAIT_MS, Answer, Request, Scorer, decode, encode


class Ranker(Worker):
    """One stage: a stage of its own for the reads would cost a hand-over between processes."""

    def __init__(self) -> None:
        self._scorer = Scorer()

    def deserialize(self, data: bytes) -> Request:
        return decode(data)

    def forward(self, data: list[Request]) -> list[Answer]:
        return self._scorer.rank(data)

    def serialize(self, data: Answer) -> bytes:
        return encode(data)


if __name__ == "__main__":
    server = Server()
    # one worker: the server has one core
    server.append_worker(
        Ranker, num=1, max_batch_size=MAX_BATCH, max_wait_time=MAX_WAIT_MS, route="/rank"
    )
    server.run()
