"""A user's own log, of any size, becomes a folder that the other commands read as a log.

What cannot be used is left out and counted, or ends the run where it would mislead. Rows pass
through DuckDB, which holds a bounded part of them in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping as Named
from pathlib import Path

import duckdb
import msgspec
from tqdm import tqdm

from models.log import LogFault
from models.mapping import Mapping
from models.prepared import SUMMARY, Summary
from models.surroundings import write_items, write_profiles, write_seeds
from models.tabular import EARLIEST_MS, LATEST_MS, LONGEST_DWELL_MS, Table, Work, first_line

_PARTS = ("impressions", "items", "histories", "users")
LEAST_USABLE = 0.5
"""A log of which less can be used was misread."""


def prepare(mapping: Mapping, files: Named[str, list[Path]], out: Path) -> Summary:
    """Write the log in `files` (of impressions, items, histories, users) into the folder `out`.

    Raises LogFault that names the file and column where the log cannot be used.
    """
    if out.exists() and any(out.iterdir()):
        raise LogFault(f"{out}: not empty")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix="work-") as work:
        database = Work(Path(work), out)
        try:
            summary = _Preparation(database, mapping, files).run()
        except duckdb.Error as error:
            names = ", ".join(str(path) for path in files["impressions"])
            raise LogFault(f"{names}: cannot be read: {first_line(error)}") from error
        finally:
            database.connection.close()
    (out / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    return summary


class _Preparation:
    """The steps, each a statement or two."""

    def __init__(
        self,
        work: Work,
        mapping: Mapping,
        files: Named[str, list[Path]],
    ) -> None:
        self._work = work
        self._mapping = mapping
        told = {name for name in _PARTS if getattr(mapping, name) is not None}
        if wrong := sorted(told ^ set(files)):
            raise LogFault(f"{wrong[0]}: both files and a section of the mapping are needed")
        self._tables = {name: Table(work, name, files[name]) for name in _PARTS if name in told}
        self._counts: dict[str, int] = {}

    def run(self) -> Summary:
        steps = (
            self._parse, self._clean, self._cut, self._split, self._write_impressions,
            self._write_events, self._write_surroundings,
        )  # fmt: skip
        for step in tqdm(steps, desc="prepare", leave=False, unit="step"):
            step()
        return Summary(
            name=self._mapping.name,
            validate_from_ms=self._validate_from_ms,
            test_from_ms=self._test_from_ms,
            least_items=self._mapping.least_items,
            counts=self._counts,
            warnings=self._work.warnings,
        )

    def _parse(self) -> None:
        """A view of the rows with every column read, and what it was read from."""
        table, columns = self._tables["impressions"], self._mapping.impressions
        at_ms = table.instant_ms(columns.time, columns.time_unit)
        dwell = table.span_ms(columns.dwell, columns.dwell_unit)
        common = (
            f"{table.text(columns.user)} AS user, "
            f"{at_ms} AS at_ms, "
            f"{table.text(columns.time)} AS time_told, "
            f"coalesce({table.text(columns.surface)}, '') AS surface, "
            f"{dwell} AS dwell_ms, {table.raw(columns.dwell)} AS dwell_told"
        )
        if columns.shown is not None and columns.clicked is not None:
            shown, clicked = table.words(columns.shown), table.words(columns.clicked)
            self._work.execute(
                "CREATE VIEW parsed AS SELECT * REPLACE (CASE WHEN click THEN dwell_ms END AS "
                "dwell_ms), CAST(NULL AS VARCHAR) AS click_told, 0 AS position FROM (SELECT *, "
                "list_contains(clicked, item) AS click FROM ("
                f"SELECT {common}, {clicked} AS clicked, unnest({shown}) AS item, "
                f"{at_ms} || ' ' || md5(CAST({shown} AS VARCHAR)) AS part FROM impressions_file))"
            )
            return
        assert columns.click is not None
        self._work.execute(
            f"CREATE VIEW parsed AS SELECT {common}, {table.text(columns.item)} AS item, "
            f"{table.flag(columns.click)} AS click, {table.text(columns.click)} AS click_told, "
            f"{table.whole(columns.position)} AS position, "
            f"{table.text(columns.slate) if columns.slate else 'NULL'} AS part "
            "FROM impressions_file"
        )

    def _clean(self) -> None:
        """Count what is wrong; keep what can be used, each impression once."""
        columns = self._mapping.impressions
        name = self._tables["impressions"].files
        outside = f"at_ms NOT BETWEEN {EARLIEST_MS} AND {LATEST_MS}"
        no_click = "click IS NULL AND lower(coalesce(click_told, 'nan')) = 'nan'"
        no_slate = "part IS NULL" if columns.slate else "false"
        found = self._work.one(
            "SELECT count(*) AS total, "
            "count(*) FILTER (user IS NULL) AS no_user, "
            "count(*) FILTER (item IS NULL) AS no_item, "
            "count(*) FILTER (time_told IS NULL) AS no_time, "
            f"count(*) FILTER ({no_slate}) AS no_slate, "
            f"count(*) FILTER ({no_click}) AS no_click, "
            "count(*) FILTER (time_told IS NOT NULL AND at_ms IS NULL) AS bad_time, "
            "any_value(time_told) FILTER (time_told IS NOT NULL AND at_ms IS NULL) AS a_time, "
            f"count(*) FILTER ({outside}) AS outside, "
            f"any_value(time_told) FILTER ({outside}) AS an_outsider, "
            f"count(*) FILTER (click IS NULL AND NOT ({no_click})) AS bad_click, "
            f"any_value(click_told) FILTER (click IS NULL AND NOT ({no_click})) AS a_click, "
            "count(*) FILTER (dwell_told IS NOT NULL AND dwell_ms IS NULL AND click) AS bad_dwell "
            "FROM parsed"
        )
        total = found["total"]
        if not total:
            raise LogFault(f"{name}: no rows")
        if found["bad_time"]:
            raise LogFault(
                f"{name}: {columns.time}: {found['bad_time']:,} of {total:,} are no times, "
                f"as {found['a_time']!r}"
            )
        if found["outside"]:
            raise LogFault(
                f"{name}: {columns.time}: {found['outside']:,} of {total:,} lie outside 1990 to "
                f"2100, as {found['an_outsider']}: a wrong time_unit, or two units in one column"
            )
        if found["bad_click"]:
            raise LogFault(
                f"{name}: {columns.click}: {found['bad_click']:,} of {total:,} are neither 0 nor "
                f"1, as {found['a_click']!r}"
            )
        for key, column in (
            ("no_user", columns.user),
            ("no_item", columns.item or columns.shown),
            ("no_time", columns.time),
            ("no_click", columns.click or columns.clicked),
            ("no_slate", columns.slate),
        ):
            self._work.warn(found[key], f"{column}: rows without one, left out")
        self._work.warn(found["bad_dwell"], f"{columns.dwell}: not a number from 0 up, taken as 0")
        usable = (
            "user IS NOT NULL AND item IS NOT NULL AND at_ms IS NOT NULL AND click IS NOT NULL "
            f"AND NOT ({no_slate})"
        )
        self._work.execute(
            "CREATE TABLE seen AS SELECT user, item, at_ms, part, min(surface) AS surface, "
            "min(position) AS position, bool_or(click) AS click, "
            f"least(max(coalesce(dwell_ms, 0)), {LONGEST_DWELL_MS}) AS dwell_ms, "
            f"count(*) AS told FROM parsed WHERE {usable} GROUP BY user, item, at_ms, part"
        )
        kept = self._work.one("SELECT count(*) AS kept, coalesce(sum(told), 0) AS told FROM seen")
        self._work.warn(
            int(kept["told"]) - kept["kept"], "impressions told more than once, kept once"
        )
        if kept["told"] < LEAST_USABLE * total:
            told = "; ".join(self._work.warnings)
            raise LogFault(f"{name}: {kept['told']:,} of {total:,} rows can be used: {told}")

    def _cut(self) -> None:
        """Number the slates by the time of their first impression."""
        if self._mapping.impressions.slate is None and self._mapping.impressions.shown is None:
            gap_ms = round(self._mapping.slate_gap_s * 1e3)
            self._work.execute(
                "CREATE TABLE parted AS SELECT * EXCLUDE (part, fresh), "
                "CAST(sum(fresh) OVER (PARTITION BY user ORDER BY at_ms) AS VARCHAR) AS part "
                "FROM (SELECT *, CAST(at_ms - coalesce(lag(at_ms) OVER "
                f"(PARTITION BY user ORDER BY at_ms), at_ms) > {gap_ms} AS INTEGER) AS fresh "
                "FROM seen)"
            )
        else:
            self._work.execute("CREATE VIEW parted AS SELECT * FROM seen")
        self._work.execute(
            "CREATE TABLE slates AS SELECT user, part, min(at_ms) AS first_ms, "
            "row_number() OVER (ORDER BY min(at_ms), user, part) AS slate "
            "FROM parted GROUP BY user, part"
        )

    def _split(self) -> None:
        """The instants from which slates validate and test."""
        mapping = self._mapping
        if mapping.test_from is not None:
            self._test_from_ms = round(mapping.test_from.timestamp() * 1e3)
        else:
            self._test_from_ms = self._quantile(1 - mapping.test_share, "true")
        before = f"first_ms < {self._test_from_ms}"
        sides = self._work.one(
            f"SELECT count(*) FILTER ({before}) AS train, "
            f"count(*) FILTER (NOT {before}) AS test FROM slates"
        )
        if not sides["train"] or not sides["test"]:
            raise LogFault(
                f"{mapping.name}: {sides['train']:,} slates before the test, {sides['test']:,} in "
                "it: both are needed; see test_share and test_from"
            )
        if mapping.validate_from is not None:
            self._validate_from_ms = round(mapping.validate_from.timestamp() * 1e3)
        elif mapping.validate_share:
            self._validate_from_ms = self._quantile(1 - mapping.validate_share, before)
        else:
            self._validate_from_ms = self._test_from_ms
        across = " OR ".join(
            f"(first_ms < {at_ms} AND at_ms >= {at_ms})"
            for at_ms in (self._validate_from_ms, self._test_from_ms)
        )
        self._work.execute(
            f"CREATE VIEW shown AS SELECT *, {across} AS across "
            "FROM parted JOIN slates USING (user, part)"
        )
        late = self._work.one("SELECT count(*) FILTER (across) AS late FROM shown")["late"]
        self._work.warn(
            late, "impressions from after a split, of slates from before it, left out of slates"
        )

    def _quantile(self, share: float, where: str) -> int:
        found = self._work.one(
            f"SELECT quantile_disc(first_ms, {share}) AS at_ms FROM slates WHERE {where}"
        )
        return int(found["at_ms"])

    def _write_impressions(self) -> None:
        columns = self._mapping.impressions
        long_ms = round(self._mapping.long_dwell_s * 1e3)
        long_dwell = f"dwell_ms >= {long_ms}"
        if columns.dwell is None:
            long_dwell = "click"
            self._work.warnings.append("no dwell column: a click stands for a long dwell")
        self._work.write(
            "impressions",
            "SELECT slate, user, item, at_ms, surface, CAST(position AS BIGINT) AS position, "
            f"click, {long_dwell} AS long_dwell FROM shown WHERE NOT across "
            "ORDER BY at_ms, slate, position, item",
        )
        classes = self._work.one(
            f"SELECT count(*) AS impressions, count(DISTINCT user) AS users, "
            "(SELECT count(*) FROM slates) AS slates, count(*) FILTER (click) AS clicks, "
            f"count(*) FILTER ({long_dwell}) AS long_dwells FROM shown WHERE NOT across"
        )
        self._counts |= {name: int(value) for name, value in classes.items()}
        for name, column in (("clicks", columns.click or columns.clicked),
                             ("long_dwells", columns.dwell)):  # fmt: skip
            if classes[name] in (0, classes["impressions"]):
                raise LogFault(
                    f"{self._tables['impressions'].files}: {column}: {classes[name]:,} {name} "
                    f"in {classes['impressions']:,} impressions: one class only"
                )

    def _write_events(self) -> None:
        """A click when it is seen, a dwell when it ends."""
        self._work.write(
            "events",
            "SELECT user, item, at_ms, 'click' AS action, CAST(0 AS BIGINT) AS dwell_ms, surface "
            "FROM parted WHERE click UNION ALL "
            "SELECT user, item, at_ms + dwell_ms, 'dwell', dwell_ms, surface "
            "FROM parted WHERE dwell_ms > 0 ORDER BY at_ms, user, item, action",
        )

    def _write_surroundings(self) -> None:
        mapping, tables = self._mapping, self._tables
        items, histories, users = (tables.get(name) for name in ("items", "histories", "users"))
        self._counts["items"] = write_items(self._work, items, mapping.items)
        if histories is not None and mapping.histories is not None:
            self._counts["earlier events"] = write_seeds(self._work, histories, mapping.histories)
        if users is not None and mapping.users is not None:
            self._counts["profiles"] = write_profiles(self._work, users, mapping.users)
