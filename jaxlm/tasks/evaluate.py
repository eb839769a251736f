"""Evaluation of a fine-tuned model on labelled rows."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlm.data.holdout import group_rows
from jaxlm.data.labelled import LabelledData, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.parallel.hosts import check_main_output, main_first
from jaxlm.paths import new_file
from jaxlm.tasks.base import Answer, Task
from jaxlm.types import Params, Report

Result = dict[str, Any]
"""`task`, `metrics` by name, and `examples`, the number of rows; if there are any, also `unlabelled`, the number of
rows without a label, which are not scored, and `unseen`, with a label that training had not seen, scored as wrong; and
the task's details, such as `classes` and `confusion` (see `jaxlm.tasks.metrics.class_details`); and `intervals`, the
95 % confidence interval of each metric, with `groups`, the number of groups of rows that were resampled."""


class Evaluation(NamedTuple):
    """A fine-tuned model and the rows that it is evaluated on."""

    task: Task
    """The bound task."""
    params: Params
    rows: LabelledSource
    """The opened rows; those held out are answered."""
    data: LabelledData
    """Configuration of the rows."""
    batch_size: int
    """Rows per batch."""


class AnsweredRows(NamedTuple):
    """AnsweredRows of a model to rows."""

    task: Task
    records: Sequence[Record]
    golds: Sequence[Any]
    """Right answers; None for rows without a label."""
    answers: Sequence[Answer]
    unseen: int
    """Number of rows with a label that training had not seen."""
    skipped: int = 0
    """Number of rows that were left out since they cannot be read."""

    def scored(self) -> tuple[list[Any], list[Answer]]:
        """Return the right answers and the model's, of the rows that have a label."""
        pairs = [pair for pair in zip(self.golds, self.answers, strict=True) if pair[0] is not None]
        return [gold for gold, _ in pairs], [answer for _, answer in pairs]

    def groups(self) -> list[np.ndarray]:
        """Return the scored rows of each group of rows that share texts, as in the held-out split."""
        rows = [row for row, gold in zip(self.records, self.golds, strict=True) if gold is not None]
        return text_groups([row.texts for row in rows], [row.document for row in rows])


def text_groups(texts: Sequence[tuple[str, ...]], documents: Sequence[str] = ()) -> list[np.ndarray]:
    """Return the rows of each group of rows that share texts or documents; see `jaxlm.data.holdout.group_rows`."""
    groups = group_rows(texts, documents or [""] * len(texts))
    return np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))[:-1])


def evaluate(
    evaluation: Evaluation, predictions: str | Path | None = None, resamples: int = 0, report: Report = print
) -> Result:
    """Return the metrics of a fine-tuned model on held-out rows.

    `predictions` gets one JSON object per row with `id`, `prediction`, `gold` and scores. With `resamples` there are
    confidence intervals of the metrics.
    """
    task, data = evaluation.task, evaluation.data
    check_main_output(predictions, "--predictions", inputs=(data.source, data.dev))
    found = answer_rows(evaluation, report)
    write_predictions(predictions, (
        {"id": record.id, "prediction": answer.prediction, "gold": gold} | answer.scores
        | (task.row_figures(gold, answer) if gold is not None else {})
        for record, answer, gold in zip(found.records, found.answers, found.golds, strict=True)
    ))
    golds, answers = found.scored()
    metrics, details = (task.score(golds, answers), task.details(golds, answers)) if golds else ({}, {})
    if golds and resamples:
        details |= intervals(found, resamples)
    counts = {"skipped": found.skipped, "unlabelled": len(found.records) - len(golds), "unseen": found.unseen}
    return {"task": task.name, "metrics": rounded(metrics), "examples": len(found.records)} | {
        name: count for name, count in counts.items() if count
    } | details


def intervals(answered: AnsweredRows, resamples: int, other: AnsweredRows | None = None) -> Result:
    """Return the `bootstrap` of a model's answers.

    Given the answers of an `other` model to the same rows, they are of the differences of the metrics, and each
    resample draws the same rows for both models (a paired bootstrap).
    """
    golds, models = answered.scored()[0], [each.scored()[1] for each in (answered, other) if each]

    def measure(chosen: np.ndarray) -> dict[str, float]:
        drawn = [answered.task.score([golds[i] for i in chosen], [answers[i] for i in chosen]) for answers in models]
        shared = [name for name in drawn[0] if all(name in each for each in drawn)]
        return {name: drawn[0][name] - sum(each[name] for each in drawn[1:]) for name in shared}

    return bootstrap(answered.groups(), measure, resamples)


