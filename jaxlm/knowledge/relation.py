"""Relation classification: the relation between two marked spans of a sentence (FewRel, TACRED)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlm.data.labelled import Record
from jaxlm.data.readers import LABELS, text_of
from jaxlm.errors import UserError
from jaxlm.knowledge.marked import MarkedRows, MarkedTask, Span, linked_entity
from jaxlm.paths import TEXT, check_form
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer

HEAD, TAIL = "#", "$"
"""Markers around the head and around the tail, symbols of BERT's vocabulary."""
_FORM = {"text": TEXT, "ents": list, "ann?": list}


@dataclasses.dataclass(frozen=True)
class RelationRows(MarkedRows):
    """Pairs of spans with their relation, in the form of ERNIE's files of FewRel and TACRED; see `MarkedRows`.

    A row has `text`, `ents` (head and tail), `label` (may be missing), and `ann`, the linked entities; without `ann`
    these are head and tail. The official code moves a span that begins at character 1 to 0; this does not.
    """

    def record(self, row: Any, place: str) -> tuple[dict[str, Any], str] | None:
        check_form(row, _FORM, place)
        text, ends, label, linked = str(row["text"]), row["ents"], row.get("label"), row.get("ann")
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

    def spans(self, record: Record) -> list[tuple[Span, str]]:
        return [(record.values["head"], HEAD), (record.values["tail"], TAIL)]

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        predictions = [answer.prediction for answer in answers]
        return metrics.relation_metrics(predictions, golds, self.no_relation)
