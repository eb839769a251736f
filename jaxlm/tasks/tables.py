"""Rows of TSV, CSV, JSON lines and prepared datasets by the names of their columns."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxlm.data import tfds_source
from jaxlm.data.labelled import LabelledData, Record, row_or_error, varying
from jaxlm.data.readers import LABELS, json_object, read_columns, read_lines, text_of, texts_of, without_compression
from jaxlm.errors import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
_ADVICE = "Choose columns with --data.text-field, --data.label-field ('': no labels) and so on, or in the prompt file"


class TableRow(NamedTuple):
    """A row of a table. Its methods raise UserError, with the place, for a value that is not text."""

    place: str
    """"FILE, line N" or "tfds:…, record N"."""
    values: dict[str, Any]
    """Values by column."""

    def text(self, column: str) -> str:
        """Return a column as text; "" for a column without a name, and for null. Numbers count as text."""
        return "" if not column or self.values[column] is None else text_of(self.values[column], self.place, column)

    def texts(self, column: str) -> list[str]:
        """Return the texts of a list, or the one text of a column, none for null."""
        return [] if self.values[column] is None else texts_of(self.values[column], self.place, column)

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

    def label_columns(self, path: str) -> tuple[str, list[str]]:
        used = self.columns()
        has_names = not path.startswith("tfds:") and not all(name.isdecimal() for name in used)
        rows = read_table(path, None) if has_names else ()
        return "--data.label-field", varying((row.values for row in rows if not isinstance(row, UserError)), used)

    def _record(self, number: int, row: TableRow) -> Record:
        name = row.text(self.id_field) if self.id_field else str(number)
        return Record(name, row.place, *self.record(row))


def read_table(path: str, columns: Sequence[str] | None) -> Iterator[TableRow | UserError]:
    """Read the wanted columns of each row; None for all of a file with a line of names.

    A column of .tsv, .txt and .csv is one of `readers.read_columns`; otherwise a name of an object (of .jsonl, where
    "question.stem" is a field of a field) or of a field (of `tfds:NAME`, see `tfds_source.read_rows`). A row that
    cannot be read gives an error.

    Raises:
        UserError: The file cannot be read, or a column is missing.
    """
    if "" in (columns or ()):
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
    for row in read_columns(path, columns, _ADVICE):
        yield row if isinstance(row, UserError) else TableRow(*row)


def _kind(path: str) -> str:
    return os.path.splitext(without_compression(path))[1]


def _json_row(place: str, line: str, columns: Sequence[str] | None) -> TableRow:
    row = json_object(line, place)
    return TableRow(place, {name: _field(row, name, place) for name in (row if columns is None else columns)})


def _field(row: dict[str, Any], name: str, place: str) -> Any:
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{place}: there is no column {name!r}; it has {', '.join(map(repr, row))}.")
        value = value[part]
    return value
