"""Multiple choice (SWAG, CODAH, CosmosQA, CommonsenseQA): one logit per choice, softmax over the choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.labelled import Arrays, EncodedExample, Record
from jaxlm.data.readers import LABELS, text_of
from jaxlm.errors import UserError
from jaxlm.objectives.base import Line
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task
from jaxlm.tasks.pooled import PooledTask
from jaxlm.tasks.tables import TableData, TableRow
from jaxlm.types import Params

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of the choices as text."""


@dataclasses.dataclass(frozen=True)
class ChoiceRows(TableData):
    """Rows of a text and its choices; see `TableData`. Objects as choices are read from JSON lines only."""

    text_field: str = "text"
    """Column of the text before the choices; several columns, separated by commas, are joined by a space."""
    question_field: str = ""
    """Column of a question that precedes each choice."""
    choices_fields: str = "choices"
    """Columns of the choices, separated by commas; or of JSON one list, of texts or of objects with `text`."""
    label_field: str = "label"
    """Column of the right choice: its number from 0 or its letter (A, B, …), or its `label` among the objects, which
    predictions then use too; empty for a file whose labels are to be predicted."""

    def columns(self) -> list[str]:
        columns = [*self.text_field.split(","), *self.choices_fields.split(",")]
        return columns + list(filter(None, (self.question_field, self.label_field)))

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        columns, place = self.choices_fields.split(","), row.place
        choices = row.values[columns[0]] if len(columns) == 1 else [row.values[name] for name in columns]
        if not isinstance(choices, list) or len(choices) < 2:
            raise UserError(f"{place}: {self.choices_fields!r} holds no list of two choices or more.")
        choices = [item if isinstance(item, dict) else {"text": item} for item in choices]
        names = [item.get("label", number) for number, item in enumerate(choices)]
        texts = [text_of(item.get("text"), place, self.choices_fields) for item in choices]
        keys = [text_of(name, place, f"{self.choices_fields}.label", LABELS) for name in names]
        label = row.label(self.label_field)
        if not any("label" in item for item in choices):
            label = dict(zip(LETTERS, keys, strict=False)).get(label, label)
        if len(set(keys)) < len(keys):
            raise UserError(f"{place}: two choices have the same label, of {', '.join(keys)}; give each its own.")
        if label is not None and label not in keys:
            raise UserError(f"{place}: the label {label!r} is none of the choices {', '.join(keys)}.")
        text = " ".join(map(row.text, self.text_field.split(",")))
        return {
            "text": text, "choices": texts, "names": names, "label": None if label is None else keys.index(label),
            "question": row.text(self.question_field),
        }, (text,)

    def read(self, path: str) -> Iterator[Record | UserError]:
        count = None
        for row in super().read(path):
            found = None if isinstance(row, UserError) else len(row.values["choices"])
            count = count or found
            if found not in (None, count):
                row = UserError(f"{row.place} has {found} choices, the rows before {count}; give each as many.")
            yield row


@dataclasses.dataclass(frozen=True)
class MultipleChoice(PooledTask):
    """loss = cross-entropy of the right choice + language-model loss (see `PooledTask`), over the texts of all choices.

    Each choice follows the text in a row of its own, and the softmax is over the choices' logits (BERT on SWAG).
    """

    name = "multiple_choice"
    use_input_dropout = False
    num_logits = 1
    num_texts = 4
    """As in SWAG; the FLOPs of rows with other numbers of choices are in proportion."""

    def texts(self, record: Record) -> list[tuple[str, ...]]:
        text, question, choices = (record.values[name] for name in ("text", "question", "choices"))
        return [(text, " ".join(filter(None, (question, choice)))) for choice in choices]

    def label_names(self, record: Record) -> Sequence[str]:
        return ()

    def label(self, record: Record) -> np.ndarray:
        return np.int32(record.values["label"] or 0)

    def row_logits(self, params: Params, x: Float[Array, "batch texts hidden"]) -> Float[Array, "batch choices"]:
        return self.classify(params, x)[..., 0]

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        lines = Task.describe(self, batch, example, row)
        label = int(example["label"][row])
        return [line._replace(title="right" if i == label else "wrong") for i, line in enumerate(lines)]

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        logits = parts[0][1]["logits"]
        return Answer(record.values["names"][logits.argmax()], {"scores": logits.astype(float).tolist()})

    def gold(self, record: Record) -> Any:
        label = record.values["label"]
        return None if label is None else record.values["names"][label]

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        return {"accuracy": metrics.accuracy([answer.prediction for answer in answers], golds)}

    def as_text(self, record: Record) -> tuple[str, str]:
        text, question, choices, label = (record.values[name] for name in ("text", "question", "choices", "label"))
        if len(choices) > len(LETTERS):
            raise UserError(f"{record.place} has {len(choices)} choices; letters name only {len(LETTERS)}.")
        lettered = " ".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        question = f"question: {question} " if question else ""
        return f"{question}choices: {lettered} context: {text}", "" if label is None else LETTERS[label]

    def from_text(self, record: Record, text: str) -> Any:
        """Return the data's name of the choice with that letter; None for any other text."""
        return dict(zip(LETTERS, record.values["names"], strict=False)).get(text)
