"""A small row space and item table, shared by the unit tests."""

import numpy as np
import pytest

from service.bundle import BatchSpec, InputSpec
from service.encoding.items import UNKNOWN_TIME_MS, ItemColumns, ItemTable
from service.encoding.rows import RowSpace

DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000


@pytest.fixture
def spec() -> InputSpec:
    return InputSpec(
        hash_seed=7,
        item1_rows=1_000,
        item2_rows=500,
        feature_rows=2_048,
        history_len=8,
        tile_width=4,
    )


@pytest.fixture
def space(spec: InputSpec) -> RowSpace:
    return RowSpace(spec)


@pytest.fixture
def limits() -> BatchSpec:
    return BatchSpec(max_users=4, tile_buckets=(1, 2, 4, 8))


@pytest.fixture
def table(space: RowSpace) -> ItemTable:
    count = 20
    created_ms = np.full(count, NOW_MS - 10 * DAY_MS, np.int64)
    created_ms[3] = UNKNOWN_TIME_MS
    return ItemTable.build(
        ItemColumns(
            ids=[f"item-{i}" for i in range(count)],
            category=["shoes" if i % 2 else "hats" for i in range(count)],
            author=[f"maker-{i % 3}" for i in range(count)],
            created_ms=created_ms,
            popularity=np.arange(count, dtype=np.float64) * 10,
            duration_s=np.full(count, np.nan),
            ctr=np.linspace(0.01, 0.5, count),
            surface_ctr={"home": np.linspace(0.5, 0.01, count)},
            trained=np.arange(count) != 19,
        ),
        space,
    )
