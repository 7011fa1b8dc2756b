"""The words of the service as types: signals, histories, candidates, outcomes, reports."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]

Millis = Annotated[int, Meta(ge=0, le=10**14 - 1)]
"""Times since 1970 and durations; at most 14 digits, which Lua's JSON writes exactly."""

Word = Annotated[str, Meta(max_length=256)]
Action = Literal["click", "dwell"]
EventType = Literal["impression", "click", "dwell"]
Priority = Literal["interactive", "batch", "shadow"]
DegradedReason = Literal[
    "fallback_backend",
    "signals_unavailable",
    "stale_signals",
    "deadline",
    "overload",
    "unknown_items",
    "warming",
]
SignalSource = Literal["redis", "local", "none"]
BackendName = Literal["tensorrt", "onnxruntime", "openvino", "prior"]
BackendKind = Literal["tensorrt", "onnx-cuda", "openvino", "onnx-cpu"]
"""An engine and where it runs; the words of operators."""
BackendChoice = Literal["auto", "tensorrt", "onnx-cuda", "openvino", "onnx-cpu"]
PrecisionChoice = Literal["auto", "fp32", "fp16", "fp8", "int8"]
Outcome = Literal["ok", "degraded", "invalid", "overloaded", "expired", "cancelled", "failed"]


TOKEN_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{1,14}(\.[0-9a-f]{8}-[0-9a-f]{1,14})*$"  # noqa: S105  no password
"""What a read-your-writes token looks like."""


class Signal(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One visit of a user to an item, as the JSON record in Redis: `{"i","a","t","d","s"}`."""

    item_id: str = msgspec.field(name="i")
    action: Action = msgspec.field(name="a")
    at_ms: Millis = msgspec.field(name="t")
    dwell_ms: Millis = msgspec.field(name="d", default=0)
    surface: str = msgspec.field(name="s", default="")


class Event(msgspec.Struct, frozen=True):
    """What a user did with an item, as its producer reports it."""

    user: str
    item_id: str
    type: EventType
    at_ms: Millis
    dwell_ms: Millis = 0
    event_id: str | None = None
    """The producer's key against duplicates."""
    surface: str = ""
    ranking_id: str | None = None
    """The answer that showed the item."""


class Profile(msgspec.Struct, frozen=True):
    """What is known of a user beyond signals: `{"segments": ["age=25-34", "sporty"]}`."""

    segments: tuple[str, ...] = ()


EMPTY_PROFILE = Profile()


class UserState(msgspec.Struct, frozen=True):
    """What one read of the signal store gave for one user."""

    signals: tuple[Signal, ...] = ()
    """Newest first."""
    profile: Profile = EMPTY_PROFILE
    source: SignalSource = "none"
    stale: bool = False
    """True if the state is older than the caller's token, or comes from a local copy."""


EMPTY_STATE = UserState()


class ItemFeatures(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A candidate's features in the request; each given one overrides the item table."""

    category: Word | None = None
    author: Word | None = None
    created_ms: Annotated[int, Meta(ge=0, le=2**52)] | None = None
    popularity: Annotated[float, Meta(ge=0)] | None = None
    """Impressions in the last days, as counted by whoever builds the item table."""
    ctr: Annotated[float, Meta(ge=0, le=1)] | None = None
    duration_s: Annotated[float, Meta(ge=0)] | None = None
    surface: Word | None = None


class Context(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where and on what the slate will be shown."""

    surface: Word = ""
    device: Word = ""
    locale: Word = ""
    segments: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()
    """Segments of this request, before those of the stored profile."""


EMPTY_CONTEXT = Context()


class StageTimes(msgspec.Struct):
    """Durations of one request's stages, in seconds; each begins where the last one ended."""

    total_s: float = 0.0
    signals_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    signals_at_s: float = 0.0
    """When reading signals began, on the monotonic clock; 0 if it did not."""


ChangeKind = Literal["swap", "rollout", "rollback", "fallback", "backend"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of what serves, done or refused, for telemetry."""

    kind: ChangeKind
    role: str = "primary"
    """That the version was to take."""
    model_name: str
    model_version: str
    done: bool
    started_s: float
    """On the monotonic clock."""
    ended_s: float
    reason: str = ""
    """Why it was made, or why it was refused."""
    rung: BackendKind | None = None
    """The one that went out, came back or was put first."""
    backend: BackendName | None = None
    """The engine that serves now."""
    precision: str = ""


def user_key(user_id: str | None, session_id: str | None) -> str:
    """Under which name signals are kept: a session can never pass for a user."""
    return user_id if user_id is not None else f"session:{session_id}"
