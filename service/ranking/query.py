"""What a caller asks and what it gets, free of HTTP: the types of `POST /rank`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from service.domain import (
    EMPTY_CONTEXT,
    TOKEN_PATTERN,
    BackendName,
    Context,
    DegradedReason,
    ItemFeatures,
    Outcome,
    Priority,
    SignalSource,
    StageTimes,
)
from service.inference.batcher import BatchReport
from service.versions.traffic import Sample

Id = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_TIMEOUT_MS = 60_000
RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$(?!\n)")]
"""Printable ASCII without blanks, as it is sent back in a header; `$` alone lets a last line
break pass."""


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of a slate, where its id alone does not say enough."""

    id: Id
    prior: float | None = None
    """The caller's own score: the order of last resort."""
    features: ItemFeatures | None = None


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /rank`."""

    items: Annotated[list[Id | Candidate], Meta(min_length=1)]
    user_id: Id | None = None
    session_id: Id | None = None
    request_id: RequestId | None = None
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """name, name@label or name@version."""
    context: Context = EMPTY_CONTEXT
    top_n: Annotated[int, Meta(ge=1)] | None = None
    timeout_ms: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_MS)] | None = None
    priority: Priority = "interactive"
    allow_degraded: bool = True
    min_signal_token: Annotated[str, Meta(max_length=65_536, pattern=TOKEN_PATTERN)] | None = None
    ts: Annotated[int, Meta(ge=0, le=2**52)] | None = None
    """The request's time in ms, for replays; now if absent, never in the future."""


class Ranking(msgspec.Struct, kw_only=True):
    """The answer; as made, it is the caller's own order with nothing known of the user."""

    request_id: str
    ranking_id: str
    model_name: str = ""
    model_version: str = ""
    backend: BackendName = "prior"
    precision: str = ""
    ids: list[str] = []
    indexes: list[int] = []
    scores: list[float] = []
    degraded: list[DegradedReason] = []
    signal_source: SignalSource = "none"
    signal_count: int = 0
    signal_age_ms: int | None = None
    times: StageTimes = msgspec.field(default_factory=StageTimes)
    batch: BatchReport | None = None
    """The batch that scored it."""
    sample: Sample | None = None
    """What was scored, for those who look on after the reply."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request, for telemetry; names no user and no item."""

    route: str
    outcome: Outcome
    status: int
    request_id: str
    started_s: float
    """On the monotonic clock."""
    headers: Iterable[tuple[bytes, bytes]] = ()
    """The request's own, read for its trace context alone."""
    model_name: str = ""
    model_version: str = ""
    backend: BackendName | None = None
    precision: str = ""
    degraded: tuple[DegradedReason, ...] = ()
    candidates: int = 0
    signal_source: SignalSource = "none"
    signal_count: int = 0
    signal_age_ms: int | None = None
    times: StageTimes = msgspec.field(default_factory=StageTimes)
    batch: BatchReport | None = None
    detail: str = ""
