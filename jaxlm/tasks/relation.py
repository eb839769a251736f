"""Relation classification: the relation between two marked spans of a sentence (FewRel, TACRED)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.data.labelled import Arrays, Example, Record
from jaxlm.data.mentions import Mention, Mentions
from jaxlm.data.readers import LABELS, row_of, text_of
from jaxlm.errors import UserError
from jaxlm.objectives.base import Line
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer
from jaxlm.tasks.marked import MarkedRows, MarkedTask, linked_entity, mark_spans

HEAD, TAIL = "#", "$"
"""Markers around the head and around the tail, symbols of BERT's vocabulary."""


class _Row(NamedTuple):
    """Fields of a row."""

    text: str
    ents: list
    label: Any = None
    ann: list | None = None


@dataclasses.dataclass(frozen=True)
class RelationRows(MarkedRows):
    """Pairs of spans with their relation, in the form of ERNIE's files of FewRel and TACRED; see `MarkedRows`.

    A row has `text`, `ents` (head and tail), `label` (may be missing), and `ann`, the linked entities; without `ann`
    these are head and tail. The official code moves a span that begins at character 1 to 0; this does not.
    """

    def record(self, row: Any, place: str) -> tuple[dict[str, Any], str] | None:
        text, ends, label, linked = row_of(_Row, row, place)
        if len(ends) != 2:
            raise UserError(f"{place}: the field 'ents' is not a list of head and tail; fix or remove the row.")
        spans = [linked_entity(item, text, place, "ents")[1] for item in ends]
        if any(start == end for start, end in spans):
            raise UserError(f"{place}: the head or the tail is empty; fix or remove the row.")
        # Head and tail are given, not found by a linker.
        linked = [item[:3] for item in ends] if linked is None else linked
        return {
            "text": text, "head": spans[0], "tail": spans[1], "entities": self.linked(linked, text, place, "ann"),
            "label": None if label is None else text_of(label, place, "label", LABELS),
        }, text


@dataclasses.dataclass(frozen=True)
class RelationClassification(MarkedTask):
    """loss = cross-entropy of the relation (Zhang et al. 2019, section 4.4)."""

    no_relation: str = "NA"
    """Label of rows without a relation, which the micro average leaves out (TACRED)."""

    name = "relation"

    def marked(self, record: Record) -> tuple[str, Mentions]:
        values = record.values
        mentions = [Mention(start, end, entity) for entity, start, end in values["entities"]]
        return mark_spans(values["text"], [(tuple(values["head"]), HEAD), (tuple(values["tail"]), TAIL)], mentions)

    def label_names(self, record: Record) -> Sequence[str]:
        label = record.values["label"]
        return () if label is None else (label,)

    def label(self, record: Record) -> np.ndarray:
        label = record.values["label"]
        return np.int32(0 if label is None else self.label_number(record, label))

    def answer(self, record: Record, parts: Sequence[tuple[Example, Arrays]]) -> Answer:
        logits = parts[0][1]["logits"].astype(np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        return Answer(self.labels[logits.argmax()], {"scores": dict(zip(self.labels, shares.tolist(), strict=True))})

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        predictions = [answer.prediction for answer in answers]
        return metrics.relation_metrics(predictions, golds, self.no_relation)

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        name = self.labels[int(example["label"][row])]
        return [*super().describe(batch, example, row), Line(f"label {name}", [], [])]

    def as_text(self, record: Record) -> tuple[str, str]:
        return self.marked(record)[0], record.values["label"] or ""

    def from_text(self, record: Record, text: str) -> str:
        return text
