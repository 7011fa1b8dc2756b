"""Names of a user's keys in Redis. The braces keep all keys of a user in one cluster slot."""

from __future__ import annotations

from typing import NamedTuple


class Keys(NamedTuple):
    """One user's keys."""

    signals: bytes
    """List of JSON records, newest first."""
    profile: bytes
    """JSON of `domain.Profile`."""
    seen: bytes
    """Sorted set: ids of the newest events, by arrival."""
    written: bytes
    """How often the service changed the list: what a token refers to."""


def keys_of(user: str) -> Keys:
    """The keys of a user; a first character `}` or `%` of the id is percent-encoded.

    `signals:{}x}` would have an empty hash tag, and its user's keys lie in several slots.
    """
    if user[:1] in ("}", "%"):
        user = f"%{ord(user[0]):02X}{user[1:]}"
    tag = b"{%b}" % user.encode("utf-8", "surrogatepass")
    return Keys(b"signals:" + tag, b"profile:" + tag, b"seen:" + tag, b"written:" + tag)
