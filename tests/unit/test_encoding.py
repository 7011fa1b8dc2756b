import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bundle import InputSpec, OutputSpec
from service.domain import EMPTY_CONTEXT, EMPTY_PROFILE, Context, ItemFeatures, Profile, Signal
from service.encoding import items as i
from service.encoding import rows as r
from service.encoding.history import (
    MASKED,
    VISIT_MS,
    EncodedPeople,
    Person,
    encode_people,
    fold,
)
from service.encoding.items import ItemTable
from service.encoding.rows import RowSpace
from service.encoding.slate import (
    EncodedSlates,
    Slate,
    best,
    blend,
    encode_slates,
    prior_order,
)
from service.errors import ManifestFault
from tests.unit.conftest import NOW_MS

GOLDEN_HASHES = ("767d9c0e03dcc1b8", "6bc376490c0b04b3", "478e2931c796ae49")


@dataclasses.dataclass
class Encoder:
    table: ItemTable
    space: RowSpace

    def slates(self, *slates: Slate) -> EncodedSlates:
        return encode_slates(slates, table=self.table, space=self.space)

    def slate(
        self, ids: list[str], features: list[ItemFeatures | None] | None = None
    ) -> EncodedSlates:
        return self.slates(Slate(ids, features, "home", NOW_MS))

    def people(self, *people: Person) -> EncodedPeople:
        return encode_people(people, table=self.table, space=self.space)

    def history(self, signals: list[Signal], profile: Profile = EMPTY_PROFILE) -> EncodedPeople:
        return self.people(Person(signals, profile, EMPTY_CONTEXT, NOW_MS))


@pytest.fixture
def encoder(table: ItemTable, space: RowSpace) -> Encoder:
    return Encoder(table, space)


def test_hashes_are_those_of_the_golden_vectors(space: RowSpace) -> None:
    # computed once with xxhash 3.6; a change here would silently scramble every bundle
    hashes = space.hash_ids(["item-0", "sku-00421", "naïve ☂"], 3)
    assert hashes.tolist() == [int(word, 16) for word in GOLDEN_HASHES]


def test_blocks_do_not_overlap_and_leave_room_for_words() -> None:
    starts = sorted(r.BLOCK_START.values())
    assert starts[0] == r.UNKNOWN_ROW + 1
    assert all(low < high for low, high in itertools.pairwise(starts))
    assert starts[-1] + r.HOURS_PER_WEEK <= r.HASHED_ROWS_START


def test_a_table_finds_what_it_holds_and_nothing_else(table: ItemTable, space: RowSpace) -> None:
    found = table.find(space.hash_ids(["item-3", "nowhere", "item-19"], 3))
    assert found[1] == len(table)
    assert table.rows[found[0], i.CATEGORY] == space.word_row("category", "shoes")
    assert table.rows[found[1], i.ITEM1] == r.UNKNOWN_ROW


def test_items_unseen_in_training_use_the_unknown_row_but_keep_features(
    table: ItemTable, space: RowSpace
) -> None:
    row = table.rows[table.find(space.hash_ids(["item-19"], 1))[0]]
    assert row[i.ITEM1] == row[i.ITEM2] == r.UNKNOWN_ROW
    assert row[i.CATEGORY] == space.word_row("category", "shoes")


def test_a_table_survives_its_file(table: ItemTable, space: RowSpace) -> None:
    again = ItemTable.from_bytes(table.to_bytes(space), space)
    for name in ("id_hash", "rows", "ctr", "created_ms"):
        np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
    assert again.surfaces == ("home",)


def test_a_table_of_another_row_space_is_refused(
    table: ItemTable, space: RowSpace, spec: InputSpec
) -> None:
    other = RowSpace(msgspec.structs.replace(spec, hash_seed=8))
    with pytest.raises(ManifestFault, match="another row space"):
        ItemTable.from_bytes(table.to_bytes(space), other)


