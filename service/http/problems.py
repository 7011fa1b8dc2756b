"""Errors of the framework's own routes, told as all others are: problem+json."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from service.http.asgi import request_id_of
from service.http.wire import Problem, problem_of
from service.ranking.ranker import new_id

_log = logging.getLogger("ranker.http")


async def on_http_error(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    problem = Problem(
        title=status.phrase,
        status=status,
        detail=f"{request.method} {request.url.path}: {error.detail}",
        code=status.name.lower(),
        request_id=request_id_of(request.headers.raw) or new_id(),
        retryable=False,
    )
    return _response(problem, dict(error.headers or {}))


async def on_bug(request: Request, error: Exception) -> Response:
    """A bug: the caller hears that it is one, the log has the rest."""
    request_id = request_id_of(request.headers.raw) or new_id()
    _log.error("unexpected error", exc_info=error, extra={"request_id": request_id})
    return _response(problem_of(error, request_id), {})


def _response(problem: Problem, headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(problem),
        status_code=problem.status,
        media_type="application/problem+json",
        headers=headers | {"x-request-id": problem.request_id},
    )
