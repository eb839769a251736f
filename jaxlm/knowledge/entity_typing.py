"""Entity typing: any number of types for a mention in a sentence (FIGER, Open Entity)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxlm.data.labelled import Record
from jaxlm.data.readers import LABELS, texts_of
from jaxlm.knowledge.marked import MarkedRows, MarkedTask, Span, span_of
from jaxlm.paths import TEXT, check_form
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer

MARK = "。"
"""Marker around the mention, a symbol of BERT's vocabulary that English texts lack."""
_FORM = {"sent": TEXT, "start": int, "end": int, "ents?": list}


@dataclasses.dataclass(frozen=True)
class TypingRows(MarkedRows):
    """Mentions with their types, in the form of ERNIE's files of FIGER and Open Entity; see `MarkedRows`.

    A row has `sent`, `start` and `end` of the mention, `labels` (may be missing) and `ents`, the linked entities. Rows
    with an empty mention are skipped, as in the official code.
    """

    def record(self, row: Any, place: str) -> tuple[dict[str, Any], str] | None:
        check_form(row, _FORM, place)
        text, start, end, labels = str(row["sent"]), row["start"], row["end"], row.get("labels")
        if start == span_of(start, end, text, place)[1]:
            return None
        labels = None if labels is None else texts_of(labels, place, "labels", LABELS)
        entities = self.linked(row.get("ents") or [], text, place, "ents")
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
    is_multi_label = True
    has_classifier_bias = False

    def spans(self, record: Record) -> list[tuple[Span, str]]:
        return [(record.values["span"], MARK)]

    def is_predicted(self, logits: Float[np.ndarray, " labels"]) -> Bool[np.ndarray, " labels"]:
        return (logits > 0) | (self.top_label & (logits == logits.max()))

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        return metrics.label_set_metrics([answer.prediction for answer in answers], golds)

    def from_text(self, record: Record, text: str) -> list[str]:
        return text.split(", ") if text else []
