"""What Schemathesis cannot read from a schema: how bodies are sent, and that ids are unique."""

import msgspec
import schemathesis
from schemathesis import HookContext, SerializationContext


@schemathesis.serializer("text/plain", "application/x-ndjson")
def as_json(_: SerializationContext, value: object) -> bytes:
    """What `navigator.sendBeacon` sends; one event makes one line of NDJSON."""
    return msgspec.json.encode(value)


@schemathesis.hook
def filter_body(_: HookContext, body: object) -> bool:
    """Leave out slates with an id that comes twice, once as a string and once as an object."""
    items = body.get("items") if isinstance(body, dict) else None
    if not isinstance(items, list):
        return True
    ids = [item.get("id") if isinstance(item, dict) else item for item in items]
    return len({str(item_id) for item_id in ids}) == len(ids)
