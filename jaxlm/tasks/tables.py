"""Rows of TSV, CSV, JSON lines and prepared datasets by the names of their columns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxlm.data import tfds_source
from jaxlm.data.labelled import LabelledData, Record, row_or_error
from jaxlm.data.readers import (
    LABELS,
    encoding_of,
    json_object,
    read_columns,
    read_lines,
    text_of,
    texts_of,
    without_compression,
)
from jaxlm.errors import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")


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

    A column of .tsv, .txt and .csv is one of `readers.read_columns`; otherwise a name of an object (of .jsonl, where
    "question.stem" is a field of a field) or of a field (of `tfds:NAME`, see `tfds_source.read_rows`). Tables may be
    CP1252 instead of UTF-8. A row that cannot be read gives an error.

    Raises:
        UserError: The file cannot be read, or a column is missing.
    """
    if "" in columns:
        raise UserError(f"{path}: the name of a column is empty; set --data.text-field and the other column flags.")
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
    for row in read_columns(path, columns, encoding_of(path)):
        yield row if isinstance(row, UserError) else TableRow(*row)


def _kind(path: str) -> str:
    return os.path.splitext(without_compression(path))[1]


def _json_row(place: str, line: str, columns: Sequence[str]) -> TableRow:
    row = json_object(line, place)
    return TableRow(place, {name: _field(row, name, place) for name in columns})


def _field(row: dict[str, Any], name: str, place: str) -> Any:
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{place}: there is no column {name!r}; it has {', '.join(map(repr, row))}.")
        value = value[part]
    if value is None:
        raise UserError(f"{place}: the column {name!r} is null; fix or remove the line.")
    return value
