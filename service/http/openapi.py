"""The OpenAPI page's schemas, taken from the very types that decode the bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from service.http.admin import Order
from service.http.events import Accepted, Click, Dwell, EventList, Impression
from service.http.wire import Problem, RankAnswer
from service.ranking.query import MAX_TIMEOUT_MS, Query
from service.versions.rollout import Wish

_REF = "#/components/schemas/{name}"


_TYPES = [
    *(Query, RankAnswer, Impression, Click, Dwell, EventList, Accepted, Problem),
    *(Order, Wish),
]
_EVENTS = ("Impression", "Click", "Dwell")
_EVENT = {"anyOf": [{"$ref": _REF.format(name=name)} for name in _EVENTS]}

# what the types cannot say: one of the two must name somebody
_SOMEBODY = [
    {"required": [field], "properties": {field: {"type": "string"}}}
    for field in ("user_id", "session_id")
]
_HEADERS = {
    "X-Request-Id": "the request's id, the caller's own if it gave one",
    "X-Model-Version": "the version that ranked",
    "X-Degraded": "the reasons of `degraded`, comma-separated; absent if none",
    "Server-Timing": "milliseconds by stage",
}
_PROBLEMS = {
    400: "not JSON",
    401: "no credentials, where they are needed",
    403: "wrong credentials",
    404: "unknown model, version or label",
    409: "others have changed the wish meanwhile",
    413: "body too large",
    422: "does not validate; `field` says where",
    429: "this key's quota is used up",
    500: "a bug",
    503: "overloaded, not ready, or signals away; see `code`",
    504: "deadline missed and degraded answers not allowed",
}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _body(schema: dict[str, Any], *media: str) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema} for kind in media}}


def _problems(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {
            "description": _PROBLEMS[status],
            **_body(_ref("Problem"), "application/problem+json"),
        }
        for status in statuses
    }


def rank_operation() -> dict[str, Any]:
    """What `openapi_extra` says of `POST /rank`."""
    return {
        "parameters": [
            {
                "name": "X-Request-Timeout-Ms",
                "in": "header",
                "required": False,
                "description": "deadline in ms; the smaller of this and `timeout_ms` wins",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_MS},
            }
        ],
        "requestBody": {"required": True, **_body(_ref("Query"), "application/json")},
        "responses": {
            "200": {
                "description": "the slate in its new order",
                "headers": {
                    name: {"description": text, "schema": {"type": "string"}}
                    for name, text in _HEADERS.items()
                },
                **_body(_ref("RankAnswer"), "application/json"),
            },
            **_problems(400, 401, 403, 404, 413, 422, 429, 500, 503, 504),
        },
    }


def events_operation() -> dict[str, Any]:
    """What `openapi_extra` says of `POST /v1/events`."""
    schema = {"anyOf": [*_EVENT["anyOf"], _ref("EventList")]}
    return {
        "requestBody": {
            "required": True,
            "description": "`text/plain` holds the same JSON, as `navigator.sendBeacon` sends it; "
            "`application/x-ndjson` holds one event a line",
            "content": {
                **_body(schema, "application/json", "text/plain")["content"],
                "application/x-ndjson": {"schema": _EVENT},
            },
        },
        "responses": {
            "202": {
                "description": "stored; `rejected` names the events that were not",
                **_body(_ref("Accepted"), "application/json"),
            },
            **_problems(400, 401, 403, 413, 422, 429, 500, 503),
        },
    }


def forget_operation() -> dict[str, Any]:
    """What `openapi_extra` says of `DELETE /v1/users/{user_id}`."""
    return {
        "responses": {
            "204": {"description": "nothing is known of the user any more"},
            **_problems(401, 403, 422, 429, 503),
        }
    }


def act_operation() -> dict[str, Any]:
    """What `openapi_extra` says of `POST /v1/models/{name}/{act}`."""
    return {
        "requestBody": {"required": False, **_body(_ref("Order"), "application/json")},
        "responses": {
            "202": {
                "description": "the new wish; replicas converge on it",
                **_body(_ref("Wish"), "application/json"),
            },
            **_problems(400, 401, 403, 404, 409, 413, 422, 503),
        },
    }


def publish_schemas(app: FastAPI, *, max_items: int) -> None:
    """Put the types' schemas into the app's OpenAPI page."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        page = made()
        _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF)
        schemas["Query"]["properties"]["items"] |= {"maxItems": max_items, "uniqueItems": True}
        # one bad event does not lose the others: the list needs one good one
        anything = {"description": "whatever is no event is named in `rejected`"}
        schemas["EventList"]["properties"]["events"] |= {
            "items": {"anyOf": [*_EVENT["anyOf"], anything]},
            "contains": _EVENT,
        }
        for name in ("Query", *_EVENTS):
            schemas[name]["anyOf"] = _SOMEBODY
        page.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        for path in page["paths"].values():
            for operation in path.values():
                extra = {"200", "202", "204"} & set(operation["responses"])
                if extra != {"200"}:
                    operation["responses"].pop("200", None)
        return page

    app.openapi = openapi  # type: ignore[method-assign]
