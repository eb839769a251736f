"""Fine-tuning of a task: one run, or those of several values of a field and of several seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from etils import epath

from jaxlm.config.experiment import Resolved
from jaxlm.data.labelled import good_rows, refuse_same_file, shared_rows
from jaxlm.errors import Stopped, UserError
from jaxlm.parallel.hosts import main_first
from jaxlm.paths import any_path
from jaxlm.runs.folder import write_metadata
from jaxlm.runs.load import load_run
from jaxlm.runs.pretrain import pretrain
from jaxlm.runs.resolve import open_evaluation
from jaxlm.tasks.evaluate import Evaluation, Result, evaluate
from jaxlm.training.loop import NotFinite
from jaxlm.training.metrics import best_step
from jaxlm.types import Report


class Training(NamedTuple):
    """One run to train."""

    resolved: Resolved
    folder: epath.Path
    predictions: str | None
    """File for the answers to the held-out rows."""


def seeds_of(resolved: Resolved, folder: epath.Path, count: int, predictions: str | None) -> list[Training]:
    """Return the trainings of a configuration with its seed and the following ones, in folders of their own."""
    if count < 1:
        raise UserError(f"--seeds is {count}; it must be 1 or more.")
    experiment, found = resolved.experiment, []
    for seed in range(experiment.train.seed, experiment.train.seed + count):
        own, file = folder, predictions
        if count > 1:
            own = folder / f"seed_{seed}"
            file = file and str(Path(file).with_stem(f"{Path(file).stem}_seed_{seed}"))
        train = dataclasses.replace(experiment.train, seed=seed)
        found.append(Training(resolved._replace(experiment=dataclasses.replace(experiment, train=train)), own, file))
    return found


def fine_tune_all(
    groups: Mapping[str, Sequence[Training]], field: str, resamples: int, test: str | None, remark: str,
    finished: Callable[[epath.Path], None], report: Report,
) -> Result:
    """Train every run, or finish it, and return the result of the best group on the held-out rows.

    Args:
        groups: Trainings by the value of a field; those of a group have different seeds, and a mean result.
        field: Name of the field; "" for a single group.
        resamples: Number of resamples for the confidence intervals of a single run.
        test: File of rows on which the first run of the best group is then evaluated.
        remark: A remark about these rows.
        finished: Called with the folder of every finished run, on process 0.
        report: Receives lines about the choice, and about values left out because their loss diverges.
    """
    results = {}
    for value, group in groups.items():
        try:
            count = resamples if len(group) == 1 else 0
            results[value] = _mean_of([_train(each, count, finished) for each in group])
        except NotFinite as error:
            if not results and value == [*groups][-1]:
                raise
            report(f"--{field} {value} is left out: {error}")
    best_by = next(iter(groups.values()))[0].resolved.experiment.train.best_by
    best, metric = _best_of(results, best_by) if field else (next(iter(groups)), "")
    result, folder = results[best], str(groups[best][0].folder)
    if field:
        result |= {"chosen": {field: best}, "run": folder}
        result["sweep"] = {value: found["metrics"] for value, found in results.items()}
        for value, metrics in result["sweep"].items():
            report(f"--{field} {value}: {'  '.join(f'{name} {figure:.4f}' for name, figure in metrics.items())}")
        note = f" (--train.best-by {best_by} is no metric of the task)" if best_by not in ("", metric) else ""
        report(f"Chosen by {metric}{note}: --{field} {best}, {folder}")
    if test:
        if remark:
            report(remark)
        result["test"] = evaluate(open_evaluation(folder, ["--data.source", test]), None, resamples)
    return result


def finetune(resolved: Resolved, run_dir: epath.Path) -> Evaluation | None:
    """Train a task, or finish its run, and return its evaluation; None if no rows are held out.

    The parameters are those that `load_run` would read: the trained ones from memory, or those of the best checkpoint
    (see `TrainConfig.uses_best`).

    Raises:
        UserError, Stopped: as `pretrain`.
    """
    session, _, state, _, metadata, signal = pretrain(resolved, run_dir)
    if signal:
        raise Stopped(signal)
    if not session.source.records["held_out"]:
        return None
    t = session.kept.train
    main_first(lambda: None, "close the metrics", everywhere=False)  # all choose the best step by them
    best = load_run(session.run.path, {}) if t.uses_best else None
    params, step = (best.params, best.step) if best else (state.eval_params, int(state.step))
    # The attention kernel was chosen for training.
    task = dataclasses.replace(session.objective, model=session.objective.model.with_execution(attention="auto"))
    evaluation = Evaluation(task, params, session.source, session.experiment.data, t.batch_size)
    chosen = task.choose(params, session.source, session.experiment.data.length, t.batch_size)
    if chosen and jax.process_index() == 0:
        write_metadata(session.run.path, metadata | {"chosen": chosen | {"step": step}})
        shown = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        print(f"Chosen on the {len(session.source.records['held_out']):,} held-out rows: {shown}")
    return evaluation._replace(task=dataclasses.replace(task, **chosen))


def _train(training: Training, resamples: int, finished: Callable[[epath.Path], None]) -> Result:
    evaluation = finetune(training.resolved, training.folder)
    if is_main := jax.process_index() == 0:
        finished(training.folder)
    if evaluation is None:
        if is_main:
            print("Nothing is held out, so nothing is evaluated; give --data.dev FILE.")
        return {"task": training.resolved.experiment.objective.name, "metrics": {}, "examples": 0}
    return evaluate(evaluation, training.predictions, resamples)


def _mean_of(results: Sequence[Result]) -> Result:
    """Return the result of one run, or the mean of each metric, and the standard deviations (n - 1) as `deviations`."""
    if len(results) == 1:
        return results[0]
    figures = {name: [result["metrics"][name] for result in results] for name in results[0]["metrics"]}
    shared = {name: value for name, value in results[0].items() if name not in ("classes", "confusion", "threshold")}
    return shared | {
        "metrics": {name: statistics.fmean(values) for name, values in figures.items()},
        "deviations": {name: statistics.stdev(values) for name, values in figures.items()},
        "seeds": len(results),
    }


def _best_of(results: Mapping[str, Result], best_by: str) -> tuple[str, str]:
    """Return the value with the best metric `best_by`, or first metric if `best_by` is none, and that metric."""
    names = list(next(iter(results.values()))["metrics"])
    metric = best_by if best_by in names else next(iter(names), None)
    if metric is None:
        raise UserError("--sweep chooses by the held-out rows, and there are none; give --data.dev FILE.")
    values = [*results]
    return values[best_step({i: results[value]["metrics"][metric] for i, value in enumerate(values)}, metric)], metric


def test_remark(path: str, resolved: Resolved) -> str:
    """Return a remark about rows of --test that have another use; raise UserError for a file that cannot be meant."""
    if not path.startswith(("tfds:", "hf:")) and not any_path(path).exists():
        raise UserError(f"--test {path} does not exist; name a file of rows.")
    data = dataclasses.replace(resolved.experiment.data, skip_bad_rows=True)
    rows, remarks = good_rows(resolved.experiment.data, path)[0], []
    for flag, other, use in (("source", data.source, "is trained on"), ("dev", data.dev, "is for choices")):
        refuse_same_file("--test", path, other, f"--data.{flag}", use)
        remarks.append(shared_rows(path, rows, other, good_rows(data, other)[0], use))
    return "; ".join(filter(None, remarks))
