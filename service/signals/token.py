"""Read-your-writes tokens: which write of which user an acknowledgement covers. Pure.

A token is base64url of pairs: xxh32 of the user's id (4 bytes), then the number of the
user's newest covered write as a varint. Clients hold it and look at nothing inside.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping

import xxhash

from service.errors import RequestFault

MAX_CHARS = 16_384
"""Room for 1,000 users of 8 bytes, the most that one call may write."""


def encode(written: Mapping[str, int]) -> str:
    """The token that covers each user's write number."""
    out = bytearray()
    for user, number in written.items():
        assert number >= 0
        out += user_hash(user).to_bytes(4, "little")
        rest = number
        while rest >= 0x80:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return urlsafe_b64encode(out).rstrip(b"=").decode("ascii")


def parse(token: str) -> dict[int, int]:
    """Write numbers by user hash; raises RequestFault for what `encode` cannot have written."""
    if len(token) > MAX_CHARS:
        raise _fault(f"longer than {MAX_CHARS} characters")
    try:
        raw = b64decode(token.encode("ascii") + b"=" * (-len(token) % 4), b"-_", validate=True)
    except (Base64Error, UnicodeEncodeError) as error:
        raise _fault("not base64url") from error
    written: dict[int, int] = {}
    at = 0
    while at < len(raw):
        user = int.from_bytes(raw[at : at + 4], "little")
        at += 4
        number = shift = 0
        while at < len(raw) and raw[at] & 0x80 and shift < 56:
            number |= (raw[at] & 0x7F) << shift
            shift += 7
            at += 1
        if at >= len(raw) or raw[at] & 0x80:
            raise _fault("cut short or damaged")
        number |= raw[at] << shift
        at += 1
        written[user] = max(number, written.get(user, 0))
    return written


def user_hash(user: str) -> int:
    """The 32-bit hash that stands for a user in a token."""
    return xxhash.xxh32_intdigest(user.encode("utf-8", "surrogatepass"))


def _fault(reason: str) -> RequestFault:
    return RequestFault(
        f"{reason}: send the token of an acknowledged event unchanged",
        field="min_signal_token",
        code="invalid_token",
    )
