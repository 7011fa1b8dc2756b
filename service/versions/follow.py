"""Following the wish: each replica looks at it, converges, reports, and judges the canary.

Runs beside the requests; where the shared state is away, the replica stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from service.errors import Conflict, FleetFault, RankerError
from service.versions import rollout
from service.versions.fleet import Fleet, FleetState, Replica
from service.versions.gates import Counts, Verdict, judge
from service.versions.rollout import Wish
from service.versions.shadow import Shadow
from service.versions.swaps import Swaps
from service.versions.traffic import Traffic

_log = logging.getLogger("ranker.fleet")
_TRIES = 5
_LOST_LOOKS = 8
"""So often a wish must be missing before it is written again: others report meanwhile."""
_RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
Scope = Literal["fleet", "replica"]


_generation = attrgetter("generation")


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided of a canary, by itself, and from which numbers."""

    version: str
    percent: float
    fate: Literal["advance", "promote", "rollback"]
    reason: str
    numbers: dict[str, float]


class Follower:
    """Keeps one replica at what is wished of the fleet."""

    def __init__(
        self,
        *,
        swaps: Swaps,
        fleet: Fleet,
        traffic: Traffic,
        shadow: Shadow,
        replica: str,
        first: Callable[[], Sequence[str]],
        poll_s: float = 0.25,
        decided: Callable[[Decision], None] = lambda _: None,
    ) -> None:
        """`first` names what to serve where nothing is wished yet, the best first."""
        self.wish = Wish()
        self.seen: FleetState = FleetState(None, ())
        self.fault = ""
        """Why the shared state could not be read at the last look."""
        self.replica = replica
        self.settled = asyncio.Event()
        """Set once the first wish has been applied, well or not."""
        self._swaps = swaps
        self._fleet = fleet
        self._traffic = traffic
        self.shadow = shadow
        self._first = first
        self._poll_s = poll_s
        self._decided = decided
        self._applying: asyncio.Task[None] | None = None
        self._attempts = 0
        self._retry_at_s = 0.0
        self._lost_looks = 0
        self._shared = Wish()
        """The last wish of the whole fleet; `wish` may be this replica's alone."""

    async def run(self) -> None:
        """Look, converge and judge, for ever."""
        while True:
            await self.turn()
            await asyncio.sleep(self._poll_s)

    async def turn(self) -> None:
        """One look."""
        try:
            self.seen = await self._fleet.look(self._report())
        except FleetFault as error:
            if not self.fault:
                _log.warning("fleet state away", extra={"reason": str(error)})
            self.fault = str(error)
        else:
            self.fault = ""
        await self._converge()
        try:
            await self._restore()
            await self._judge()
        except FleetFault as error:
            self.fault = str(error)

    async def _converge(self) -> None:
        wished = self.seen.wish
        if wished is not None and wished.generation > self.wish.generation:
            self._adopt(wished)
        elif not self.wish.primary:
            primary, previous, *_ = [*await self._first_versions(), None, None]
            self._adopt(msgspec.structs.replace(self.wish, primary=primary, previous=previous))
        elif self._applying is not None and self._applying.done():
            self._retry()

    async def _restore(self) -> None:
        """Write the wish again where the shared state has lost it: a store may forget.

        The replica that knows the newest wish does it, one generation on, so that replicas
        that started meanwhile follow.
        """
        known, stored = self._shared.generation, self.seen.wish or Wish()
        self._lost_looks = self._lost_looks + 1 if stored.generation < known else 0
        if self._lost_looks < _LOST_LOOKS or self.fault or self.seen.newest > known:
            return
        self._lost_looks = 0
        wished = rollout.signed(
            self._shared, after=self._shared, act="restore", reason="it was lost", by=self.replica
        )
        if await self._fleet.replace(wished):
            _log.warning("wish restored", extra={"generation": wished.generation})
            self._adopt(wished)

    async def _first_versions(self) -> Sequence[str]:
        try:
            return await asyncio.to_thread(self._first)
        except RankerError as error:
            self._swaps.versions.fault = f"{type(error).__name__}: {error}"
            return []

    def _adopt(self, wish: Wish, *, shared: bool = True) -> None:
        """Make a wish one's own; an older one on its way is given up."""
        self.wish = wish
        if shared:
            self._shared = wish
        self._attempts = 0
        self._traffic.follow(wish.canary, wish.primary)
        self.shadow.follow(wish.shadow)
        if not wish.primary:
            self.settled.set()
            return
        self._start()

    def _start(self) -> None:
        before = self._applying
        if before is not None:
            before.cancel()
        self._applying = asyncio.get_running_loop().create_task(self._apply(self.wish, before))

    async def _apply(self, wish: Wish, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._swaps.apply(wish)
        pause_s = _RETRY_S[min(self._attempts, len(_RETRY_S) - 1)]
        self._retry_at_s = time.monotonic() + pause_s
        self.settled.set()

    def _retry(self) -> None:
        """Try again what was refused: its bundle may be whole by now."""
        if self._swaps.faults and self._swaps.may_retry and time.monotonic() > self._retry_at_s:
            self._attempts += 1
            self._start()

    def _report(self) -> Replica:
        canary, primary = self._traffic.counts()
        return Replica(
            replica=self.replica,
            generation=self.wish.generation,
            at_ms=time.time_ns() // 1_000_000,
            roles=self._swaps.versions.names(),
            loading=self._swaps.loading,
            faults={role: fault.reason for role, fault in self._swaps.faults.items()},
            canary=canary,
            primary=primary,
        )

    async def _judge(self) -> None:
        """Decide on the canary by what all replicas counted; the first one to write decides."""
        canary = self.wish.canary
        if canary is None:
            return
        verdict = self.verdict()
        at_end = rollout.ends_at_last_step(canary)
        if verdict.fate == "wait" or (verdict.fate == "pass" and at_end):
            return
        last = canary.step + 1 == len(canary.steps)
        fate: Literal["advance", "promote", "rollback"] = "promote" if last else "advance"
        if verdict.fate == "fail":
            fate = "rollback"
            wished = rollout.rolled_back(self.wish)
        else:
            wished = rollout.advanced(self.wish, now_ms=time.time_ns() // 1_000_000)
        reason = f"{verdict.reason} (canary {canary.version} at {canary.percent:g}%)"
        wished = rollout.signed(wished, after=self.wish, act=fate, reason=reason, by=self.replica)
        if not await self._fleet.replace(wished):
            return  # another replica decided first
        decision = Decision(
            version=canary.version,
            percent=canary.percent,
            fate=fate,
            reason=verdict.reason,
            numbers=verdict.numbers,
        )
        _log.warning("canary decided", extra=msgspec.to_builtins(decision))
        self._decided(decision)
        self._adopt(wished)

    def verdict(self) -> Verdict:
        """What the gates say now, over all replicas that know of the present step."""
        canary = self.wish.canary
        assert canary is not None
        counted, stable = Counts(), Counts()
        own_canary, own_primary = self._traffic.counts()
        pairs = [(own_canary, own_primary)]
        pairs += [
            (other.canary, other.primary)
            for other in self.seen.replicas
            if other.replica != self.replica and other.generation == self.wish.generation
        ]
        for theirs, their_primary in pairs:
            if theirs is not None and their_primary is not None:
                counted.merge(theirs)
                stable.merge(their_primary)
        watched_s = time.time() - canary.since_ms / 1e3
        return judge(
            counted, stable, canary.gates, watched_s=watched_s, step_s=canary.step_ms / 1e3
        )

    async def act(
        self, change: Callable[[Wish], Wish], *, act: str, by: str, scope: Scope = "fleet"
    ) -> Wish:
        """Change the wish, for the fleet or for this replica until the fleet's next change.

        Raises RequestFault if the change makes no sense, FleetFault if it cannot be
        written, Conflict if others change the wish faster.
        """
        if scope == "replica":
            local = rollout.signed(change(self.wish), after=self.wish, act=act, reason="", by=by)
            local = msgspec.structs.replace(local, generation=self.wish.generation)
            self._adopt(local, shared=False)
            return local
        for _ in range(_TRIES):
            seen = await self._fleet.look(None)
            now = max(self._shared, seen.wish or self._shared, key=_generation)
            if seen.newest > now.generation:  # lost, and written again by who knows it
                await asyncio.sleep(self._poll_s)
                continue
            wished = rollout.signed(change(now), after=now, act=act, reason="asked for", by=by)
            if await self._fleet.replace(wished):
                self._adopt(wished)
                return wished
        raise Conflict("the wish is being changed by others; look and try again")

    async def close(self) -> None:
        """Stop what is being applied, then retire everything."""
        if self._applying is not None:
            self._applying.cancel()
            await asyncio.wait([self._applying])
        try:
            await self._fleet.leave(self.replica)
        except FleetFault as error:
            _log.info("left without a word", extra={"reason": str(error)})
        await self.shadow.close()
        await self._swaps.close()
