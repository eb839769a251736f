"""Evaluation of a fine-tuned model on labelled rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlm.data.labelled import LabelledData, LabelledSource
from jaxlm.errors import UserError
from jaxlm.paths import check_output
from jaxlm.tasks.base import Task
from jaxlm.tokenizers.tokenizer import Tokenizer

Report = Callable[[str], None]
Result = dict[str, Any]
"""`task`, `metrics` (name → value), `examples` (how many); where there are any, `unlabelled`, how many have no label
and are not scored, and `unseen`, how many have a label that training had not seen and are scored as wrong."""


def evaluate(
    task: Task, params: Any, tokenizer: Tokenizer, data: LabelledData, batch_size: int,
    predictions: str | Path | None = None, report: Report = print,
) -> Result:
    """The metrics of a fine-tuned model on the held-out rows of `data`.

    task: bound to the tokenizer. predictions: a file to write, one JSON object a row with `id`, `prediction`, `gold`
    and scores. UserError for bad rows.
    """
    check_output(predictions, "--predictions", inputs=(data.source, data.dev))
    source = data.open(tokenizer, report)
    records = source.records["held_out"]
    if not records:
        raise UserError("there are no rows to evaluate on; give --data.source FILE.")
    if any(task.gold(row) is not None for row in records):
        task.require_packages()
    readable = [task.without_unseen_label(row) for row in records]
    unseen = sum(own is not row for own, row in zip(readable, records, strict=True))
    if unseen:
        source = LabelledSource(tokenizer, {"held_out": readable}, data.buckets)
    examples = source.examples("held_out", task.encoder, data.length)
    answers = task.answers(records, examples, task.run(params, source, data.length, batch_size))
    if predictions is not None and jax.process_index() == 0:
        write_predictions(predictions, [
            {"id": row.id, "prediction": answer.prediction, "gold": task.gold(row)} | answer.scores
            for row, answer in zip(records, answers, strict=True)
        ])
    scored = [pair for pair in zip(records, answers, strict=True) if task.gold(pair[0]) is not None]
    metrics = task.score(*zip(*scored, strict=True)) if scored else {}
    metrics = {name: round(float(value), 6) for name, value in metrics.items()}
    counts = {"examples": len(records), "unlabelled": len(records) - len(scored), "unseen": unseen}
    return {"task": task.name, "metrics": metrics} | {
        name: count for name, count in counts.items() if count or name == "examples"
    }


def write_predictions(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line. UserError where the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --predictions.") from error
