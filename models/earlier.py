"""What users did before the log, as slates to learn long dwells from.

Of each user's signals, newest first, a block is shown and what is older is the history. Nothing
is known of clicks, surfaces and other candidates; and click-through is hidden, as it was counted
from these very signals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from models.dataset import Examples, Shown, Tables, encode_shown
from models.log import Log
from service.domain import Signal
from service.encoding.items import CTR, ITEM1
from service.encoding.rows import PADDING_ROW, UNKNOWN_ROW, RowSpace

SHOWN = 10
"""Signals of a slate."""
MOST_SLATES = 4
"""Of a user."""
LEAST_HISTORY = 6


def earlier_examples(log: Log, space: RowSpace, tables: Tables) -> Examples | None:
    """Slates from before the log, encoded; None where its seeds are no labels."""
    slates = sorted(_slates(log), key=lambda entry: entry[0].at_ms)
    if not slates:
        return None
    examples = encode_shown(log, space, slates, tables)
    rows = examples.cand_ids.copy()
    rows[..., CTR] = np.where(rows[..., ITEM1] == PADDING_ROW, PADDING_ROW, UNKNOWN_ROW)
    return examples._replace(cand_ids=rows, click=np.full_like(examples.click, np.nan))


def _slates(log: Log) -> Iterator[tuple[Shown, Sequence[Signal]]]:
    if log.long_seed_ms is None:
        return
    for user, signals in log.seeds.items():
        for first in range(0, SHOWN * MOST_SLATES, SHOWN):
            shown, history = signals[first : first + SHOWN], signals[first + SHOWN :]
            if len(history) < LEAST_HISTORY:
                break
            yield _slate(user, shown, log.long_seed_ms), history


def _slate(user: str, signals: Sequence[Signal], long_ms: int) -> Shown:
    """Signals as one slate, ranked when the first of them came.

    Of an item told twice, the newest counts.
    """
    oldest_first = reversed(signals)
    items = {signal.item_id: signal.dwell_ms >= long_ms for signal in oldest_first}
    long = list(items.values())
    return Shown(
        number=0,
        user=user,
        at_ms=signals[-1].at_ms,
        surface="",
        items=list(items),
        surfaces=[""] * len(items),
        positions=[0] * len(items),
        click=long,
        long_dwell=long,
    )
