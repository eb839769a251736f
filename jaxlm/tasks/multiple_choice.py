"""Multiple choice (SWAG, CODAH, CosmosQA, CommonsenseQA): one logit a choice, softmax over the choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, Example, LabelledData, Record
from jaxlm.data.readers import LABELS, text_of
from jaxlm.errors import UserError
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, PooledTask
from jaxlm.tasks.classification import shortened
from jaxlm.tasks.rows import INPUTS, input_arrays, input_padding, synthetic_inputs
from jaxlm.tasks.tables import label_of, read_table
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of the choices where they are written as text."""


@dataclasses.dataclass(frozen=True)
class ChoiceRows(LabelledData):
    """A question and its choices a row, from TSV, CSV, JSON lines or `tfds:NAME`. Columns are named; a number is the
    place of a column, from 1, in a file without a line of names. Objects as choices are read from JSON lines only."""

    text_field: str = "text"
    """Column of the text in front of the choices; several, with commas between, are joined by a space."""

    question_field: str = ""
    """Column of a question that each choice is joined to."""

    choices_fields: str = "choices"
    """Columns of the choices, with commas between; or of JSON one list, of texts or of objects with `text`."""

    label_field: str = "label"
    """Column of the right choice: its number from 0, or its `label` among the objects, which predictions then use
    too; empty for a file whose labels are to be predicted."""

    id_field: str = ""
    """Column of the row's id; empty: the number of the row."""

    def read(self, path: str) -> Iterator[Record]:
        texts, choices = self.text_field.split(","), self.choices_fields.split(",")
        question = self.question_field
        columns = [*texts, *choices, *filter(None, (question, self.label_field, self.id_field))]
        count = None
        for number, (place, row) in enumerate(read_table(path, columns)):
            given = row[choices[0]] if len(choices) == 1 else [row[name] for name in choices]
            if not isinstance(given, list) or len(given) < 2:
                raise UserError(f"{place}: {self.choices_fields!r} holds no list of two choices or more.")
            names = [item.get("label", i) if isinstance(item, dict) else i for i, item in enumerate(given)]
            options = [
                text_of(item.get("text") if isinstance(item, dict) else item, place, self.choices_fields)
                for item in given
            ]
            count = count or len(options)
            if len(options) != count:
                raise UserError(f"{place} has {len(options)} choices, the rows before {count}; give each as many.")
            keys = [text_of(name, place, f"{self.choices_fields}.label", LABELS) for name in names]
            label = label_of(row, self.label_field, place)
            if len(set(keys)) < len(keys):
                raise UserError(f"{place}: two choices have the same label, of {', '.join(keys)}; give each its own.")
            if label is not None and label not in keys:
                raise UserError(f"{place}: the label {label!r} is none of the choices {', '.join(keys)}.")
            values = {
                "text": " ".join(text_of(row[name], place, name) for name in texts), "choices": options,
                "names": names, "label": None if label is None else keys.index(label),
                "question": text_of(row[question], place, question) if question else "",
            }
            name = text_of(row[self.id_field], place, self.id_field) if self.id_field else str(number)
            yield Record(name, place, values, (values["text"],))


@dataclasses.dataclass(frozen=True)
class ChoiceEncoder:
    """Each choice in a row of its own behind the text; see `jaxlm.data.labelled.RowEncoder`. Arrays: input_ids,
    token_type_ids, attention_mask int32 [choices, length]; label int32 []."""

    template: Template
    vocabulary: Vocabulary

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Example]:
        texts = tokenizer.encode_arrays([row.values["text"] for row in records])
        flat = [" ".join(filter(None, (row.values["question"], choice))) for row in records
                for choice in row.values["choices"]]
        endings = iter(tokenizer.encode_arrays(flat))
        room, fill = length - self.template.num_symbols(True), self.fill(self.vocabulary)
        examples = []
        for number, (row, text) in enumerate(zip(records, texts, strict=True)):
            made = []
            for _ in row.values["choices"]:
                first, second = shortened(text, next(endings), room)
                made.append(input_arrays(self.template.build(self.vocabulary, first, second)))
            longest = max(len(one["input_ids"]) for one in made)
            arrays = {
                name: np.stack([np.pad(one[name], (0, longest - len(one[name])), constant_values=fill[name])
                                for one in made])
                for name in INPUTS
            }
            examples.append(Example(number, arrays | {"label": np.int32(row.values["label"] or 0)}))
        return examples

    def fill(self, vocabulary: Vocabulary) -> dict[str, int]:
        return input_padding(vocabulary)

    def synthetic(self, rows: int, length: int, vocabulary: Vocabulary) -> Arrays:
        return synthetic_inputs((rows, 4, length), vocabulary) | {"label": np.zeros(rows, np.int32)}


@dataclasses.dataclass(frozen=True)
class MultipleChoice(PooledTask):
    """loss = cross-entropy of the right choice under the softmax of the choices' logits (BERT, SWAG), + the
    language-model loss, over the texts of all choices."""

    name = "multiple_choice"

    @property
    def encoder(self) -> ChoiceEncoder:
        assert self.vocabulary is not None, "bind the objective to a vocabulary first"
        return ChoiceEncoder(self.template, self.vocabulary)

    @property
    def outputs(self) -> int:
        return 1

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        x, language = self.pooled_with_lm(params, example, key, train)
        weights, label = self.weights(example), example["label"]
        logits = self.classify(params, x).reshape(len(label), -1)
        return language | {
            "task_loss": Term.of(cross_entropy(logits, label), weights, 1.0),
            "accuracy": Term.of(jnp.argmax(logits, axis=-1) == label, weights),
        }

    def predict(self, params: Params, example: Arrays) -> Arrays:
        logits = self.classify(params, self.pooled(params, self.flat_inputs(example), None))
        return {"logits": logits.reshape(len(example["row"]), -1)}

    def flops(self, length: int) -> float:
        return 4 * super().flops(length)  # as in SWAG; rows of other numbers of choices cost in proportion

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        lines = super().describe(batch, example, row)
        label = int(example["label"][row])
        return [line._replace(title="right" if i == label else "wrong") for i, line in enumerate(lines)]

    def answers(
        self, records: Sequence[Record], examples: Sequence[Example], outputs: Sequence[Arrays]
    ) -> list[Answer]:
        return [
            Answer(row.values["names"][o["logits"].argmax()], {"scores": o["logits"].astype(float).tolist()})
            for row, o in zip(records, outputs, strict=True)
        ]

    def as_text(self, record: Record) -> tuple[str, str]:
        values = record.values
        if len(values["choices"]) > len(LETTERS):
            raise UserError(f"{record.place} has {len(values['choices'])} choices; letters name only {len(LETTERS)}.")
        choices = " ".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, values["choices"], strict=False))
        question = f"question: {values['question']} " if values["question"] else ""
        label = values["label"]
        return f"{question}choices: {choices} context: {values['text']}", "" if label is None else LETTERS[label]

    def from_text(self, record: Record, text: str) -> Any:
        """The choice of that letter, as the data names it; None for any other text."""
        return dict(zip(LETTERS, record.values["names"], strict=False)).get(text)

    def gold(self, record: Record) -> Any:
        label = record.values["label"]
        return None if label is None else record.values["names"][label]

    def score(self, records: Sequence[Record], answers: Sequence[Answer]) -> dict[str, float]:
        return {"accuracy": metrics.accuracy([a.prediction for a in answers], [self.gold(row) for row in records])}
