"""The log that a network is trained on, sent as events to the store: the tensors are the same."""

import numpy as np
from numpy.testing import assert_array_equal
from redis.asyncio import Redis

from models.dataset import Tables, encode_log, shown_slates
from models.presets import PRESETS
from models.synthetic import Size, generate
from service.domain import Context, Event
from service.encoding.batch import encode_batch
from service.encoding.history import Person
from service.encoding.rows import RowSpace
from service.encoding.slate import Slate
from service.signals.keys import keys_of
from service.signals.store import SignalStore


async def test_events_in_redis_become_the_tensors_of_training(
    store: SignalStore, valkey: Redis
) -> None:
    log = generate(8, Size(items=60, shoppers=6, days=8, intent=6.0))
    space = RowSpace(PRESETS["tiny"].input_spec())
    slates = shown_slates(log.impressions)
    trained = encode_log(log, space, slates)
    tables = Tables(log, space)
    for user, profile in log.profiles.items():
        await valkey.set(
            keys_of(user).profile, f'{{"segments": {list(profile.segments)}}}'.replace("'", '"')
        )
    columns = ("user", "item", "action", "at_ms", "dwell_ms", "surface")
    events = [
        Event(user, item, action, at_ms, dwell_ms, surface=surface)
        for user, item, action, at_ms, dwell_ms, surface in log.events.select(columns).iter_rows()
    ]
    sent, longest = 0, 0
    for at, slate in enumerate(slates):
        due = [event for event in events[sent:] if event.at_ms < slate.at_ms]
        if due:
            await store.write(due)
            sent += len(due)
        state = await store.fetch(slate.user, token=None, budget_s=5.0)
        longest = max(longest, len(state.signals))
        context = Context(surface=slate.surface)
        served, _ = encode_batch(
            [Person(state.signals, state.profile, context, slate.at_ms)],
            [Slate(slate.items, slate.features(), slate.surface, slate.at_ms)],
            table=tables.of(tables.day_of(slate.at_ms)),
            space=space,
        )
        assert_array_equal(served.hist_ids[0], trained.hist_ids[at])
        assert_array_equal(served.hist_age[0], trained.hist_age[at])
        assert_array_equal(served.hist_mask[0], trained.hist_mask[at])
        assert_array_equal(served.ctx_ids[0], trained.ctx_ids[at])
        assert_array_equal(served.cand_ids, trained.cand_ids[trained.tile_user == at])
    assert longest == 50, "the log must be long enough to be cut"
    assert not np.isnan(trained.click[:, 0]).any()
