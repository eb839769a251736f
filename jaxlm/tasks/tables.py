"""Rows of TSV, CSV, JSON lines and prepared datasets by the names of their columns."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxlm.data import tfds_source
from jaxlm.data.labelled import LabelledData, Record, row_or_error
from jaxlm.data.readers import (
    LABELS,
    LONGEST_LINE,
    encoding_of,
    json_object,
    read_lines,
    text_of,
    texts_of,
    without_compression,
)
from jaxlm.errors import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
csv.field_size_limit(LONGEST_LINE)  # its own limit is 131,072 characters


class TableRow(NamedTuple):
    """A row of a table. Its methods raise UserError, with the place, for a value that is not text."""

    place: str
    """"FILE, line N" or "tfds:…, record N"."""
    values: dict[str, Any]
    """Values by column."""

    def text(self, column: str) -> str:
        """Return a column as text; "" for a column without a name. Numbers count as text."""
        return text_of(self.values[column], self.place, column) if column else ""

    def texts(self, column: str) -> list[str]:
        """Return the texts of a list, or the one text of a column."""
        return texts_of(self.values[column], self.place, column)

    def label(self, column: str) -> str | None:
        """Return a label as text; None if its column has no name or is blank."""
        label = self.values[column] if column else None
        return None if label is None or not str(label).strip() else text_of(label, self.place, column, LABELS)

    def labels(self, column: str) -> list[str]:
        """Return the labels of a list, or the one label of a column."""
        return texts_of(self.values[column], self.place, column, LABELS)


@dataclasses.dataclass(frozen=True)
class TableData(LabelledData):
    """Rows of TSV, CSV, JSON lines or `tfds:NAME`.

    Columns are named; a number is the place of a column, from 1, in a file without a line of names.
    """

    id_field: str = ""
    """Column of the row's id; empty: the number of the row."""

    def columns(self) -> list[str]:
        """Return the columns to read; one without a name is refused."""
        raise NotImplementedError

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return `values` and `texts` of the row's `Record`."""
        raise NotImplementedError

    def read(self, path: str) -> Iterator[Record | UserError]:
        for number, row in enumerate(read_table(path, [*self.columns(), *filter(None, [self.id_field])])):
            yield row if isinstance(row, UserError) else row_or_error(self._record, number, row)

    def remark(self, path: str) -> str:
        if path.startswith("tfds:") or _kind(path) in JSON_LINES or encoding_of(path) != "cp1252":
            return ""
        return (
            f"{path} is not UTF-8 but most likely CP1252 (Western Europe), and is read as that; `jaxlm show` shows "
            "whether its letters are right"
        )

    def _record(self, number: int, row: TableRow) -> Record:
        name = row.text(self.id_field) if self.id_field else str(number)
        return Record(name, row.place, *self.record(row))


def read_table(path: str, columns: Sequence[str]) -> Iterator[TableRow | UserError]:
    """Read the wanted columns of each row.

    A column is a name of the first line (of .tsv and .csv), of an object (of .jsonl, where "question.stem" is a field
    of a field) or of a field (of `tfds:NAME`, see `tfds_source.read_rows`); or a number, its place from 1 in a file
    without a line of names. TSV is read as GLUE's files are written, without quotes. The columns of .csv are separated
    by the most frequent of comma, semicolon and tab in its first line. Both may be CP1252 instead of UTF-8. A row that
    cannot be read gives an error.

    Raises:
        UserError: The file cannot be read, or a column is missing.
    """
    if "" in columns:
        raise UserError(f"{path} cannot be read by a column without a name; name that of the texts, and the others.")
    if path.startswith("tfds:"):
        yield from (TableRow(*row) for row in tfds_source.read_rows(path, columns))
        return
    kind = _kind(path)
    if kind in JSON_LINES:
        for place, line in read_lines(path):
            if line.strip():
                yield row_or_error(_json_row, place, line, columns)
        return
    if kind not in (".tsv", ".csv", ".txt"):
        raise UserError(
            f"{path} is of no known kind; its name must end in .tsv, .txt, .csv or .jsonl, and then perhaps .gz, .xz "
            "or .zst."
        )
    lines = _split(path, kind)
    if (first := next(lines, None)) is None:
        return
    if isinstance(names := first[1], UserError):
        raise names
    if all(name.isdecimal() for name in columns):  # there is no line of names
        names, lines = [str(place + 1) for place in range(len(names))], itertools.chain([first], lines)
    _require(names, columns, path)
    for place, values in lines:
        if isinstance(values, UserError):
            yield values
        elif len(values) == len(names):
            row = dict(zip(names, values, strict=True))
            yield TableRow(place, {name: row[name] for name in columns})
        else:
            has = f"{len(values)} column" + "s" * (len(values) != 1)
            yield UserError(f"{place} has {has} instead of {len(names)}; mend or remove the line.")


def _kind(path: str) -> str:
    return os.path.splitext(without_compression(path))[1]


def _json_row(place: str, line: str, columns: Sequence[str]) -> TableRow:
    row = json_object(line, place)
    return TableRow(place, {name: _field(row, name, place) for name in columns})


def _split(path: str, kind: str) -> Iterator[tuple[str, list[str] | UserError]]:
    """Yield the place and the values of each row, or an error for a line whose quote does not end."""
    lines = [line for _, line in read_lines(path, encoding_of(path))]
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    if kind == ".csv":
        names = re.sub(r'"[^"]*"', "", lines[0] if lines else "")  # a separator within quotes is part of a name
        form = {"delimiter": max(",;\t", key=names.count), "strict": True}
    first = 0  # number of lines before the row
    while first < len(lines):
        start, reader = first, csv.reader((lines[number] for number in range(first, len(lines))), **form)
        try:
            for values in reader:
                if values:  # an empty line is no row
                    yield f"{path}, line {first + 1}", values
                first = start + reader.line_num
        except csv.Error as error:
            first += 1
            place = f"{path}, line {first}"
            yield place, UserError(
                f"{place}: a quote that begins a column does not end it ({error}); mend or remove the line. Quotes "
                "within such a column are doubled."
            )


def _require(names: Sequence[str], columns: Sequence[str], path: str) -> None:
    if missing := [name for name in columns if name not in names]:
        raise UserError(
            f"{path}, line 1: there is no column {missing[0]!r}; it has {', '.join(map(repr, names)):.300}. Choose "
            "columns with --data.text-field, --data.label-field ('' where there are no labels) and so on, or in the "
            "prompt file."
        )


def _field(row: dict[str, Any], name: str, place: str) -> Any:
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{place}: there is no column {name!r}; it has {', '.join(map(repr, row))}.")
        value = value[part]
    if value is None:
        raise UserError(f"{place}: the column {name!r} is null; mend or remove the line.")
    return value
