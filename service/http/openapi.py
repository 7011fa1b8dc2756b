"""The OpenAPI page's schemas, taken from the very types that decode the bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from service.http.events import Accepted, EventBody, EventList
from service.http.wire import Problem, RankAnswer
from service.ranking.query import Query

_REF = "#/components/schemas/{name}"


_TYPES = [Query, RankAnswer, EventBody, EventList, Accepted, Problem]

_HEADERS = {
    "X-Request-Id": "the request's id, the caller's own if it gave one",
    "X-Model-Version": "the version that ranked",
    "X-Degraded": "the reasons of `degraded`, comma-separated; absent if none",
    "Server-Timing": "milliseconds by stage",
}
_PROBLEMS = {
    400: "not JSON",
    401: "no API key, where keys are set",
    403: "a wrong API key",
    404: "unknown model, version or label",
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
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
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
    schema = {"anyOf": [_ref("EventBody"), _ref("EventList")]}
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": schema},
                "text/plain": {"schema": {"type": "string", "description": "the same JSON"}},
                "application/x-ndjson": {
                    "schema": {"type": "string", "description": "one event a line"}
                },
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


def publish_schemas(app: FastAPI, *, max_items: int) -> None:
    """Put the types' schemas into the app's OpenAPI page."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        page = made()
        _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF)
        schemas["Query"]["properties"]["items"]["maxItems"] = max_items
        page.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        for path in page["paths"].values():
            for operation in path.values():
                extra = {"200", "202", "204"} & set(operation["responses"])
                if extra != {"200"}:
                    operation["responses"].pop("200", None)
        return page

    app.openapi = openapi  # type: ignore[method-assign]
