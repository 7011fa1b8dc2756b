"""FastAPI as one writes it first: a pydantic body, a dict as the answer, one run a request."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from loadtests.peers.scoring import PORT, Answer, Request, Scorer
from service.domain import Context

app = FastAPI()
scorer = Scorer()


class Where(BaseModel):
    """Where the slate will be shown."""

    surface: str = ""


class Body(BaseModel):
    """A ranking request."""

    user_id: str
    items: list[str]
    context: Where = Where()
    ts: int | None = None


@app.post("/rank")
async def rank(body: Body) -> Answer:
    request = Request(body.user_id, body.items, Context(body.context.surface), body.ts)
    (answer,) = await scorer.rank_async([request])
    return answer


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, access_log=False)
