"""A seeded shop's click log: items, people's tastes and every click are invented by this code.

Shoppers have lasting tastes (category, brand, price) and an intent that drifts within a visit;
popularity, position and surface move clicks too, and dwell times grow with liking.
"""

from __future__ import annotations

import datetime as dt
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from models.catalogue import AGE_BANDS, BRAND_ENDS, BRAND_STARTS, CATALOGUE, SEGMENTS
from models.log import EARLIER_SCHEMA, EVENT_SCHEMA, IMPRESSION_SCHEMA, ITEM_SCHEMA, Log, LogFault
from service.domain import Profile

Values = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

START = dt.datetime(2026, 10, 5, tzinfo=dt.UTC)
DAY_MS = 86_400_000
LONG_DWELL_MS = 20_000
SURFACES = ("home", "search", "product")
SLATE_SIZES = {"home": 20, "search": 40, "product": 12}
INTENT_SHARE = {"home": 0.15, "search": 0.7, "product": 0.5}
SURFACE_BIAS = {"home": -0.5, "search": 0.3, "product": 0.0}
DEVICES = ("phone", "tablet", "desktop")
STYLES = 4
FAVOURITE_BRANDS = 4


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a shop to invent."""

    items: int = 3_000
    shoppers: int = 2_000
    days: int = 28
    visits_per_shopper: float = 5.0
    intent: float = 3.0
    """What a candidate of the category in mind gains, in logits."""


class Shop(msgspec.Struct, frozen=True):
    """Items with the hidden traits that drive clicks; n items."""

    frame: pl.DataFrame
    category: Places  # [n]
    brand: Places  # [n]
    price_level: Values  # [n], 0 on average in its category
    style: Values  # [n, STYLES]
    quality: Values  # [n]
    members: list[Places]
    """Items of each category."""


class Shopper(msgspec.Struct, frozen=True):
    """One shopper's lasting traits."""

    number: int
    profile: Profile
    category_taste: Values
    brands: Places
    """The favourite ones."""
    price_level: float


def generate(seed: int, size: Size | None = None) -> Log:
    """The log of a shop; the same seed and size give the same log. Raises LogFault."""
    size = size or Size()
    if size.items < len(CATALOGUE) or size.shoppers < 1 or size.days < 8:
        raise LogFault(f"a shop needs {len(CATALOGUE)} items, 1 shopper and 8 days, not {size}")
    rng = np.random.default_rng(seed)
    shop = _invent_shop(rng, size)
    brands = len(BRAND_STARTS) * len(BRAND_ENDS)
    record = _Record([], [])
    profiles = {}
    for at in tqdm(range(size.shoppers), desc="shoppers", leave=False, mininterval=1):
        shopper = _invent_shopper(rng, at, brands)
        profiles[_shopper_name(at)] = shopper.profile
        for _ in range(1 + rng.poisson(size.visits_per_shopper - 1)):
            _visit(rng, shop, shopper, size, record)
    start_ms = int(START.timestamp() * 1000)
    return Log(
        name="shop",
        items=shop.frame,
        impressions=_impressions(record.slates, shop.frame["id"]),
        events=_events(record.events, shop.frame["id"]),
        earlier=pl.DataFrame(schema=EARLIER_SCHEMA),
        seeds={},
        profiles=profiles,
        validate_from_ms=start_ms + size.days * 6 // 8 * DAY_MS,
        test_from_ms=start_ms + size.days * 7 // 8 * DAY_MS,
    )


class _Record(NamedTuple):
    """What happened, with shoppers and items as numbers."""

    slates: list[tuple[int, str, int, Places, Flags, Places]]
    """Shopper, surface, time in ms, items, clicks, dwell times in ms."""
    events: list[tuple[int, int, int, str, int, str]]
    """Shopper, item, time in ms, action, dwell time in ms, surface."""


def _shopper_name(at: int) -> str:
    return f"shopper-{at:05d}"


def _impressions(
    slates: list[tuple[int, str, int, Places, Flags, Places]], ids: pl.Series
) -> pl.DataFrame:
    slates = sorted(slates, key=itemgetter(2))
    sizes = [len(items) for _, _, _, items, _, _ in slates]
    dwell_ms = np.concatenate([dwells for *_, dwells in slates])
    columns = {
        "slate": np.repeat(np.arange(len(slates)), sizes),
        "user": np.repeat([_shopper_name(shopper) for shopper, *_ in slates], sizes),
        "item": ids.gather(np.concatenate([items for _, _, _, items, _, _ in slates])),
        "at_ms": np.repeat([at_ms for _, _, at_ms, *_ in slates], sizes),
        "surface": np.repeat([surface for _, surface, *_ in slates], sizes),
        "position": np.concatenate([np.arange(size) for size in sizes]),
        "click": np.concatenate([clicks for *_, clicks, _ in slates]),
        "long_dwell": dwell_ms >= LONG_DWELL_MS,
    }
    return pl.DataFrame(columns, schema_overrides=IMPRESSION_SCHEMA)


def _events(events: list[tuple[int, int, int, str, int, str]], ids: pl.Series) -> pl.DataFrame:
    rows = [
        (_shopper_name(shopper), ids[item], at_ms, action, dwell_ms, surface)
        for shopper, item, at_ms, action, dwell_ms, surface in sorted(events, key=itemgetter(2))
    ]
    return pl.DataFrame(rows, schema=EVENT_SCHEMA, orient="row")


