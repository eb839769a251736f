"""Rows of texts that belong together, for embedding models: pairs, with hard negatives or with a score."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlm.errors import UserError
from jaxlm.tasks.tables import TableData, TableRow

_NEGATIVES = ("negatives",)


@dataclasses.dataclass(frozen=True)
class TextGroups(TableData):
    """Rows of a query, its positive and any number of hard negatives, or of two texts and a score; see `TableData`."""

    query_field: str = "query"
    """Column of the query, or of the first text."""
    positive_field: str = "positive"
    """Column of the text that matches it, or of the second text. Of JSON, a list has several that match it."""
    negative_fields: tuple[str, ...] = _NEGATIVES
    """Columns of its hard negatives; rows may lack the default one. Of JSON, a column may hold a list of texts."""
    score_field: str = ""
    """Column of the score of two texts, a number that is higher the closer they are, for --objective.criterion
    cosent."""

    column_flags = "--data.query-field, --data.positive-field and --data.score-field"

    def columns(self) -> list[str]:
        negatives = () if self.optional_columns() else self.negative_fields
        return [self.query_field, self.positive_field, *negatives, *filter(None, [self.score_field])]

    def optional_columns(self) -> Sequence[str]:
        return _NEGATIVES if self.negative_fields == _NEGATIVES else ()

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        positives = [text for text in row.texts(self.positive_field) if text.strip()] or [""]
        texts = (row.text(self.query_field), *positives)
        columns = [column for column in self.negative_fields if column in row.values]
        listing = [self.positive_field, *columns]
        if listed := next((column for column in listing if _is_list(row.values[column])), None):
            raise UserError(f"{row.place}: {listed} holds a list as text; write lists in JSON lines, or a column for "
                            "each negative.")
        negatives = [text for column in columns for text in row.texts(column) if text.strip()]
        for column, text in zip((self.query_field, self.positive_field), texts, strict=False):
            if not text.strip():
                raise UserError(f"{row.place} has no {column}; fill it in, or remove the row.")
        values: dict[str, Any] = {"query": texts[0], "positive": texts[1], "negatives": negatives}
        if self.score_field:
            values["label"] = None if row.label(self.score_field) is None else row.number(self.score_field)
        if len(positives) > 1:
            values["positives"] = positives
            if self.score_field:
                raise UserError(f"{row.place}: {self.positive_field} has {len(positives)} texts for one score; write a "
                                "row for each.")
        return values, texts


def _is_list(value: Any) -> bool:
    """Return whether a value is text that reads as a list, such as pandas writes into a table."""
    if not isinstance(value, str) or not (value.lstrip().startswith("[") and value.rstrip().endswith("]")):
        return False
    try:
        return isinstance(ast.literal_eval(value.strip()), list)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
