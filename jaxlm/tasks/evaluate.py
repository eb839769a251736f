"""Evaluation of a fine-tuned model on labelled rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlm.data.labelled import Arrays, Example, LabelledData, LabelledSource
from jaxlm.errors import UserError
from jaxlm.paths import check_output
from jaxlm.tasks.base import Task
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Report

Result = dict[str, Any]
"""`task`, `metrics` by name, and `examples`, the number of rows; if there are any, also `unlabelled`, the number of
rows without a label, which are not scored, and `unseen`, with a label that training had not seen, scored as wrong; and
the task's details, such as `classes` and `confusion` (see `jaxlm.tasks.metrics.class_details`)."""


def evaluate(
    task: Task, params: Any, tokenizer: Tokenizer, data: LabelledData, batch_size: int,
    predictions: str | Path | None = None, report: Report = print,
) -> Result:
    """Return the metrics of a fine-tuned model on the held-out rows of `data`.

    Args:
        task: The bound task.
        params: Its parameters.
        tokenizer: Its tokenizer.
        data: The rows.
        batch_size: Rows per batch.
        predictions: File to write, one JSON object per row with `id`, `prediction`, `gold` and scores.
        report: Receives progress messages.

    Raises:
        UserError: There are no rows, or a row cannot be read.
    """
    check_output(predictions, "--predictions", inputs=(data.source, data.dev))
    source = data.open(tokenizer, report)
    records = source.records["held_out"]
    if not records:
        raise UserError("there are no rows to evaluate on; give --data.source FILE.")
    golds = [task.gold(record) for record in records]
    if any(gold is not None for gold in golds):
        task.require_packages()
    readable = [task.without_unseen_label(record) for record in records]
    unseen = sum(found is not record for found, record in zip(readable, records, strict=True))
    if unseen:
        source = LabelledSource(tokenizer, {"held_out": readable}, data.buckets)
    parts: list[list[tuple[Example, Arrays]]] = [[] for _ in records]
    outputs = task.run(params, source, data.length, batch_size)
    for example, output in zip(source.examples("held_out", task, data.length), outputs, strict=True):
        parts[example.record].append((example, output))
    answers = [task.answer(record, own) for record, own in zip(records, parts, strict=True)]
    if predictions is not None and jax.process_index() == 0:
        write_predictions(predictions, [
            {"id": record.id, "prediction": answer.prediction, "gold": gold} | answer.scores
            for record, answer, gold in zip(records, answers, golds, strict=True)
        ])
    scored = [pair for pair in zip(golds, answers, strict=True) if pair[0] is not None]
    metrics, details = {}, {}
    if scored:
        columns = list(zip(*scored, strict=True))
        metrics, details = task.score(*columns), task.details(*columns)
    metrics = {name: round(float(value), 6) for name, value in metrics.items()}
    counts = {"unlabelled": len(records) - len(scored), "unseen": unseen}
    return {"task": task.name, "metrics": metrics, "examples": len(records)} | {
        name: count for name, count in counts.items() if count
    } | details


def write_predictions(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line; raise UserError if the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --predictions.") from error
