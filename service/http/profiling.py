"""The admin route that profiles: a flame graph of the running process, on demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from service.errors import RankerError, Unauthenticated
from service.http.access import check_token
from service.http.wire import problem_of
from service.ranking.ranker import new_id

_IMAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "a flame graph", "content": {"image/svg+xml": {}}},
    401: {"description": "no admin token"},
    403: {"description": "a wrong admin token, or none is set"},
    503: {"description": "this process cannot be sampled; `detail` says why"},
}


def profile_routes(
    flame_graph: Callable[[int], Awaitable[bytes]], *, token: str | None
) -> APIRouter:
    """`GET /v1/profile?seconds=5`, behind the admin token."""
    router = APIRouter()

    @router.get("/v1/profile", responses=_IMAGE, response_class=Response)
    async def profile(
        request: Request, seconds: Annotated[int, Query(ge=1, le=60)] = 5
    ) -> Response:
        """Where the threads of this process spend so many seconds, as SVG."""
        try:
            check_token(request.headers.get("authorization"), token)
            return Response(await flame_graph(seconds), media_type="image/svg+xml")
        except RankerError as error:
            problem = problem_of(error, request.headers.get("x-request-id") or new_id())
            return Response(
                msgspec.json.encode(problem),
                problem.status,
                {"www-authenticate": "Bearer"} if isinstance(error, Unauthenticated) else None,
                "application/problem+json",
            )

    return router
