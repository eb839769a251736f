"""Remarks about the rows of a task before it trains: class counts, likely mistakes in labels, empty and long texts."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jaxlm.data.labelled import LabelledData, LabelledSource, Record
from jaxlm.errors import UserError

_SHOWN = 20  # labels in one line


def require_classes(task: Any, records: Sequence[Record], data: LabelledData) -> None:
    """Raise UserError if all training rows have the same class or number, so that nothing can be learnt."""
    is_number = getattr(task, "target", "") == "number"
    (labels, *others) = {frozenset([task.gold(row)] if is_number else task.label_names(row)) for row in records}
    if others or len(labels) != 1:
        return
    other = f", or another column with {data.label_flag}" if data.label_flag else ""
    raise UserError(
        f"{data.source}: all {len(records):,} rows have the label {min(labels)!r:.60}, so there is nothing to learn; "
        f"give rows of two {'numbers' if is_number else 'classes'} or more{other}."
    )


def row_remarks(task: Any, rows: LabelledSource) -> list[str]:
    """Return one line per remark about the labels and texts of the training rows.

    For a task that writes its answers, `task` is the one that they answer.
    """
    records = rows.records["train"]
    counts = collections.Counter(label for record in records for label in task.label_names(record))
    lines = label_remarks(task.labels, counts) if task.labels else []
    if empty := [record for record in records if not all(text.strip() for text in record.texts)]:
        lines.append(f"{_rows(len(empty))} with an empty text (kept), the first at {empty[0].place}")
    return lines


def label_remarks(labels: Sequence[str], counts: collections.Counter[str]) -> list[str]:
    """Return the counts of the labels, those that occur once, and those that differ only in form."""
    shown = ", ".join(f"{quoted(label):.40} ({counts[label]:,})" for label in labels[:_SHOWN])
    lines = [f"Labels ({len(labels):,}): {shown}{', …' if len(labels) > _SHOWN else ''}"]
    if rare := [repr(label) for label in labels if counts[label] == 1]:
        lines.append(f"Labels of a single row: {', '.join(rare[:_SHOWN])}{', …' if len(rare) > _SHOWN else ''}")
    forms = collections.defaultdict(list)
    for label in labels:
        forms[_plain(label)].append(repr(label))
    lines += [f"Labels that differ in form only, and are classes of their own unless the file is corrected: "
              f"{', '.join(same)}" for same in forms.values() if len(same) > 1]
    return lines


def quoted(label: str) -> str:
    """Return a label, in quotes if spaces around it would be overlooked."""
    return label if label == label.strip() else repr(label)


def _plain(label: str) -> str:
    """Return a label without what a person would overlook: case, outer spaces, the form of a number or truth value."""
    text = {"true": "1", "false": "0"}.get(label.strip().casefold(), label.strip().casefold())
    try:
        return repr(float(text))
    except ValueError:
        return text


def _rows(count: int) -> str:
    return f"{count:,} row" + "s" * (count > 1)
