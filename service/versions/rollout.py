"""The wished state of a model, who gets the canary, and what each act makes of a wish. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import xxhash

from service.domain import BackendKind
from service.errors import RequestFault
from service.versions.gates import Gates


def in_canary(user: str, version: str, percent: float) -> bool:
    """Whether this user gets this canary.

    A user who does keeps it while the percentage rises; another version draws other users.
    """
    return xxhash.xxh3_64_intdigest(f"{version}\0{user}".encode()) < percent / 100 * 2.0**64


Role = Literal["primary", "canary", "shadow", "standby", "previous"]


class CanaryWish(msgspec.Struct, frozen=True, kw_only=True):
    """A canary on its ramp."""

    version: str
    steps: tuple[float, ...]
    """Percent of users, ascending."""
    step: int = 0
    step_ms: int = 300_000
    """The least time that a step is watched."""
    since_ms: int = 0
    """When the present step began."""
    promote: bool = False
    """Whether the canary becomes the primary after its last step."""
    gates: Gates = Gates()

    @property
    def percent(self) -> float:
        """Percent of users at the present step."""
        return self.steps[self.step]


class ShadowWish(msgspec.Struct, frozen=True, kw_only=True):
    """A version that scores copies of some requests, unseen by callers."""

    version: str
    percent: float = 10.0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What every replica of a model should run."""

    generation: int = 0
    """Counts changes; a change states which one it follows."""
    primary: str | None = None
    previous: str | None = None
    """Where a rollback goes, and what a replica serves that cannot verify the primary."""
    canary: CanaryWish | None = None
    shadow: ShadowWish | None = None
    standby: str | None = None
    backend: BackendKind | None = None
    """The engine that is tried first; each replica's best one if None."""
    act: str = ""
    """The change that made this wish, its reason, its author and its time."""
    reason: str = ""
    by: str = ""
    at_ms: int = 0

    def roles(self) -> dict[Role, str | None]:
        """The version wished in each role; what was before is nobody's wish."""
        return {
            "primary": self.primary,
            "canary": self.canary.version if self.canary else None,
            "shadow": self.shadow.version if self.shadow else None,
            "standby": self.standby,
        }


def promoted(wish: Wish, version: str) -> Wish:
    """`version` answers everyone; a canary or shadow of the same version ends."""
    if version == wish.primary:
        raise RequestFault(f"{version} is the primary already", field="version")
    return msgspec.structs.replace(
        wish,
        primary=version,
        previous=wish.primary,
        canary=None,
        shadow=_shadow_beside(wish, version),
        standby=None if wish.standby == version else wish.standby,
    )


def rolled_back(wish: Wish) -> Wish:
    """The canary goes; where there is none, the previous version answers again.

    A shadow of the version that answers again has nothing left to show, and goes.
    """
    if wish.canary is not None:
        return msgspec.structs.replace(wish, canary=None)
    if wish.previous is None:
        raise RequestFault("there is no canary to end and no previous version to go back to")
    return msgspec.structs.replace(
        wish,
        primary=wish.previous,
        previous=wish.primary,
        shadow=_shadow_beside(wish, wish.previous),
    )


def with_canary(wish: Wish, canary: CanaryWish | None, *, now_ms: int) -> Wish:
    """A canary at the first step of its ramp, or none."""
    if canary is None:
        return msgspec.structs.replace(wish, canary=None)
    _check_other(wish, canary.version)
    check_steps(canary.steps)
    started = msgspec.structs.replace(canary, step=0, since_ms=now_ms)
    return msgspec.structs.replace(wish, canary=started)


def with_shadow(wish: Wish, shadow: ShadowWish | None) -> Wish:
    """A shadow, or none."""
    if shadow is not None:
        _check_other(wish, shadow.version)
        if not 0 < shadow.percent <= 100:
            raise RequestFault("must be above 0 and at most 100", field="percent")
    return msgspec.structs.replace(wish, shadow=shadow)


def with_standby(wish: Wish, version: str | None) -> Wish:
    """A version that is loaded and waits, or none."""
    if version is not None:
        _check_other(wish, version)
    return msgspec.structs.replace(wish, standby=version)


def with_backend(wish: Wish, backend: BackendKind | None) -> Wish:
    """An engine that is tried first, or the best one again."""
    return msgspec.structs.replace(wish, backend=backend)


def advanced(wish: Wish, *, now_ms: int) -> Wish:
    """The canary's next step, or its promotion after the last."""
    canary = wish.canary
    assert canary is not None
    if canary.step + 1 < len(canary.steps):
        following = msgspec.structs.replace(canary, step=canary.step + 1, since_ms=now_ms)
        return msgspec.structs.replace(wish, canary=following)
    assert canary.promote
    return promoted(wish, canary.version)


def ends_at_last_step(canary: CanaryWish) -> bool:
    """Whether nothing follows the present step: the canary is watched on, and stays."""
    return canary.step + 1 == len(canary.steps) and not canary.promote


def signed(wish: Wish, *, after: Wish, act: str, reason: str, by: str) -> Wish:
    """The wish as the one that follows `after`, with its author."""
    return msgspec.structs.replace(
        wish,
        generation=after.generation + 1,
        act=act,
        reason=reason,
        by=by,
        at_ms=time.time_ns() // 1_000_000,
    )


def check_steps(steps: Sequence[float]) -> None:
    """Raise RequestFault unless the percentages ascend within 0 to 100."""
    if not steps or list(steps) != sorted(set(steps)) or steps[0] <= 0 or steps[-1] > 100:
        raise RequestFault("percentages must ascend, above 0 and at most 100", field="steps")


def _shadow_beside(wish: Wish, primary: str) -> ShadowWish | None:
    """The shadow, unless it is of the version that is to answer."""
    return None if wish.shadow and wish.shadow.version == primary else wish.shadow


def _check_other(wish: Wish, version: str) -> None:
    if version == wish.primary:
        raise RequestFault(f"{version} is the primary", field="version")
