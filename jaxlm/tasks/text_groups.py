"""Rows of texts that belong together, for embedding models: pairs, with hard negatives or with a score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxlm.errors import UserError
from jaxlm.tasks.tables import TableData, TableRow


@dataclasses.dataclass(frozen=True)
class TextGroups(TableData):
    """Rows of a query, its positive and any number of hard negatives, or of two texts and a score; see `TableData`."""

    query_field: str = "query"
    """Column of the query, or of the first text."""

    positive_field: str = "positive"
    """Column of the text that matches it, or of the second text."""

    negative_fields: tuple[str, ...] = ("negatives",)
    """Columns of its hard negatives, which rows may lack; of JSON, a column may hold a list of texts."""

    score_field: str = ""
    """Column of the score of two texts, a number that is higher the closer they are, for --objective.criterion
    cosent."""

    column_flags = "--data.query-field, --data.positive-field and --data.score-field"

    def columns(self) -> list[str]:
        return [self.query_field, self.positive_field, *filter(None, [self.score_field])]

    def optional_columns(self) -> Sequence[str]:
        return self.negative_fields

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        texts = (row.text(self.query_field), row.text(self.positive_field))
        columns = [column for column in self.negative_fields if column in row.values]
        negatives = [text for column in columns for text in row.texts(column) if text.strip()]
        if any(text.startswith(('["', "['")) for text in negatives):
            raise UserError(f"{row.place}: {', '.join(columns)} holds a list as text; write the rows as JSON lines, or "
                            "a column for each negative.")
        for column, text in zip((self.query_field, self.positive_field), texts, strict=True):
            if not text.strip():
                raise UserError(f"{row.place} has no {column}; fill it in, or remove the row.")
        values: dict[str, Any] = {"query": texts[0], "positive": texts[1], "negatives": negatives}
        if self.score_field:
            values["label"] = _number(row, self.score_field)
        return values, texts


def _number(row: TableRow, column: str) -> float | None:
    """Return a score; None if the column is blank."""
    if (text := row.label(column)) is None:
        return None
    try:
        if math.isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    raise UserError(f"{row.place}: {text!r:.60} in the column {column!r} is not a number; fix or remove the row.")
