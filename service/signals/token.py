"""Read-your-writes tokens: which write of which user an acknowledgement covers. Pure.

A token is dot-separated pairs `user-number`, both hexadecimal: xxh32 of the user's id, and
the number of the user's newest covered write. Clients hold it and look at nothing inside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import xxhash

from service.domain import TOKEN_PATTERN
from service.errors import RequestFault

MAX_CHARS = 65_536
"""Room for 1,000 users, the most that one call may write."""

_token = re.compile(TOKEN_PATTERN)


def encode(written: Mapping[str, int]) -> str:
    """The token that covers each user's write number."""
    return ".".join(f"{user_hash(user):08x}-{number:x}" for user, number in written.items())


def parse(token: str) -> dict[int, int]:
    """Write numbers by user hash; raises RequestFault for what `encode` cannot have written."""
    if len(token) > MAX_CHARS or _token.fullmatch(token) is None:
        raise RequestFault(
            "not a token: send the one of an acknowledged event unchanged",
            field="min_signal_token",
            code="invalid_token",
        )
    written: dict[int, int] = {}
    for pair in token.split("."):
        user, _, number = pair.partition("-")
        key = int(user, 16)
        written[key] = max(int(number, 16), written.get(key, 0))
    return written


def user_hash(user: str) -> int:
    """The 32-bit hash that stands for a user in a token."""
    return xxhash.xxh32_intdigest(user.encode("utf-8", "surrogatepass"))
