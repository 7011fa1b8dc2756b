"""Admin routes: what is served and wished, and the acts that change it, behind a bearer token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from service.domain import BackendChoice
from service.errors import NotFound, RankerError, RequestFault, TooLarge
from service.http.access import check_token
from service.http.wire import fault_of, problem_of
from service.ranking.ranker import new_id
from service.versions import rollout
from service.versions.catalog import Catalog
from service.versions.follow import Follower, Scope
from service.versions.gates import Gates
from service.versions.loaded import LoadedVersion
from service.versions.roles import Versions
from service.versions.rollout import CanaryWish, ShadowWish, Wish

_log = logging.getLogger("ranker.audit")
_ACTS = ("load", "promote", "canary", "shadow", "rollback", "backend")
_LAG_S = 5.0
_MAX_BODY_BYTES = 65_536


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an act; `version` null ends a canary, a shadow or a load."""

    version: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    percent: float | None = None
    """Of users for a canary, of requests for a shadow."""
    steps: tuple[float, ...] = ()
    """A canary's ramp, in place of `percent`."""
    step_ms: Annotated[int, Meta(ge=1_000)] = 300_000
    backend: BackendChoice | None = None
    """The engine that every version tries first; `auto` is the best one again."""
    promote: bool = False
    """Whether a canary that passes its last step becomes the primary."""
    gates: Gates = Gates()
    scope: Scope = "fleet"
    by: Annotated[str, Meta(max_length=100)] = ""
    """Who asks, for the audit log."""


