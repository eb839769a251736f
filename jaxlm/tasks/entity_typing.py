"""Entity typing: any number of types for a mention in a sentence (FIGER, Open Entity)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxlm.data.labelled import Arrays, EncodedExample, Record
from jaxlm.data.readers import LABELS, row_of, texts_of
from jaxlm.objectives.base import Term, Terms
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer
from jaxlm.tasks.marked import MarkedRows, MarkedTask, Span, span_of

MARK = "。"
"""Marker around the mention, a symbol of BERT's vocabulary that English texts lack."""


class _Row(NamedTuple):
    """Fields of a row."""

    sent: str
    start: int
    end: int
    labels: Any = None
    ents: list = ()


@dataclasses.dataclass(frozen=True)
class TypingRows(MarkedRows):
    """Mentions with their types, in the form of ERNIE's files of FIGER and Open Entity; see `MarkedRows`.

    A row has `sent`, `start` and `end` of the mention, `labels` (may be missing) and `ents`, the linked entities. Rows
    with an empty mention are skipped, as in the official code.
    """

    def record(self, row: Any, place: str) -> tuple[dict[str, Any], str] | None:
        text, start, end, labels, linked = row_of(_Row, row, place)
        if start == span_of(start, end, text, place)[1]:
            return None
        labels = None if labels is None else texts_of(labels, place, "labels", LABELS)
        entities = self.linked(linked, text, place, "ents")
        return {"text": text, "span": (start, end), "entities": entities, "labels": labels}, text


@dataclasses.dataclass(frozen=True)
class EntityTyping(MarkedTask):
    """loss = mean binary cross-entropy over rows and types (Zhang et al. 2019, section 4.3).

    The types with a positive logit are predicted.
    """

    top_label: bool = False
    """Always predict the type with the highest logit too, as the official code does for FIGER."""

    name = "entity_typing"
    gold_value = "labels"
    has_classifier_bias = False

    def spans(self, record: Record) -> list[tuple[Span, str]]:
        return [(record.values["span"], MARK)]

    def label_names(self, record: Record) -> Sequence[str]:
        return record.values["labels"] or ()

    def label(self, record: Record) -> np.ndarray:
        wanted = {self.label_number(record, label) for label in self.label_names(record)}
        return np.array([number in wanted for number in range(len(self.labels))], np.float32)

    def label_terms(
        self, logits: Float[Array, "batch classes"], label: Array, weights: Float[Array, " batch"]
    ) -> Terms:
        losses = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, label), axis=-1)
        is_right = jnp.all((logits > 0) == (label > 0), axis=-1)
        return {"task_loss": Term.of(losses, weights, 1.0), "accuracy": Term.of(is_right, weights)}

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        logits = parts[0][1]["logits"].astype(np.float64)
        is_predicted = (logits > 0) | (self.top_label & (logits == logits.max()))
        shares = 1 / (1 + np.exp(-logits))
        found = [label for label, is_own in zip(self.labels, is_predicted, strict=True) if is_own]
        return Answer(found, {"scores": dict(zip(self.labels, shares.tolist(), strict=True))})

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        return metrics.label_set_metrics([answer.prediction for answer in answers], golds)

    def shown_label(self, label: Any) -> str:
        return "labels " + ", ".join(name for name, is_own in zip(self.labels, label, strict=True) if is_own)

    def from_text(self, record: Record, text: str) -> list[str]:
        return text.split(", ") if text else []