@pytest.mark.parametrize("cut", [0, 10, 300])
def test_a_damaged_table_is_refused(table: ItemTable, space: RowSpace, cut: int) -> None:
    with pytest.raises(ManifestFault, match="cannot be read"):
        ItemTable.from_bytes(table.to_bytes(space)[:cut], space)


def test_a_slate_is_cut_into_padded_tiles(encoder: Encoder) -> None:
    slate = encoder.slate([f"item-{k}" for k in range(6)])
    assert slate.tiles.shape == (2, 4, i.CANDIDATE_WIDTH)
    assert slate.tile_slate.tolist() == [0, 0]
    assert not slate.tiles.reshape(-1, i.CANDIDATE_WIDTH)[6:].any()
    assert (slate.tiles.reshape(-1, i.CANDIDATE_WIDTH)[:6] > 0).all()


def test_unknown_candidates_are_counted_and_unknown_times_are_unknown(encoder: Encoder) -> None:
    slate = encoder.slate(["item-3", "nowhere"])
    assert slate.unknown.tolist() == [1]
    assert slate.tiles[0, 0, i.ITEM_AGE] == r.UNKNOWN_ROW
    assert slate.tiles[0, 1, i.ITEM_AGE] == r.UNKNOWN_ROW
    assert slate.tiles[0, 1, i.CTR] == r.UNKNOWN_ROW


def test_features_in_the_request_override_the_table(encoder: Encoder) -> None:
    plain = encoder.slate(["item-5"]).tiles[0, 0]
    given_features = ItemFeatures(
        category="boots", author="me", created_ms=NOW_MS, popularity=5.0, ctr=0.9, duration_s=3.0
    )
    changed = encoder.slate(["item-5"], [given_features]).tiles[0, 0]
    space = encoder.space
    assert changed[i.CATEGORY] == space.word_row("category", "boots")
    assert changed[i.AUTHOR] == space.word_row("author", "me")
    assert changed[i.ITEM_AGE] == r.BLOCK_START["item_age"]
    assert changed[i.ITEM1] == plain[i.ITEM1]
    different = {i.CATEGORY, i.AUTHOR, i.ITEM_AGE, i.POPULARITY, i.CTR, i.DURATION}
    assert set(np.flatnonzero(changed != plain)) == different


def test_a_candidates_own_surface_chooses_its_click_through_column(encoder: Encoder) -> None:
    here = encoder.slate(["item-5"]).tiles[0, 0]
    there = encoder.slate(["item-5"], [ItemFeatures(surface="elsewhere")]).tiles[0, 0]
    assert here[i.SURFACE] != there[i.SURFACE]
    assert here[i.CTR] != there[i.CTR]


def test_an_empty_history_is_all_masked(encoder: Encoder) -> None:
    history = encoder.history([])
    assert (history.mask == MASKED).all()
    assert not history.ids.any()


def test_signals_pushed_out_of_order_are_encoded_newest_first(encoder: Encoder) -> None:
    signals = [Signal(f"item-{k}", "click", NOW_MS - 1_000 * k) for k in range(5)]
    shuffled = [signals[k] for k in (3, 0, 4, 1, 2)]
    for left, right in zip(
        msgspec.structs.astuple(encoder.history(signals)),
        msgspec.structs.astuple(encoder.history(shuffled)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_only_the_newest_signals_are_kept(encoder: Encoder) -> None:
    signals = [Signal(f"item-{k}", "dwell", NOW_MS - 1_000 * k, 5_000) for k in range(12)]
    history = encoder.history(signals)
    assert (history.mask == 0).all()
    last = encoder.table.rows[encoder.table.find(encoder.space.hash_ids(["item-7"], 1))[0]]
    assert history.ids[0, -1, 0] == last[i.ITEM1]


def test_segments_beyond_the_slots_are_left_out(encoder: Encoder) -> None:
    profile = Profile(tuple(f"s{k}" for k in range(40)))
    context = encoder.history([], profile).context[0]
    assert context.shape == (16,)
    assert context[15] == encoder.space.word_row("segment", "s11")


def test_a_dwell_joins_the_click_of_the_same_visit() -> None:
    click = Signal("a", "click", 1_000)
    dwell = Signal("a", "dwell", 5_000, 4_000)
    assert fold([click], dwell, keep=9) == [Signal("a", "click", 1_000, 4_000)]
    shorter = Signal("a", "dwell", 6_000, 100)
    assert fold([Signal("a", "click", 1_000, 4_000)], shorter, keep=9)[0].dwell_ms == 4_000
    later = Signal("a", "dwell", 1_000 + VISIT_MS, 4_000)
    assert fold([click], later, keep=9) == [later, click]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**7)), max_size=30))
