"""Files of a user's own log as views of DuckDB, and SQL that reads their columns with care.

It knows formats, types and units; what the columns mean is told by the mapping.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import duckdb

from models.log import LogFault
from models.mapping import Unit

READERS = {
    ".parquet": "read_parquet([{files}])",
    ".csv": "read_csv([{files}], all_varchar = true, header = true)",
    ".tsv": "read_csv([{files}], all_varchar = true, header = true, delim = '\t')",
    ".jsonl": "read_json([{files}], format = 'newline_delimited')",
}
ALIASES = {".ndjson": ".jsonl", ".json": ".jsonl", ".pq": ".parquet"}
PER_MS = {"s": 1_000.0, "ms": 1.0, "us": 0.001}
EARLIEST_MS, LATEST_MS = 631_152_000_000, 4_102_444_800_000
"""1990 and 2100: an instant outside them was read in the wrong unit."""
LONGEST_DWELL_MS = 600_000
"""What a longer dwell is taken for."""
MEMORY = "1GB"


class Work:
    """A database that spills to a folder what does not fit into `MEMORY`, and what it told."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.connection = duckdb.connect(
            str(folder / "work.duckdb"),
            config={"memory_limit": MEMORY, "temp_directory": str(folder)},
        )
        self.connection.execute("SET TimeZone = 'UTC'")  # of times that tell no zone
        self._out = out
        self.warnings: list[str] = []

    def execute(self, query: str) -> None:
        self.connection.execute(query)

    def one(self, query: str) -> dict[str, int]:
        """The only row of a query, by column."""
        cursor = self.connection.execute(query)
        names = [column[0] for column in cursor.description or ()]
        row = cursor.fetchone()
        assert row is not None
        return dict(zip(names, row, strict=True))

    def write(self, name: str, query: str) -> int:
        """Write a query's rows to a Parquet file; how many they were."""
        path = literal(str(self._out / f"{name}.parquet"))
        self.connection.execute(f"COPY ({query}) TO {path} (FORMAT parquet)")
        return self.one(f"SELECT count(*) AS rows FROM read_parquet({path})")["rows"]

    def warn(self, count: int, what: str) -> None:
        """Note a count that is not zero."""
        if count:
            self.warnings.append(f"{what}: {count:,}")


class Table:
    """Files of one kind under one name; columns are asked for by what they are for."""

    def __init__(self, work: Work, name: str, paths: Sequence[Path]) -> None:
        """Raises LogFault where a file is missing, of an unknown kind, or cannot be read."""
        self.name = name
        files = [file for path in paths for file in _files(path)]
        kinds = {_kind(file) for file in files}
        if len(kinds) != 1:
            raise LogFault(f"{name}: files of several kinds: {', '.join(sorted(kinds))}")
        self.files = ", ".join(file.name for file in files)
        listed = ", ".join(literal(_no_pattern(str(file))) for file in files)
        source = READERS[kinds.pop()].format(files=listed)
        try:
            work.execute(f"CREATE VIEW {name}_file AS SELECT * FROM {source}")
            described = work.connection.execute(f"DESCRIBE {name}_file").fetchall()
        except duckdb.Error as error:
            raise LogFault(f"{self.files}: cannot be read: {first_line(error)}") from error
        self.types: dict[str, str] = {row[0]: row[1] for row in described}

    def type_of(self, column: str) -> str:
        """Raises LogFault for a column that is not there."""
        if column not in self.types:
            raise LogFault(f"{self.files}: no column {column}; there are {', '.join(self.types)}")
        return self.types[column]

    def raw(self, column: str | None) -> str:
        """The column as it is written, as text."""
        if column is None:
            return "CAST(NULL AS VARCHAR)"
        if self.type_of(column) == "JSON":  # values of several types
            return f"({quoted(column)} ->> '$')"
        return f"CAST({quoted(column)} AS VARCHAR)"

    def text(self, column: str | None) -> str:
        """Text; NULL where it is empty, or no number where numbers are."""
        told = f"nullif(trim({self.raw(column)}), '')"
        if column is not None and self.type_of(column) in {"FLOAT", "DOUBLE"}:
            return f"nullif({told}, 'nan')"
        return told

    def words(self, column: str) -> str:
        """A list of texts."""
        kind = self.type_of(column)
        if not kind.endswith("[]"):
            raise LogFault(f"{self.files}: {column}: a list of ids is needed, not {kind}")
        return f"CAST({quoted(column)} AS VARCHAR[])"

    def is_list(self, column: str) -> bool:
        return self.type_of(column).endswith("[]")

    def instant_ms(self, column: str, unit: Unit | None, *, value: str = "") -> str:
        """Milliseconds since 1970; NULL where the column holds none.

        `value` stands for one element where the column is a list.
        """
        kind = self.type_of(column).removesuffix("[]")
        value = value or quoted(column)
        if kind == "TIMESTAMP WITH TIME ZONE":
            return f"epoch_ms({value})"
        if kind.startswith(("TIMESTAMP", "DATE")):
            return f"epoch_ms(CAST({value} AS TIMESTAMP))"
        if unit is not None:
            return _number(value, PER_MS[unit])
        if kind != "VARCHAR":
            raise LogFault(f"{self.files}: {column}: times of type {kind}: a unit must be told")
        return f"epoch_ms(TRY_CAST({value} AS TIMESTAMPTZ))"

    def span_ms(self, column: str | None, unit: Unit, *, value: str = "") -> str:
        """Milliseconds; NULL where the column holds no number of at least 0."""
        if column is None:
            return "CAST(NULL AS BIGINT)"
        self.type_of(column)
        number = _number(value or quoted(column), PER_MS[unit])
        return f"(CASE WHEN {number} >= 0 THEN {number} END)"

    def flag(self, column: str) -> str:
        """True or false; NULL where the column holds neither."""
        told = f"lower({self.text(column)})"
        return (
            f"(CASE WHEN {told} IN ('1', 'true', 't', 'yes', '1.0') THEN true "
            f"WHEN {told} IN ('0', 'false', 'f', 'no', '0.0') THEN false END)"
        )

    def whole(self, column: str | None) -> str:
        """A whole number; 0 where the column holds none."""
        if column is None:
            return "0"
        self.type_of(column)
        return f"coalesce({_number(quoted(column), 1.0)}, 0)"


def quoted(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _number(value: str, factor: float) -> str:
    number = f"TRY_CAST({value} AS DOUBLE)"
    return f"TRY_CAST(CASE WHEN isfinite({number}) THEN round({number} * {factor}) END AS BIGINT)"


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _no_pattern(path: str) -> str:
    """A path that stands for itself where patterns are taken."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if _suffix(file) in READERS)
        if not found:
            raise LogFault(f"{path}: no file ends in {', '.join([*READERS, *ALIASES])}")
        return found
    if not path.is_file():
        raise LogFault(f"{path}: no such file")
    return [path]


def _suffix(file: Path) -> str:
    suffixes = [suffix for suffix in file.suffixes if suffix not in {".gz", ".zst"}]
    suffix = suffixes[-1].lower() if suffixes else ""
    return ALIASES.get(suffix, suffix)


def _kind(file: Path) -> str:
    suffix = _suffix(file)
    if suffix not in READERS:
        raise LogFault(f"{file}: not one of {', '.join([*READERS, *ALIASES])}")
    return suffix
