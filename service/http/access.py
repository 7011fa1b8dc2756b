"""Who may call the data routes, and how often."""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence

from service.errors import Forbidden, QuotaExceeded, Unauthenticated
from service.http.asgi import Headers, header


class Access:
    """API keys, compared in constant time, and a token bucket of one second for each."""

    def __init__(self, keys: Sequence[str], *, quota_rps: float | None) -> None:
        self._keys = [key.encode() for key in keys]
        self._quota_rps = quota_rps
        self._buckets: dict[bytes, tuple[float, float]] = {}  # key: tokens, time

    def check(self, headers: Headers) -> None:
        """Raise Unauthenticated, Forbidden or QuotaExceeded; nothing where no keys are set."""
        if not self._keys:
            return
        given = header(headers, b"x-api-key")
        if given is None:
            scheme, _, token = (header(headers, b"authorization") or "").partition(" ")
            given = token if scheme.lower() == "bearer" else None
        if not given:
            raise Unauthenticated("an API key is needed: X-Api-Key, or Authorization: Bearer")
        matches = [key for key in self._keys if hmac.compare_digest(key, given.encode("latin-1"))]
        if not matches:
            raise Forbidden("the API key is not known")
        if self._quota_rps is not None:
            self._take(matches[0], self._quota_rps)

    def _take(self, key: bytes, rps: float) -> None:
        now = time.monotonic()
        tokens, at = self._buckets.get(key, (max(1.0, rps), now))
        tokens = min(max(1.0, rps), tokens + (now - at) * rps)
        if tokens < 1:
            self._buckets[key] = tokens, now
            raise QuotaExceeded("this key's quota is used up", retry_after_s=(1 - tokens) / rps)
        self._buckets[key] = tokens - 1, now


def check_token(given: str | None, token: str | None) -> None:
    """Raise Unauthenticated or Forbidden; a wrong admin token takes as long as the right one."""
    if token is None:
        raise Forbidden("admin routes are off: no RANKER_ADMIN_TOKEN is set")
    scheme, _, credentials = (given or "").partition(" ")
    if scheme.lower() != "bearer" or not credentials:
        raise Unauthenticated("an admin token is needed: Authorization: Bearer")
    if not hmac.compare_digest(credentials.encode(), token.encode()):
        raise Forbidden("the admin token is wrong")