def test_folding_never_keeps_more_than_asked(events: list[tuple[str, int]]) -> None:
    signals: list[Signal] = []
    for item, at_ms in events:
        signals = fold(signals, Signal(item, "click", at_ms), keep=5)
    assert len(signals) <= 5
    assert len(signals) == min(5, len(signals))
    if events:
        assert any(signal.item_id == events[-1][0] for signal in signals)


def test_the_best_come_first_and_ties_keep_the_input_order() -> None:
    logits = np.zeros((6, 2), np.float32)
    logits[2, 0] = 3.0
    order, scores = best(blend(logits, OutputSpec()), top_n=4)
    assert order.tolist() == [2, 0, 1, 3]
    assert scores[0] == 0.952574
    assert scores[1] == 0.5


def test_a_batch_is_encoded_as_each_of_its_requests_alone(encoder: Encoder) -> None:
    people = [
        Person(
            [Signal(f"item-{k}", "click", NOW_MS - 60_000 * ((k * 7) % 11)) for k in range(count)],
            Profile((f"segment-{count}",)),
            Context(surface="home" if count % 2 else "elsewhere"),
            NOW_MS + count,
        )
        for count in (0, 5, 12, 1, 8)
    ]
    slates = [
        Slate([f"item-{k}" for k in range(count)], None, surface, NOW_MS + count)
        for count, surface in ((4, "home"), (1, ""), (9, "elsewhere"), (8, "home"), (3, "home"))
    ]
    together = encoder.people(*people)
    for at, person in enumerate(people):
        for whole, alone in zip(
            msgspec.structs.astuple(together),
            msgspec.structs.astuple(encoder.people(person)),
            strict=True,
        ):
            np.testing.assert_array_equal(whole[at], alone[0])
    packed = encoder.slates(*slates)
    for at, slate in enumerate(slates):
        alone_tiles = encoder.slates(slate)
        np.testing.assert_array_equal(packed.tiles[packed.tile_slate == at], alone_tiles.tiles)
        assert packed.unknown[at] == alone_tiles.unknown[0]


def test_prior_order_puts_items_without_a_prior_last_as_they_came() -> None:
    order, scores = prior_order([None, 0.1, None, 0.7], 4, top_n=4)
    assert order.tolist() == [3, 1, 0, 2]
    assert scores.tolist() == [0.7, 0.1, 0.0, 0.0]
    assert prior_order(None, 3, top_n=2)[0].tolist() == [0, 1]


@pytest.mark.parametrize("surface", ["", "home"])
def test_context_words_reach_their_slots(space: RowSpace, table: ItemTable, surface: str) -> None:
    context = Context(surface=surface, device="phone", locale="de", segments=("vip",))
    person = Person([], Profile(("sporty",)), context, NOW_MS)
    encoded = encode_people([person], table=table, space=space).context[0]
    assert encoded[0] == space.word_row("surface", surface)
    assert encoded[1] == space.word_row("device", "phone")
    assert encoded[3] == r.hour_row(NOW_MS)
    assert encoded[4] == space.word_row("segment", "vip")
    assert encoded[5] == space.word_row("segment", "sporty")