class Operated(Protocol):
    """The parts that the routes look at and act upon."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def versions(self) -> Versions:
        """The roles here."""
        ...

    @property
    def catalog(self) -> Catalog:
        """The store."""
        ...

    @property
    def follower(self) -> Follower:
        """The wish, and the fleet."""
        ...


def wish_change(act: str, order: Order) -> Callable[[Wish], Wish]:
    """What an act makes of a wish; raises RequestFault for an order that lacks something."""
    version = order.version
    match act:
        case "promote":
            if version is None:
                raise RequestFault("a version is required", field="version")
            return lambda wish: rollout.promoted(wish, version)
        case "rollback":
            return rollout.rolled_back
        case "load":
            return lambda wish: rollout.with_standby(wish, version)
        case "shadow":
            percent = 10.0 if order.percent is None else order.percent
            shadow = version and ShadowWish(version=version, percent=percent)
            return lambda wish: rollout.with_shadow(wish, shadow or None)
        case "canary":
            if version is None:
                return lambda wish: rollout.with_canary(wish, None, now_ms=0)
            percent = 5.0 if order.percent is None else order.percent
            canary = CanaryWish(
                version=version,
                steps=order.steps or (percent,),
                step_ms=order.step_ms,
                promote=order.promote,
                gates=order.gates,
            )
            now_ms = time.time_ns() // 1_000_000
            return lambda wish: rollout.with_canary(wish, canary, now_ms=now_ms)
        case "backend":
            if order.backend is None:
                raise RequestFault("a backend is required", field="backend")
            wanted = None if order.backend == "auto" else order.backend
            return lambda wish: rollout.with_backend(wish, wanted)
        case _:
            raise NotFound(f"no act {act!r}; there are {', '.join(_ACTS)}", field="act")


def admin_routes(replica: Operated, *, token: str | None, operation: dict[str, Any]) -> APIRouter:
    """`GET /v1/models`, and `POST /v1/models/{name}/{act}` where a token is set."""
    router = APIRouter()

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """What is served here, what is wished, who lags and why, and what lies in the store."""
        return describe(replica)

    @router.post("/v1/models/{name}/{act}", status_code=202, openapi_extra=operation)
    async def act_on(name: str, act: str, request: Request) -> Response:
        """Load, promote, canary, shadow, rollback, backend: change what all replicas should run."""
        request_id = request.headers.get("x-request-id") or new_id()
        order = Order()
        outcome = "failed"
        try:
            check_token(request.headers.get("authorization"), token)
            order = _decode(await _body(request))
            wish = await _act(replica, name, act, order, by=order.by or _origin(request))
            outcome = f"generation {wish.generation}"
        except RankerError as error:
            problem = problem_of(error, request_id)
            outcome = f"{problem.status} {problem.detail}"
            return Response(
                msgspec.json.encode(problem),
                problem.status,
                {"www-authenticate": "Bearer"} if problem.status == 401 else None,
                "application/problem+json",
            )
        finally:
            _log.info(
                "admin act",
                extra={
                    "act": act,
                    "model": name,
                    "version": order.version,
                    "backend": order.backend,
                    "scope": order.scope,
                    "by": order.by,
                    "origin": _origin(request),
                    "outcome": outcome,
                    "request_id": request_id,
                },
            )
        return Response(msgspec.json.encode(wish), 202, None, "application/json")

    return router


async def _act(replica: Operated, name: str, act: str, order: Order, *, by: str) -> Wish:
    if name != replica.model:
        raise NotFound(f"no model {name!r} is served here", field="name")
    if order.version is not None:
        stored = await asyncio.to_thread(replica.catalog.versions, name)
        if order.version not in stored and replica.versions.find(order.version) is None:
            raise NotFound(f"no version {order.version!r} in the store", field="version")
    change = wish_change(act, order)
    primary = replica.versions.primary
    if act == "backend" and primary is not None:
        primary.batcher.ladder.check(None if order.backend == "auto" else order.backend)
    return await replica.follower.act(change, act=act, by=by, scope=order.scope)


def _decode(body: bytes) -> Order:
    try:
        return msgspec.json.decode(body or b"{}", type=Order)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise fault_of(error) from error


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise TooLarge(f"the body is larger than {_MAX_BODY_BYTES} bytes")
    return body


def _origin(request: Request) -> str:
    return request.client.host if request.client else ""


def describe(replica: Operated) -> dict[str, Any]:
    """The body of `GET /v1/models`."""
    versions, follower, catalog = replica.versions, replica.follower, replica.catalog
    primary = versions.primary
    wish = follower.wish
    shown: dict[str, Any] = {
        "model": replica.model,
        "primary": primary and {"name": primary.name, "version": primary.version},
        "roles": versions.names(),
        "rungs": {held.version: _describe_rungs(held) for held in versions.held()},
        "wish": msgspec.to_builtins(wish),
        "replica": follower.replica,
        "replicas": [_describe_replica(follower, at) for at in range(len(follower.seen.replicas))],
        "fleet_fault": follower.fault,
        "store": {name: catalog.versions(name) for name in catalog.names()},
    }
    if wish.canary is not None:
        shown["canary"] = msgspec.to_builtins(follower.verdict())
    if wish.shadow is not None:
        shown["shadow"] = follower.shadow.totals.means()
    return shown


def _describe_rungs(version: LoadedVersion) -> list[dict[str, Any]]:
    """The engines of a version in the order in which they are tried."""
    return [
        {
            "backend": rung.kind,
            "precision": rung.precision,
            "state": rung.state,
            "serves": rung.serves,
            "queued_tiles": rung.queued_tiles,
            "wait_ms": round(rung.wait_s * 1e3, 3),
        }
        for rung in version.batcher.ladder.reports()
    ]


def _describe_replica(follower: Follower, at: int) -> dict[str, Any]:
    other, wish = follower.seen.replicas[at], follower.wish
    age_s = time.time() - other.at_ms / 1e3
    missing = [
        role
        for role, version in wish.roles().items()
        if other.roles.get(role) != version and (version or role in other.roles)
    ]
    reason = "; ".join(f"{role}: {fault}" for role, fault in other.faults.items())
    if age_s > _LAG_S:
        state, reason = "silent", f"last heard of {age_s:.0f} s ago"
    elif not missing and "backend" not in other.faults and other.generation >= wish.generation:
        state = "converged"
    elif other.loading:
        state, reason = "loading", reason or f"loads {other.loading}"
    else:
        state = "refused" if reason else "behind"
        reason = reason or f"knows generation {other.generation} of {wish.generation}"
    return {
        "replica": other.replica,
        "state": state,
        "reason": reason if state != "converged" else "",
        "generation": other.generation,
        "roles": other.roles,
        "age_ms": max(0, round(age_s * 1e3)),
    }