def bootstrap(
    groups: Sequence[np.ndarray], measure: Callable[[np.ndarray], dict[str, float]], resamples: int
) -> Result:
    """Return `intervals` and `groups`, from percentiles of a bootstrap over groups of rows; see `Result`.

    Rows of a group are right or wrong together, so that resampled single rows would make the intervals too narrow. A
    metric that a resample lacks, such as that of questions without an answer, has the percentiles of the others. One
    group has no intervals.

    `measure` returns the metrics of rows, given their numbers.
    """
    draws, found = np.random.default_rng(0), collections.defaultdict(list)
    for _ in range(resamples if len(groups) > 1 else 0):
        chosen = np.concatenate([groups[i] for i in draws.integers(0, len(groups), len(groups))])
        for name, value in measure(chosen).items():
            found[name].append(value)
    shares = {name: np.percentile(values, [2.5, 97.5]).round(6).tolist() for name, values in found.items()}
    return {"groups": len(groups), "intervals": shares}


def compare(answered: AnsweredRows, other: AnsweredRows, resamples: int) -> Result:
    """Return the metrics of two models on the same rows, their differences, and the intervals of these."""
    tasks = [getattr(each.task, "kind", None) or each.task for each in (answered, other)]  # of a model that writes
    if (tasks[0].name, [r.id for r in answered.records], answered.golds) != (
        tasks[1].name, [r.id for r in other.records], other.golds
    ):
        raise UserError("the two models are not of the same task and rows; name the rows with --data.source FILE.")
    golds, answers = answered.scored()
    if not golds:
        raise UserError("the rows have no labels, so that the models cannot be compared.")
    metrics, theirs = (answered.task.score(golds, found) for found in (answers, other.scored()[1]))
    differences = {name: metrics[name] - theirs[name] for name in metrics if name in theirs}
    return {
        "task": answered.task.name, "metrics": rounded(metrics), "examples": len(answered.records),
        "against": rounded(theirs), "differences": rounded(differences),
    } | intervals(answered, resamples, other)


def answer_rows(evaluation: Evaluation, report: Report = print) -> AnsweredRows:
    """Return the answers of a fine-tuned model to held-out rows; see `evaluate`."""
    task, params, source, data, batch_size = evaluation
    records, skipped = source.records["held_out"], source.num_bad["held_out" if data.dev else "train"]
    if not records:
        raise UserError("there are no rows to evaluate on; give --data.source FILE.")
    golds = [task.gold(record) for record in records]
    if any(gold is not None for gold in golds):
        task.require_packages()
    readable = [task.without_unseen_label(record) for record in records]
    unseen = sum(found is not record for found, record in zip(readable, records, strict=True))
    names = {name for record in records for name in task.label_names(record)} if unseen else set()
    if names and names.isdisjoint(task.labels) and jax.process_index() == 0:
        report(f"No row has a class of the model: it knows {', '.join(task.labels[:5])}, and the rows have "
               f"{', '.join(sorted(names)[:5])}.")
    if unseen:
        source = LabelledSource(source.tokenizer, {"held_out": readable}, data.buckets)
    source.examples("held_out", task, data.length)
    for line in filter(None, [source.unknown, *task.gold_remarks(records)]):
        if jax.process_index() == 0:
            report(line)
    answers = task.answers(params, source, data.length, batch_size)
    return AnsweredRows(task, records, golds, answers, unseen, skipped)


def rounded(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics for a `Result`."""
    return {name: round(float(value), 6) for name, value in metrics.items()}


def write_predictions(path: str | Path | None, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line if there is a path, on process 0; raise UserError on all if that fails."""
    def write() -> None:
        try:
            with new_file(Path(path)) as out:
                out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); choose another --predictions.") from error

    if path:
        main_first(write, "write the predictions", everywhere=False)
