"""The composition root: builds the parts from settings, and mounts the routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

from service.http import openapi
from service.http.access import Access
from service.http.admin import admin_routes
from service.http.asgi import AsgiExchange, Endpoint, Exchange, Receive, Scope, Send, last_answer
from service.http.problems import on_bug, on_http_error
from service.http.profiling import profile_routes
from service.http.routes import EventsEndpoint, RankEndpoint, forget_user
from service.instruments import Instruments
from service.ranking.admission import Admission
from service.ranking.ranker import Ranker
from service.replica import Replica
from service.settings import Settings
from service.signals.breaker import Breaker
from service.signals.connect import connect
from service.signals.store import SignalStore
from service.telemetry.profile import flame_graph
from service.versions.items_feed import follow_items


class Service(FastAPI):
    """The FastAPI app; the hot routes are reached before its middleware and router."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            title="ranker",
            summary="Ranks a slate of candidates for one person within milliseconds.",
            version="0.1.0",
            lifespan=_lifespan,
            exception_handlers={HTTPException: on_http_error, Exception: on_bug},
        )
        self.settings = settings
        self.instruments = Instruments(settings, version=self.version)
        self.telemetry = self.instruments.telemetry
        self.metrics = self.telemetry.metrics
        self.replica = Replica(settings, watch=self.instruments.of_versions())
        self.versions = self.replica.versions
        self.loaded = self.replica.settled
        """Set once the first load has ended, well or not."""
        self.device_lost = False
        """Whether a device was lost when the service shut down."""
        self.metrics.ready.set_function(lambda: self.versions.primary is not None)
        self.admission = Admission(
            max_in_flight=settings.max_in_flight, late_s=settings.max_queue_ms / 2e3
        )
        self.access = Access(
            [key.get_secret_value() for key in settings.api_keys], quota_rps=settings.quota_rps
        )
        self.signals = _signals(settings)
        self.instruments.watch(
            versions=self.versions, signals=self.signals, admission=self.admission
        )
        ranker = Ranker(
            versions=self.versions,
            signals=self.signals,
            admission=self.admission,
            max_items=settings.max_items,
            signals_budget_s=settings.signals_budget_ms / 1e3,
        )
        self.hot: dict[bytes, Endpoint] = {
            b"/rank": RankEndpoint(
                ranker,
                access=self.access,
                record=self.telemetry.record,
                answered=self.replica.onlookers.answered,
                max_body_bytes=settings.max_body_bytes,
                timeout_s=settings.timeout_ms / 1e3,
            ),
            b"/v1/events": EventsEndpoint(
                self.signals,
                access=self.access,
                record=self.telemetry.record,
                count=lambda result, count: self.metrics.events.labels(result).inc(count),
                stored=self.replica.onlookers.stored,
                max_body_bytes=settings.max_body_bytes,
            ),
        }
        _mount(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go straight to a hot route, or the framework's way."""
        if self.draining and scope["type"] == "http":
            send = last_answer(send)
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self.hot.get(scope["path"].encode())
            if endpoint is not None:
                await endpoint(AsgiExchange(scope, receive, send))
                return
        await super().__call__(scope, receive, send)

    @property
    def draining(self) -> bool:
        """Whether answers end their connections, which outlive what a balancer knows."""
        return self.admission.draining

    def lost_s(self) -> float | None:
        """Seconds since a loaded version lost a device; None if all have theirs."""
        found = [held.batcher.ladder.lost_s() for held in self.versions.held()]
        return max((lost_s for lost_s in found if lost_s is not None), default=None)


def _signals(settings: Settings) -> SignalStore:
    assert settings.redis_url is not None, "the caller starts a store before the app"
    client = connect(
        settings.redis_url.get_secret_value(),
        timeout_s=settings.redis_timeout_ms / 1e3,
        max_connections=settings.redis_connections,
    )
    return SignalStore(
        client,
        keep=settings.signals_keep,
        ttl_s=int(settings.signals_ttl_days * 86_400),
        budget_s=settings.signals_budget_ms / 1e3,
        local_bytes=int(settings.signals_local_mb * (1 << 20)),
        breaker=Breaker(),
    )


@asynccontextmanager
async def _lifespan(app: Service) -> AsyncIterator[None]:
    app.replica.start()
    feeding: asyncio.Task[None] | None = None
    if app.settings.items_file is not None:
        feeding = asyncio.create_task(
            follow_items(
                app.settings.items_file, app.versions, every_s=app.settings.items_poll_ms / 1e3
            )
        )
    try:
        async with app.instruments.running():
            yield
    finally:
        if feeding is not None:
            feeding.cancel()
        app.device_lost = app.lost_s() is not None
        await app.replica.close()
        await app.signals.close()


class _Delegated(Response):
    """Hands a request that came the framework's way to an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(AsgiExchange(scope, receive, send))


def _mount(app: Service) -> None:
    """Declare every route, so that the OpenAPI page shows all of them."""
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "not ready; `reason` says why"}
    }

    @app.post("/rank", openapi_extra=openapi.rank_operation())
    async def rank() -> Response:
        """Order a slate for one person."""
        return _Delegated(app.hot[b"/rank"])

    @app.post("/v1/events", openapi_extra=openapi.events_operation())
    async def post_events() -> Response:
        """Take clicks, dwell times and impressions."""
        return _Delegated(app.hot[b"/v1/events"])

    @app.delete("/v1/users/{user_id:path}", openapi_extra=openapi.forget_operation())
    async def forget(user_id: str) -> Response:
        """Forget a user: signals, profile, and every local copy."""

        async def endpoint(exchange: Exchange) -> None:
            await forget_user(user_id, sink=app.signals, access=app.access, exchange=exchange)

        return _Delegated(endpoint)

    lost: dict[int | str, dict[str, Any]] = {503: {"description": "a device is lost for good"}}

    @app.get("/livez", responses=lost)
    @app.get("/v2/health/live", responses=lost)
    async def live(response: Response) -> dict[str, str]:
        """The event loop runs, and no device has been lost for long."""
        lost_s = app.lost_s()
        if lost_s is None or lost_s < app.settings.lost_grace_ms / 1e3:
            return {"status": "live"}
        response.status_code = 503
        return {"status": "not live", "reason": "a device is lost; this process must be replaced"}

    @app.get("/readyz", responses=not_ready)
    @app.get("/v2/health/ready", responses=not_ready)
    async def ready(response: Response) -> dict[str, Any]:
        """A version is warm, and the service is not draining."""
        primary = app.versions.primary
        if primary is not None and not app.admission.draining:
            return {"status": "ready", "model": primary.name, "version": primary.version}
        response.status_code = 503
        reason = "draining" if app.admission.draining else app.versions.fault
        return {"status": "not ready", "reason": reason}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics with exemplars for those who accept it."""
        body, content_type = app.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    token = app.settings.admin_token
    app.include_router(
        admin_routes(
            app.replica,
            token=token.get_secret_value() if token else None,
            operation=openapi.act_operation(),
        )
    )
    app.include_router(
        profile_routes(flame_graph, token=token.get_secret_value() if token else None)
    )
    openapi.publish_schemas(app, max_items=app.settings.max_items)
