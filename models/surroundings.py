"""What surrounds a log's impressions: items, what users did before, and who they are."""

from __future__ import annotations

from models.mapping import Histories, Items, Users
from models.tabular import (
    EARLIEST_MS,
    LATEST_MS,
    LONGEST_DWELL_MS,
    Table,
    Work,
    literal,
    quoted,
)

KEEP_SIGNALS = 50
"""The newest events of a user before the log that are kept."""


def write_items(work: Work, table: Table | None, columns: Items | None) -> int:
    """Every item that is told or was shown; how many."""
    if table is not None and columns is not None:
        created = (
            table.instant_ms(columns.created, columns.created_unit)
            if columns.created
            else "CAST(NULL AS BIGINT)"
        )
        duration = table.span_ms(columns.duration, columns.duration_unit)
        work.execute(
            f"CREATE TABLE told AS SELECT {table.text(columns.id)} AS id, "
            f"min({table.text(columns.title)}) AS title, "
            f"min({table.text(columns.category)}) AS category, "
            f"min({table.text(columns.author)}) AS author, "
            f"min({created}) AS created_ms, min({duration} / 1e3) AS duration_s, "
            f"bool_or({table.text(columns.created)} IS NOT NULL) AS dated, "
            "count(*) AS rows FROM items_file GROUP BY 1"
        )
        found = work.one(
            "SELECT coalesce(sum(rows) FILTER (id IS NULL), 0) AS unnamed, "
            "count(*) FILTER (dated AND created_ms IS NULL) AS undated, "
            f"count(*) FILTER (created_ms NOT BETWEEN {EARLIEST_MS} AND {LATEST_MS}) AS outside, "
            "coalesce(sum(rows - 1) FILTER (id IS NOT NULL), 0) AS again FROM told"
        )
        work.warn(int(found["unnamed"]), f"{columns.id}: items without one, left out")
        work.warn(int(found["again"]), f"{columns.id}: items told more than once, kept once")
        work.warn(found["undated"], f"{columns.created}: no times, taken as unknown")
        work.warn(found["outside"], f"{columns.created}: outside 1990 to 2100, is the unit right")
        work.execute("DELETE FROM told WHERE id IS NULL")
        strangers = work.one(
            "SELECT count(DISTINCT item) AS items FROM parted WHERE item NOT IN "
            "(SELECT id FROM told)"
        )
        work.warn(strangers["items"], "items that were shown and are not among the items")
    else:
        work.execute(
            "CREATE TABLE told (id VARCHAR, title VARCHAR, category VARCHAR, author VARCHAR, "
            "created_ms BIGINT, duration_s DOUBLE)"
        )
    return work.write(
        "items",
        "SELECT id, coalesce(title, id) AS title, coalesce(category, '') AS category, "
        "coalesce(author, '') AS author, created_ms, CAST(duration_s AS DOUBLE) AS duration_s "
        "FROM (SELECT id, title, category, author, created_ms, duration_s FROM told "
        "UNION ALL BY NAME SELECT DISTINCT item AS id FROM parted "
        "WHERE item NOT IN (SELECT id FROM told)) ORDER BY id",
    )


def write_seeds(work: Work, table: Table, columns: Histories) -> int:
    """The newest events of each user from before the log; how many."""

    def each(column: str) -> str:
        return f"unnest({quoted(column)})" if table.is_list(column) else quoted(column)

    dwell = each(columns.dwell) if columns.dwell else "NULL"
    at_ms = table.instant_ms(columns.time, columns.time_unit, value="time_told")
    dwell_ms = table.span_ms(columns.dwell, columns.dwell_unit, value="dwell_told")
    work.execute(
        f"CREATE TABLE earlier AS SELECT user, CAST(item_told AS VARCHAR) AS item, "
        f"{at_ms} AS at_ms, least(coalesce({dwell_ms}, 0), {LONGEST_DWELL_MS}) AS dwell_ms "
        f"FROM (SELECT {table.text(columns.user)} AS user, {each(columns.item)} AS item_told, "
        f"{each(columns.time)} AS time_told, {dwell} AS dwell_told FROM histories_file)"
    )
    usable = (
        "user IS NOT NULL AND item IS NOT NULL AND at_ms IS NOT NULL "
        f"AND at_ms BETWEEN {EARLIEST_MS} AND {LATEST_MS}"
    )
    early = "at_ms < (SELECT min(first_ms) FROM slates)"
    found = work.one(
        f"SELECT count(*) FILTER (NOT ({usable})) AS unusable, "
        f"count(*) FILTER ({usable} AND NOT {early}) AS late FROM earlier"
    )
    work.warn(found["unusable"], "histories: rows without user, item or a sound time, left out")
    work.warn(
        found["late"],
        "histories: events of the log's own days, left out, as they tell what is to be ranked",
    )
    return work.write(
        "seeds",
        "SELECT user, item, at_ms, CASE WHEN dwell_ms > 0 THEN 'dwell' ELSE 'click' END AS "
        f"action, dwell_ms FROM earlier WHERE {usable} AND {early} QUALIFY row_number() OVER "
        f"(PARTITION BY user ORDER BY at_ms DESC, item) <= {KEEP_SIGNALS} "
        "ORDER BY user, at_ms DESC, item",
    )


def write_profiles(work: Work, table: Table, columns: Users) -> int:
    """The segments of each user; how many users."""
    words = ", ".join(
        f"{literal(segment + '=')} || {table.text(segment)}" for segment in columns.segments
    )
    return work.write(
        "profiles",
        f"SELECT {table.text(columns.id)} AS user, "
        f"any_value(list_filter([{words}], lambda word: word IS NOT NULL)) AS words "
        "FROM users_file GROUP BY 1 HAVING user IS NOT NULL ORDER BY 1",
    )