def _invent_shop(rng: np.random.Generator, size: Size) -> Shop:
    names = list(CATALOGUE)
    brands = [start + end for start in BRAND_STARTS for end in BRAND_ENDS]
    count = size.items
    category = rng.permutation(np.arange(count) % len(names))
    brand = rng.integers(len(brands), size=count)
    level = rng.normal(size=count)
    start_ms = int(START.timestamp() * 1000)
    ages_days = np.exp(rng.uniform(0, np.log(900), size=count))
    titles = []
    for at in range(count):
        kinds, variants, cheapest, dearest = CATALOGUE[names[category[at]]]
        share = 1 / (1 + np.exp(-1.5 * level[at]))
        price = round(cheapest * (dearest / cheapest) ** share)
        titles.append(
            f"{brands[brand[at]]} {rng.choice(kinds).lower()}, {rng.choice(variants)}, {price} EUR"
        )
    frame = pl.DataFrame(
        {
            "id": [f"sku-{at:05d}" for at in range(count)],
            "title": titles,
            "category": [names[at] for at in category],
            "author": [brands[at] for at in brand],
            "created_ms": start_ms - (ages_days * DAY_MS).astype(np.int64),
            "duration_s": [None] * count,
        },
        schema=ITEM_SCHEMA,
    )
    return Shop(
        frame,
        category,
        brand,
        level,
        rng.normal(size=(count, STYLES)),
        rng.normal(scale=0.7, size=count),
        [np.flatnonzero(category == at) for at in range(len(names))],
    )


def _invent_shopper(rng: np.random.Generator, number: int, brands: int) -> Shopper:
    names = list(CATALOGUE)
    taste = rng.normal(size=len(names))
    chosen = [str(word) for word in rng.choice(list(SEGMENTS), size=rng.integers(3), replace=False)]
    for segment in chosen:
        taste[[names.index(word) for word in SEGMENTS[segment]]] += 1.2
    band = AGE_BANDS[rng.integers(len(AGE_BANDS))]
    profile = Profile((f"age={band}", *(f"likes={word}" for word in chosen)))
    favourites = rng.choice(brands, size=FAVOURITE_BRANDS, replace=False)
    return Shopper(number, profile, taste, favourites, float(rng.normal()))


def _visit(
    rng: np.random.Generator, shop: Shop, shopper: Shopper, size: Size, record: _Record
) -> None:
    """One visit of a few slates; the intent drifts from slate to slate."""
    hour = int(rng.choice(24, p=_HOURS))
    now_ms = int(START.timestamp() * 1000) + int(rng.integers(size.days)) * DAY_MS
    now_ms += hour * 3_600_000 + int(rng.integers(3_600_000))
    intent, style = _categories(rng, shopper, 1)[0], rng.normal(size=STYLES)
    for step in range(1 + rng.poisson(3)):
        if step and rng.random() < 0.15:
            intent, style = _categories(rng, shopper, 1)[0], rng.normal(size=STYLES)
        surface = SURFACES[int(rng.choice(3, p=(0.5, 0.3, 0.2)))]
        slate = _candidates(rng, shop, shopper, surface, intent)
        liking = _liking(shop, shopper, slate, style)
        liking += size.intent * (shop.category[slate] == intent)
        chance = 1 / (1 + np.exp(-(liking + SURFACE_BIAS[surface] - 4.2)))
        clicked = rng.random(len(slate)) < chance / (1 + 0.05 * np.arange(len(slate)))
        dwell_ms = np.exp(np.log(7_000) + 0.45 * liking + rng.normal(scale=0.7, size=len(slate)))
        dwell_ms = np.where(clicked, dwell_ms.clip(500, 600_000), 0).astype(np.int64)
        record.slates.append((shopper.number, surface, now_ms, slate, clicked, dwell_ms))
        for item, dwell in zip(slate[clicked].tolist(), dwell_ms[clicked].tolist(), strict=True):
            now_ms += int(rng.integers(1_500, 6_000))
            record.events.append((shopper.number, item, now_ms, "click", 0, surface))
            now_ms += dwell
            record.events.append((shopper.number, item, now_ms, "dwell", dwell, surface))
        now_ms += int(rng.integers(3_000, 40_000))
        style = 0.9 * style + 0.4 * rng.normal(size=STYLES)


def _liking(shop: Shop, shopper: Shopper, slate: Places, style: Values) -> Values:
    """How much the shopper likes each candidate, but for the intent, in logits: [candidates]."""
    category = shop.category[slate]
    away = shop.price_level[slate] - shopper.price_level
    return np.asarray(
        0.7 * shopper.category_taste[category]
        + 1.2 * np.isin(shop.brand[slate], shopper.brands)
        - 0.15 * away * away
        + 0.3 * shop.style[slate] @ style
        + shop.quality[slate]
    )


def _candidates(
    rng: np.random.Generator, shop: Shop, shopper: Shopper, surface: str, intent: int
) -> Places:
    """Items of one slate as an older ranker would show them: roughly by popularity."""
    size = SLATE_SIZES[surface]
    on_intent = rng.random(size) < INTENT_SHARE[surface]
    wanted = np.where(on_intent, intent, _categories(rng, shopper, size))
    luck = rng.random(size)
    drawn = [
        shop.members[at][int(u * len(shop.members[at]))] for at, u in zip(wanted, luck, strict=True)
    ]
    slate = np.unique(drawn)
    shown_first = shop.quality[slate] + rng.normal(size=len(slate))
    return np.asarray(slate[np.argsort(-shown_first)])


def _categories(rng: np.random.Generator, shopper: Shopper, count: int) -> Places:
    """Categories drawn by the shopper's taste (Gumbel-max)."""
    noise = rng.gumbel(size=(count, len(shopper.category_taste)))
    return np.asarray(np.argmax(shopper.category_taste + noise, axis=1))


_HOURS = np.array([1, 1, 1, 1, 1, 2, 4, 6, 7, 7, 7, 8, 9, 8, 7, 7, 8, 9, 11, 13, 14, 12, 7, 3.0])
_HOURS /= _HOURS.sum()
