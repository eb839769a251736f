"""Rows of TSV, CSV, JSON lines and prepared datasets by the names of their columns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxlm.data.labelled import LabelledData, Record, row_or_error
from jaxlm.data.readers import LABELS, Columns, text_of, texts_of
from jaxlm.data.rows import read_rows
from jaxlm.errors import UserError


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

    def label_set(self, column: str, separator: str) -> str | list[str] | None:
        """Return the labels of a list, or those of a text between separators; without a separator as `label`.

        An empty text has no labels; null, or a column without a name, is None.
        """
        value = self.values[column] if column else None
        if isinstance(value, list):
            return self.labels(column)
        label = self.label(column)
        if value is None or not separator:
            return label
        return [part.strip() for part in (label or "").split(separator) if part.strip()]

    def number(self, column: str) -> float:
        """Return a label as a finite number, 1 for true and 0 for false; raise UserError for any other text."""
        label = self.label(column) or ""
        number = finite({"true": "1", "false": "0"}.get(label.lower(), label))
        if number is None:
            raise UserError(f"{self.place}: the field {column!r} is {label!r:.60}, no number; fix or remove the row.")
        return number

    def labels(self, column: str) -> list[str]:
        """Return the labels of a list, or the one label of a column."""
        return texts_of(self.values[column], self.place, column, LABELS)


def finite(text: str) -> float | None:
    """Return the finite number that a text spells, or None."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return None


@dataclasses.dataclass(frozen=True)
class TableData(LabelledData):
    """Rows of TSV, CSV, JSON lines or `tfds:NAME`.

    Columns are named; a number is the place of a column, from 1, in a file without a line of names.
    """

    label_flag = "--data.label-field"
    column_flags: ClassVar[str] = "--data.text-field, --data.label-field ('': no labels) and so on"
    """The flags that choose columns, for messages."""

    id_field: str = ""
    """Column of the row's id; empty: the number of the row."""

    def columns(self) -> list[str]:
        """Return the columns to read; one without a name is refused."""
        raise NotImplementedError

    def optional_columns(self) -> Sequence[str]:
        """Return the columns that are read where rows have them."""
        return ()

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return `values` and `texts` of the row's `Record`."""
        raise NotImplementedError

    def read(self, path: str) -> Iterator[Record | UserError]:
        names = [*self.columns(), *filter(None, [self.id_field])]
        columns = Columns(names, f"Choose columns with {self.column_flags}", self.optional_columns())
        for number, row in enumerate(read_table(path, columns)):
            yield row if isinstance(row, UserError) else row_or_error(self._record, number, row)

    def _record(self, number: int, row: TableRow) -> Record:
        name = row.text(self.id_field) if self.id_field else str(number)
        return Record(name, row.place, *self.record(row))


def whole_table(path: str, columns: Columns) -> list[TableRow]:
    """Return all rows; raise UserError for the first one that cannot be read, and if there are none."""
    rows = []
    for row in read_table(path, columns):
        if isinstance(row, UserError):
            raise row
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no rows.")
    return rows


def read_table(path: str, columns: Columns) -> Iterator[TableRow | UserError]:
    """Read the wanted columns of each row as `jaxlm.data.rows.read_rows` does."""
    for row in read_rows(path, columns):
        yield row if isinstance(row, UserError) else TableRow(*row)
