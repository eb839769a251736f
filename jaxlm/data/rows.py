"""Rows of files and datasets by the names of their columns, for pretraining text and for tasks."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from jaxlm.data import arrow_source, tfds_source
from jaxlm.data.readers import KINDS, LONGEST_LINE, Columns, json_object, read_lines, suffix_of
from jaxlm.errors import UserError
from jaxlm.paths import any_path, file_state, reading

Row = tuple[str, dict[str, Any]]
"""Place for messages, and values by column."""
_UNNAMED = "; without a line of names, a column's name is its place, from 1"
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
csv.field_size_limit(LONGEST_LINE)  # its own limit is 131,072 characters


def kind_of(source: str) -> str | None:
    """Return "tfds", "hf", or the kind of a file by its suffix; None for a file of no known kind."""
    dataset, suffix = source.partition(":")[0], suffix_of(source)
    return dataset if dataset in ("tfds", "hf") else "json" if suffix == ".json" else KINDS.get(suffix)


def read_rows(source: str, columns: Columns, start: int = 0, end: int | None = None) -> Iterator[Row | UserError]:
    """Return the rows of a file or of a dataset, and an error in place of each row that cannot be read.

    Args:
        source: `tfds:NAME` (see `tfds_source.read_rows`), `hf:NAME` (see `arrow_source.read_rows`), JSON lines or an
            array of objects (where "question.stem" is a field of a field), .parquet, .csv, or .tsv and .txt (see
            `_table_rows`).
        columns: The columns to read.
        start: Where to begin, if it is a part of the source: a byte of JSON lines, a group of rows of .parquet, a row
            of a dataset.
        end: Where to end; None for all of the source.

    Raises:
        UserError: The source cannot be read, or a column is missing.
    """
    kind = kind_of(source)
    if "" in columns.names:
        raise UserError(f"{source}: the name of a column is empty; set --data.text-field and the other column flags.")
    refuse_saved_dataset(source)
    if kind is None:
        raise UserError(
            f"{source} is of no known kind; its name must end in .tsv, .txt, .csv or .jsonl, and then perhaps .gz, .xz "
            "or .zst, or in .parquet."
        )
    return _READERS[kind](source, columns, *(() if end is None else (start, end)))


def _json_lines(path: str, start: int, end: int | None) -> Iterator[tuple[str, str]]:
    """Return (place, JSON) of each line that is not blank, or of each item of a file that is one array."""
    lines = ((place, line) for place, line in read_lines(path, start, end) if line.strip())
    first = list(itertools.islice(lines, 1))
    lines = itertools.chain(first, lines)
    if not (first and first[0][1].lstrip().startswith("[")):
        return lines
    with reading(path):
        rows = enumerate(json.loads("".join(line for _, line in lines)), 1)
    return ((f"{path}, row {number}", json.dumps(row)) for number, row in rows)


def _json_rows(path: str, columns: Columns, start: int = 0, end: int | None = None) -> Iterator[Row | UserError]:
    for place, line in _json_lines(path, start, end):
        try:
            row = json_object(line, place)
            found = {name: _field(row, name, place, columns) for name in columns.names}
            yield place, found | {name: row[name] for name in columns.optional if name in row}
        except UserError as error:
            yield error


def _field(row: dict[str, Any], name: str, place: str, columns: Columns) -> Any:
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, dict) or part not in value:
            columns._replace(names=[name]).chosen(list(row), place)
        value = value[part]
    return value


def _table_rows(path: str, columns: Columns) -> Iterator[Row | UserError]:
    """Yield the rows of a table.

    A column is a name of the first line, or a number, its place from 1 in a file without a line of names. The columns
    of .csv are separated by the most frequent of comma, semicolon, tab and bar in its first line; those of other files
    by tabs, without quotes, as in GLUE's files, unless the whole file has them (see `_is_quoted`). An empty line is no
    row.
    """
    lines = (line for _, line in read_lines(path))
    first = next(lines, "")
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    if suffix_of(path) == ".csv":
        unquoted = re.sub(r'"[^"]*"', "", first)  # a separator within quotes is part of a name
        dialect = {"delimiter": max(",;\t|", key=unquoted.count), "strict": True}
    elif quoting_remark(path):
        dialect = {"delimiter": "\t", "strict": True}
    table = csv.reader(itertools.chain([first], lines), **dialect)
    names: list[str] = []
    while True:
        line = table.line_num + 1
        place = f"{path}, line {line}"
        try:
            values = next(table, None)
        except csv.Error as error:
            bad = UserError(
                f"{place} cannot be split into columns ({error}); double the quotes within a column that begins with a "
                "quote, end lines with a newline, or remove the line."
            )
            if not names or table.line_num > line:  # a quote that does not end has swallowed several lines
                raise bad from error
            yield bad
            continue
        if values is None:
            return
        if not values:
            continue
        if not names:
            is_numbered = bool(columns.names) and all(name.isdecimal() for name in columns.names)
            names = [str(number + 1) for number in range(len(values))] if is_numbered else values
            chosen = columns.chosen(names, place, _UNNAMED)
            if not is_numbered:
                continue
        if len(values) != len(names):
            has = f"{len(values)} column" + "s" * (len(values) != 1)
            yield UserError(f"{place} has {has} instead of {len(names)}; fix or remove the line.")
        else:
            row = dict(zip(names, values, strict=True))
            yield place, {name: row[name] for name in chosen}


def quoting_remark(path: str) -> str:
    """Return a remark about a .tsv that is quoted like .csv; "" for other sources."""
    if kind_of(path) != "table" or suffix_of(path) == ".csv":
        return ""
    with reading(path):
        is_quoted = _is_quoted(path, *file_state(path))
    return f"Quotes around columns of {path} are removed, since all that begin with one end with one" * is_quoted


@functools.lru_cache(maxsize=256)
def _is_quoted(path: str, *state: int | str) -> bool:
    """Return whether every column that begins with a quote ends with one and doubles those within, as pandas writes."""
    lines = (line for _, line in read_lines(path) if '"' in line)
    columns = (column for line in lines for column in line.rstrip("\r\n").split("\t") if column.startswith('"'))
    first = next(columns, "")  # the first column that is no such one ends the search
    return all(_QUOTED.fullmatch(column) for column in itertools.chain([first], columns))


def refuse_saved_dataset(source: str) -> None:
    """Raise UserError for a folder of `Dataset.save_to_disk`, which `hf:` reads."""
    files = [any_path(source) / name for name in ("state.json", "dataset_dict.json") if kind_of(source) != "hf"]
    if any(file.is_file() for file in files):
        raise UserError(f"{source} is a folder of the library `datasets` (save_to_disk); write hf:{source}.")


_READERS = {
    "tfds": tfds_source.read_rows, "hf": arrow_source.read_rows, "parquet": arrow_source.parquet_rows,
    "json": _json_rows, "table": _table_rows, "text": _table_rows,
}
