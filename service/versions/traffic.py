"""What the canary and the primary do side by side, and a few requests to warm others with."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from service.encoding.history import Person
from service.encoding.slate import Slate
from service.versions.gates import Counts
from service.versions.loaded import TAG_CHARS, tag_of
from service.versions.rollout import CanaryWish

_SAMPLES = 64
_SAMPLE_EVERY = 16
_CLICKED_KEPT = 100_000


class Sample(msgspec.Struct, frozen=True):
    """One request as the encoding takes it."""

    person: Person
    slate: Slate


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as the gates see it."""

    version: str
    seconds: float
    failed: bool
    degraded: bool
    scores: Sequence[float]


class Traffic:
    """Counts while there is a canary; otherwise only keeps samples."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self._until_sample = 0
        self._step: tuple[str, int, str | None] | None = None
        self._counts: dict[str, Counts] = {}
        self._pair = "", ""
        self._by_tag: dict[str, str] = {}
        self._clicked: OrderedDict[str, None] = OrderedDict()

    @property
    def samples(self) -> list[Sample]:
        """Recent requests; kept in memory alone."""
        return list(self._samples)

    def keep(self, sample: Sample) -> None:
        """Keep one request of many."""
        self._until_sample -= 1
        if self._until_sample < 0:
            self._until_sample = _SAMPLE_EVERY - 1 if len(self._samples) == _SAMPLES else 0
            self._samples.append(sample)

    def follow(self, canary: CanaryWish | None, primary: str | None) -> None:
        """Begin to count anew where a canary's step begins."""
        if canary is None:
            self._step = None
            self._counts = {}
            self._clicked.clear()
            return
        step = canary.version, canary.since_ms, primary
        if step != self._step:
            self._step = step
            self._pair = canary.version, primary or ""
            self._by_tag = {tag_of(version): version for version in self._pair}
            self._counts = {version: Counts() for version in self._pair}

    @property
    def counting(self) -> bool:
        """Whether there is a canary to count for."""
        return self._step is not None

    def count(self, answered: Answered) -> None:
        """Count one answer of the canary or the primary."""
        counts = self._counts.get(answered.version)
        if counts is not None:
            counts.add(
                seconds=answered.seconds,
                failed=answered.failed,
                degraded=answered.degraded,
                scores=answered.scores,
            )

    def clicked(self, ranking_id: str) -> None:
        """Count a click once a ranking; the id's end tells the version, on any replica."""
        version = self._by_tag.get(ranking_id[-TAG_CHARS:], "")
        counts = self._counts.get(version)
        if counts is None or ranking_id in self._clicked:
            return
        self._clicked[ranking_id] = None
        if len(self._clicked) > _CLICKED_KEPT:
            self._clicked.popitem(last=False)
        counts.clicked += 1

    def counts(self) -> tuple[Counts | None, Counts | None]:
        """Of the canary and of the primary, in the present step."""
        canary, primary = self._pair
        return self._counts.get(canary), self._counts.get(primary)
