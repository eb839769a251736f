"""Classification of texts and of pairs of texts, and regression, as in GLUE."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxlm.data import tfds_source
from jaxlm.data.labelled import Arrays, EncodedExample, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.objectives.base import Term, Terms
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer
from jaxlm.tasks.pooled import PooledTask
from jaxlm.tasks.tables import TableData, TableRow, finite
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class TextRows(TableData):
    """Rows of one or two texts and a label; see `TableData`."""

    text_field: str = "text"
    """Column of the text."""
    text_pair_field: str = ""
    """Column of the second text; empty for one text per row."""
    label_field: str = "label"
    """Column of the label; empty for a file whose labels are to be predicted."""
    label_separator: str = ""
    """Text between the labels of a column with several, such as '|', for --objective.target labels; lists in JSON need
    none."""

    label_advice = ("fill it in, name the column that has it, or, if rows have several labels or none of them, give "
                    "--data.label-separator")

    def columns(self) -> list[str]:
        return [self.text_field, *filter(None, (self.text_pair_field, self.label_field))]

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        label = row.label_set(self.label_field, self.label_separator)
        values: dict[str, Any] = {"text": row.text(self.text_field), "label": label}
        if self.text_pair_field:
            values["text_pair"] = row.text(self.text_pair_field)
        return values, tuple(values[name] for name in ("text", "text_pair") if name in values)

    def class_names(self) -> tuple[str, ...]:
        has_names = self.label_field and self.source.startswith("tfds:")
        return tfds_source.class_names(self.source, self.label_field) if has_names else ()


@dataclasses.dataclass(frozen=True)
class Classification(PooledTask):
    """loss = cross-entropy of the label, or squared error of a number, + language-model loss (see `PooledTask`)."""

    target: Literal["class", "number", "labels"] = field("class", weights=True)
    """What a row has: a class, a number (regression), or any number of labels (multi-label classification)."""
    # Equal tasks share encoded rows and compiled predictions, which do not depend on it.
    threshold: float = field(0.0, resumable=True, range="[0, 1)", compare=False)
    """Probability above which each of several labels is predicted; 0: the one with the best micro F1 on the held-out
    rows, chosen when training ends, and 0.5 until then."""
    both_orders: bool = False
    """Read a pair in both orders and add up their vectors, for a similarity (Radford et al. 2018, section 3.3)."""
    prompt: str = ""
    """Prompt for a model that writes the answer, in which {text} and {text_pair} stand for the texts; empty: `sentence:
    {text}`, or `sentence1: {text} sentence2: {text_pair}`."""
    label_words: tuple[str, ...] = ()
    """Words that such a model writes for the labels, each LABEL=WORD; other labels are written as they are."""

    name = "classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [word for word in self.label_words if not all(word.partition("="))]:
            raise UserError(f"objective.label_words has {wrong[0]!r}, which is not LABEL=WORD.")
        if self.threshold and not self.is_multi_label:
            raise UserError("objective.threshold is for several labels per row; add --objective.target labels.")

    @property
    def num_texts(self) -> int:
        return 2 if self.both_orders else 1

    @property
    def num_logits(self) -> int:
        return 1 if self.target == "number" else len(self.labels)

    def texts(self, record: Record) -> list[tuple[str, ...]]:
        texts = tuple(record.values[name] for name in ("text", "text_pair") if name in record.values)
        if self.both_orders and len(texts) == 1:
            raise UserError(f"{record.place} has one text; objective.both_orders needs --data.text-pair-field.")
        return [texts, texts[::-1]] if self.both_orders else [texts]

    def label(self, record: Record) -> np.ndarray:
        return np.float32(self.gold(record) or 0) if self.target == "number" else super().label(record)

    @property
    def is_multi_label(self) -> bool:
        return self.target == "labels"

    def label_names(self, record: Record) -> Sequence[str]:
        return () if self.target == "number" else super().label_names(record)

    def label_terms(
        self, logits: Float[Array, "batch classes"], label: Array, weights: Float[Array, " batch"]
    ) -> Terms:
        if self.target == "number":
            return {"task_loss": Term.of(jnp.square(logits[:, 0] - label), weights, 1.0)}
        return super().label_terms(logits, label, weights)

    def row_logits(self, params: Params, x: Float[Array, "batch texts hidden"]) -> Float[Array, "batch classes"]:
        return self.classify(params, jnp.sum(x, axis=1))

    def shown_label(self, label: Any) -> str:
        return f"label {label:g}" if self.target == "number" else super().shown_label(label)

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        is_number = self.target == "number"
        return Answer(float(parts[0][1]["logits"][0]), {}) if is_number else super().answer(record, parts)

    def is_predicted(self, logits: Float[np.ndarray, " labels"]) -> Bool[np.ndarray, " labels"]:
        return 1 / (1 + np.exp(-logits)) > (self.threshold or 0.5)

    def choose(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> dict[str, Any]:
        if not self.is_multi_label or self.threshold:
            return {}
        scores = [list(answer.scores["scores"].values()) for answer in self.answers(params, source, length, batch_size)]
        golds = [self.label(record) > 0 for record in source.records["held_out"]]
        return {"threshold": metrics.best_threshold(np.array(scores), np.array(golds))}

    def gold(self, record: Record) -> str | float | list[str] | None:
        label = record.values["label"]
        if isinstance(label, list) and not self.is_multi_label:
            raise UserError(f"{record.place} has a list of labels; --objective.target labels learns several per row.")
        if isinstance(label, str) and self.is_multi_label:
            raise UserError(
                f"{record.place}: the label {label!r:.60} is no list; name what separates labels with "
                "--data.label-separator (such as '|'), or give a list in JSON lines."
            )
        if label is None or self.target != "number":
            return label
        if (number := finite(label)) is None:
            raise UserError(f"{record.place}: the label {label!r} is no number; fix or remove the line.")
        return number

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        predictions = [answer.prediction for answer in answers]
        if self.target == "number":
            return metrics.correlations(predictions, golds)
        if self.is_multi_label:
            return metrics.multi_label_metrics(predictions, golds, self.labels)
        return metrics.class_metrics(predictions, golds, self.labels)

    def details(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, Any]:
        if self.target == "number":
            return {}
        predictions = [answer.prediction for answer in answers]
        if self.is_multi_label:
            chosen = {"threshold": self.threshold} if self.threshold else {}
            return chosen | metrics.multi_label_details(predictions, golds, self.labels)
        return metrics.class_details(predictions, golds, self.labels)

    def as_text(self, record: Record) -> tuple[str, str]:
        """Return prompt and answer in the form of Raffel et al. 2019, appendix D; numbers become multiples of 0.2.

        The answer of a row without a label is "".
        """
        values, label = record.values, self.gold(record)
        pair = "sentence1: {text} sentence2: {text_pair}" if "text_pair" in values else "sentence: {text}"
        if "{text_pair}" in self.prompt and "text_pair" not in values:
            raise UserError(f"{record.place} has one text; objective.prompt has a {{text_pair}}.")
        prompt = re.sub(r"\{(text|text_pair)\}", lambda match: values[match[1]], self.prompt or pair)
        if self.target == "number" and label is not None:
            label = f"{round(label * 5) / 5:.1f}"
        words = dict(word.split("=", 1) for word in self.label_words)
        if self.is_multi_label:
            return prompt, ", ".join(words.get(name, name) for name in label or ())
        return prompt, words.get(label, label) or ""

    def from_text(self, record: Record, text: str) -> str | float | list[str]:
        """Return the label of a word, and of any other text the text, or a list of these between commas.

        For a number return the number, -1 for a text that is none.
        """
        if self.target != "number":
            labels = {word: label for label, word in (word.split("=", 1) for word in self.label_words)}
            if self.is_multi_label:
                return [labels.get(word, word) for word in text.split(", ") if word]
            return labels.get(text, text)
        return -1.0 if (number := finite(text)) is None else number
