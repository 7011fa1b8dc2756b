"""Last-known signals of recently read users, for the time when Redis does not answer.

Copies are bounded in bytes and in age, least recently used first to go. Nothing here is fresh.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

ENTRY_BYTES = 400
"""Beside the records: key, tuple, bytes headers and slots in the dictionary."""


class LastKnown(NamedTuple):
    """One user's raw state as last read."""

    records: bytes
    """JSON array of signals that all decode."""
    profile: bytes
    read_at_s: float


class LocalCopies:
    """LRU of last-known states, at most `max_bytes` of memory, none older than `max_age_s`."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_age_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._copies: OrderedDict[str, LastKnown] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def put(self, user: str, records: bytes, profile: bytes) -> None:
        """Replace the user's copy, then let the least recently used go while over the limit."""
        self.discard(user)
        self._copies[user] = LastKnown(records, profile, self._clock())
        self.held_bytes += _size(user, records, profile)
        while self.held_bytes > self._max_bytes:
            oldest, gone = self._copies.popitem(last=False)
            self.held_bytes -= _size(oldest, gone.records, gone.profile)

    def get(self, user: str) -> LastKnown | None:
        """The user's copy, if one is held and young enough."""
        known = self._copies.get(user)
        if known is None:
            return None
        if self._clock() - known.read_at_s > self._max_age_s:
            self.discard(user)
            return None
        self._copies.move_to_end(user)
        return known

    def discard(self, user: str) -> None:
        """Drop the user's copy, if any."""
        gone = self._copies.pop(user, None)
        if gone is not None:
            self.held_bytes -= _size(user, gone.records, gone.profile)


def _size(user: str, records: bytes, profile: bytes) -> int:
    return ENTRY_BYTES + len(user) + len(records) + len(profile)
