"""What all peers share: the request, the Redis reads, the encoding, the engine, the answer.

A peer's own file holds only what its framework is for: HTTP, batches and processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis
import redis.asyncio

from service.bundle import Bundle
from service.domain import EMPTY_CONTEXT, EMPTY_PROFILE, Context
from service.encoding.batch import encode_batch
from service.encoding.history import Person
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate, best, blend
from service.inference.backends.onnx import OnnxCpu
from service.signals.keys import keys_of
from service.signals.records import decode_profile, decode_records

MAX_BATCH = 32
MAX_WAIT_MS = 2
PORT = int(os.environ.get("PEER_PORT", "0"))
_NEWEST_SIGNALS = 50


class Request(msgspec.Struct, frozen=True):
    """What of a `/rank` body a ranking needs; other fields are skipped."""

    user_id: str
    items: list[str]
    context: Context = EMPTY_CONTEXT
    ts: int | None = None


Answer = dict[str, list[dict[str, Any]]]
decode = msgspec.json.Decoder(Request).decode
encode = msgspec.json.Encoder().encode


class Scorer:
    """One process's model and Redis clients, set up from PEER_BUNDLE and PEER_REDIS_URL."""

    def __init__(self) -> None:
        bundle = Bundle.open(Path(os.environ["PEER_BUNDLE"]))
        manifest = bundle.manifest
        precision, graph = next(iter(manifest.graphs.items()))
        self._space = RowSpace(manifest.input)
        self._table = ItemTable.from_bytes(bundle.read(manifest.item_table), self._space)
        self._output = manifest.output
        self._engine = OnnxCpu(bundle.read(graph), precision=precision)
        url = os.environ["PEER_REDIS_URL"]
        self._store = redis.Redis.from_url(url)
        self._async_store = redis.asyncio.Redis.from_url(url)

    def rank(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer each; the reads of all share one pipeline, and all one engine run."""
        pipeline = self._store.pipeline(transaction=False)
        return self._answers(requests, _ask(pipeline, requests).execute())

    async def rank_async(self, requests: Sequence[Request]) -> list[Answer]:
        """The same with asyncio's client."""
        pipeline = self._async_store.pipeline(transaction=False)
        return self._answers(requests, await _ask(pipeline, requests).execute())

    def _answers(self, requests: Sequence[Request], replies: Sequence[Any]) -> list[Answer]:
        now_ms = time.time_ns() // 1_000_000
        people, slates = [], []
        for at, request in enumerate(requests):
            signals = decode_records(replies[2 * at]).signals
            profile = decode_profile(replies[2 * at + 1]) or EMPTY_PROFILE
            at_ms = now_ms if request.ts is None else request.ts
            people.append(Person(signals, profile, request.context, at_ms))
            slates.append(Slate(request.items, surface=request.context.surface, now_ms=at_ms))
        batch, _ = encode_batch(people, slates, table=self._table, space=self._space)
        logits = self._engine.score(batch)  # [tiles, tile_width, 2]
        scores = blend(logits, self._output)  # [tiles, tile_width]
        return [
            _answer(request, scores[batch.tile_user == at].ravel()[: len(request.items)])
            for at, request in enumerate(requests)
        ]


def _ask(pipeline: Any, requests: Sequence[Request]) -> Any:
    for request in requests:
        keys = keys_of(request.user_id)
        pipeline.lrange(keys.signals, 0, _NEWEST_SIGNALS - 1)
        pipeline.get(keys.profile)
    return pipeline


def _answer(request: Request, scores: Any) -> Answer:
    order, values = best(scores, top_n=len(request.items))
    ranked = zip(order.tolist(), values.tolist(), strict=True)
    return {"items": [{"id": request.items[at], "index": at, "score": to} for at, to in ranked]}
