"""Where requests go, and how one is written as HTTP/1.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

import msgspec


class Target(msgspec.Struct, frozen=True):
    """Where requests go: the parts of a base URL."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `http://host:port/base`; raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https URL")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"))

    def encode(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """One request as bytes; JSON unless the headers say otherwise."""
        fields = {"host": f"{self.host}:{self.port}"}
        if body:
            fields["content-type"] = "application/json"
        if body or method not in {"GET", "HEAD", "DELETE"}:
            fields["content-length"] = str(len(body))
        for name, value in (headers or {}).items():
            fields[name.lower()] = value
        lines = [f"{method} {self.path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
