"""Classification of texts and of pairs of texts, and regression (GLUE's tasks): the classifier reads one vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, Example, LabelledData, Record
from jaxlm.data.readers import text_of
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, PooledTask
from jaxlm.tasks.rows import INPUTS, input_arrays, input_padding, synthetic_inputs
from jaxlm.tasks.tables import class_names, label_of, read_table
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class TextRows(LabelledData):
    """One or two texts and a label a row, from TSV, CSV, JSON lines or `tfds:NAME`. Columns are named; a number is the
    place of a column, from 1, in a file without a line of names."""

    text_field: str = "text"
    """Column of the text."""

    text_pair_field: str = ""
    """Column of the second text; empty where there is one text a row."""

    label_field: str = "label"
    """Column of the label; empty for a file whose labels are to be predicted."""

    id_field: str = ""
    """Column of the row's id; empty: the number of the row."""

    def read(self, path: str) -> Iterator[Record]:
        columns = [self.text_field, *filter(None, (self.text_pair_field, self.label_field, self.id_field))]
        for number, (place, row) in enumerate(read_table(path, columns)):
            values = {
                "text": text_of(row[self.text_field], place, self.text_field),
                "label": label_of(row, self.label_field, place),
            }
            if self.text_pair_field:
                values["text_pair"] = text_of(row[self.text_pair_field], place, self.text_pair_field)
            name = text_of(row[self.id_field], place, self.id_field) if self.id_field else str(number)
            texts = (values["text"], values["text_pair"]) if self.text_pair_field else (values["text"],)
            yield Record(name, place, values, texts)

    def class_names(self) -> tuple[str, ...]:
        return class_names(self.source, self.label_field) if self.label_field else ()


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Texts inside a template; see `jaxlm.data.labelled.RowEncoder`. Arrays: input_ids, token_type_ids, attention_mask
    int32 [length], or [2, length] where both orders of a pair are wanted; label int32 or float32 []."""

    template: Template
    vocabulary: Vocabulary
    labels: tuple[str, ...]
    is_number: bool
    both_orders: bool

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Example]:
        texts = tokenizer.encode_arrays([row.values["text"] for row in records])
        pairs = tokenizer.encode_arrays([row.values.get("text_pair", "") for row in records])
        examples = []
        for number, (row, first, second) in enumerate(zip(records, texts, pairs, strict=True)):
            both = "text_pair" in row.values
            if self.both_orders and not both:
                raise UserError(f"{row.place} has one text; objective.both_orders needs --data.text-pair-field.")
            first, second = shortened(first, second, length - self.template.num_symbols(both))
            rows = [self.template.build(self.vocabulary, first, second if both else None)]
            if self.both_orders:
                rows.append(self.template.build(self.vocabulary, second, first))
            arrays = {name: np.stack([input_arrays(one)[name] for one in rows]) for name in INPUTS}
            arrays = arrays if self.both_orders else {name: array[0] for name, array in arrays.items()}
            examples.append(Example(number, arrays | {"label": self._label(row)}))
        return examples

    def _label(self, row: Record) -> np.ndarray:
        label = row.values["label"]
        if self.is_number:
            return np.float32(_number(row) or 0)
        if label is not None and label not in self.labels:
            raise UserError(
                f"{row.place}: the label {label!r} is not one of the training rows' ({', '.join(self.labels)}); "
                "mend or remove the line."
            )
        return np.int32(0 if label is None else self.labels.index(label))

    def fill(self, vocabulary: Vocabulary) -> dict[str, int]:
        return input_padding(vocabulary)

    def synthetic(self, rows: int, length: int, vocabulary: Vocabulary) -> Arrays:
        shape = (rows, 2, length) if self.both_orders else (rows, length)
        label = np.zeros(rows, np.float32 if self.is_number else np.int32)
        return synthetic_inputs(shape, vocabulary) | {"label": label}


def _number(row: Record) -> float | None:
    """The label as a number; None where there is none. UserError for a label that is no number."""
    label = row.values["label"]
    try:
        if label is not None and not math.isfinite(float(label)):
            raise ValueError
    except ValueError:
        raise UserError(f"{row.place}: the label {label!r} is no number; mend or remove the line.") from None
    return None if label is None else float(label)


def shortened(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Two texts of together at most `room` tokens: as if one after another were taken from the longer (BERT's
    `_truncate_seq_pair`)."""
    second = second[: max(room // 2, room - len(first))]
    return first[: room - len(second)], second


@dataclasses.dataclass(frozen=True)
class Classification(PooledTask):
    """loss = cross-entropy of the label, or the squared error of a number, + the language-model loss."""

    target: Literal["class", "number"] = field("class", weights=True)
    """What a label is: a class, or a number (regression)."""
    both_orders: bool = False
    """Read a pair in both orders and add up their vectors, for a similarity (Radford et al. 2018, section 3.3)."""

    name = "classification"

    @property
    def encoder(self) -> TextEncoder:
        assert self.vocabulary is not None, "bind the objective to a vocabulary first"
        is_number = self.target == "number"
        return TextEncoder(self.template, self.vocabulary, self.labels, is_number, self.both_orders)

    @property
    def outputs(self) -> int:
        return 1 if self.target == "number" else len(self.labels)

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        if self.labels or self.target == "number":
            return self
        found = {row.values["label"] for row in records}
        ordered = [name for name in names if name in found]
        return dataclasses.replace(self, labels=(*ordered, *sorted(found.difference(names))))

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        x, language = self.pooled_with_lm(params, example, key, train)
        logits = self.classify(params, self._summed(x))
        return self._label_terms(logits, example["label"], self.weights(example)) | language

    def _label_terms(self, logits: jax.Array, label: jax.Array, weights: jax.Array) -> Terms:
        """logits: [rows, classes]; label: [rows] ids of classes, or numbers."""
        if self.target == "number":
            return {"task_loss": Term.of(jnp.square(logits[:, 0] - label), weights, 1.0)}
        return {
            "task_loss": Term.of(cross_entropy(logits, label), weights, 1.0),
            "accuracy": Term.of(jnp.argmax(logits, axis=-1) == label, weights),
        }

    def _logits(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        return self.classify(params, self._summed(self.pooled(params, inputs, key)))

    def _summed(self, x: jax.Array) -> jax.Array:
        """One vector a record."""
        return x.reshape(-1, 2, x.shape[-1]).sum(axis=1) if self.both_orders else x

    def predict(self, params: Params, example: Arrays) -> Arrays:
        return {"logits": self._logits(params, self.flat_inputs(example), None)}

    def flops(self, length: int) -> float:
        return super().flops(length) * (2 if self.both_orders else 1)

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        label = example["label"][row]
        name = f"{label:g}" if self.target == "number" else self.labels[int(label)]
        return [*super().describe(batch, example, row), Line(f"label {name}", [], [])]

    def answers(
        self, records: Sequence[Record], examples: Sequence[Example], outputs: Sequence[Arrays]
    ) -> list[Answer]:
        found = []
        for output in outputs:
            logits = output["logits"].astype(np.float64)
            if self.target == "number":
                found.append(Answer(float(logits[0]), {}))
                continue
            shares = np.exp(logits - logits.max())
            shares /= shares.sum()
            scores = dict(zip(self.labels, shares.tolist(), strict=True))
            found.append(Answer(self.labels[int(logits.argmax())], {"scores": scores}))
        return found

    def as_text(self, record: Record) -> tuple[str, str]:
        """In the form of Raffel et al. 2019, appendix D, without the task's name, and with the data's own labels;
        numbers to the next 0.2."""
        values = record.values
        texts = (
            f"sentence1: {values['text']} sentence2: {values['text_pair']}" if "text_pair" in values
            else f"sentence: {values['text']}"
        )
        label = self.gold(record)
        if label is None:
            return texts, ""
        return texts, f"{round(label * 5) / 5:.1f}" if self.target == "number" else label

    def from_text(self, record: Record, text: str) -> Any:
        if self.target == "class":
            return text
        try:
            return float(text)
        except ValueError:
            return 0.0

    def gold(self, record: Record) -> Any:
        return _number(record) if self.target == "number" else record.values["label"]

    def without_unseen_label(self, record: Record) -> Record:
        label = record.values["label"]
        is_seen = self.target == "number" or label is None or label in self.labels
        return record if is_seen else record._replace(values=record.values | {"label": None})

    def score(self, records: Sequence[Record], answers: Sequence[Answer]) -> dict[str, float]:
        predictions, gold = [a.prediction for a in answers], [self.gold(row) for row in records]
        if self.target == "number":
            return {"pearson": metrics.pearson(predictions, gold), "spearman": metrics.spearman(predictions, gold)}
        return {
            "accuracy": metrics.accuracy(predictions, gold),
            "f1": metrics.f1(predictions, gold, self.labels),
            "matthews": metrics.matthews(predictions, gold),
        }
