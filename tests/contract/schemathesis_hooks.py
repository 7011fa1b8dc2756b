"""What Schemathesis cannot read from a schema: how bodies are sent, and that ids are unique."""

from typing import Any

import msgspec
import schemathesis
from schemathesis import Case, HookContext, SerializationContext


@schemathesis.serializer("text/plain", "application/x-ndjson")
def as_json(_: SerializationContext, value: object) -> bytes:
    """What `navigator.sendBeacon` sends; one event makes one line of NDJSON."""
    return msgspec.json.encode(value)


@schemathesis.hook
def before_call(_: HookContext, case: Case[Any], __: dict[str, object]) -> None:
    """Send no id twice, once as a string and once as an object: a schema cannot forbid it."""
    body = case.body
    items = body.get("items") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(items, list):
        return
    seen: set[str] = set()
    kept = []
    for item in items:
        item_id = str(item.get("id") if isinstance(item, dict) else item)
        if item_id not in seen:
            kept.append(item)
        seen.add(item_id)
    body["items"] = kept
