"""Train a task from a pretrained model, or resume if the run folder has a checkpoint, and evaluate it.

jaxlm finetune CONFIG --init-from RUN_OR_HF_DIR --data.source TRAIN [--data.dev DEV] [--any.field VALUE …]
jaxlm finetune CONFIG … --sweep optimizer.learning-rate=2e-5,3e-5,5e-5 [--test TEST]

--sweep trains one run for each value of a field and chooses the best on the held-out rows by --train.best-by, or by
the task's first metric; ties go to the first value.
--test then evaluates that run on rows which had no part in the choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.commands.common import (
    bootstrap_option,
    config_parser,
    output_option,
    parse_options,
    resolve_config,
    run_folder,
    standard_output,
    start_jax,
    task_options,
    update_curves,
)
from jaxlm.errors import Stopped, UserError
from jaxlm.paths import any_path, check_output

if TYPE_CHECKING:
    from etils import epath

    from jaxlm.config.experiment import Resolved


class Training(NamedTuple):
    """One run to train."""

    resolved: Resolved
    folder: epath.Path
    predictions: str | None
    """File for the answers to the held-out rows."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = config_parser("jaxlm finetune", __doc__)
    parser.add_argument("--run-dir", default=None, help="folder of the run; default runs/NAME_OF_PRESET")
    task_options(parser)
    output_option(parser, "--predictions", "file for the answers to the held-out rows")
    bootstrap_option(parser)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train N times, in run folders of their own")
    parser.add_argument("--sweep", default=None, metavar="FIELD=V1,V2,…", help="train once for each value of a field")
    parser.add_argument("--test", default=None, metavar="FILE", help="rows for the final evaluation of the chosen run")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options, flags = parse_options(parser, arguments)
    field, values = parse_sweep(options.sweep)
    variants = [[*flags, f"--{field}", value] if field else flags for value in values]
    first = resolve_config(parser, options, variants[0])
    others = [resolve_config(parser, options, variant, first.pretrained) for variant in variants[1:]]  # loaded once
    trainings = {
        value: trainings_of(resolved, f"{field.rpartition('.')[2]}_{value}" if field else "", options)
        for value, resolved in zip(values, [first, *others], strict=True)
    }
    if field and not first.experiment.data.has_held_out:
        raise UserError("--sweep chooses by the held-out rows, and there are none; set --data.held-out or --data.dev.")
    shared = test_remark(options.test, first) if options.test else ""
    start_jax()
    import jax

    from jaxlm.commands.evaluate import evaluate_run, print_result

    with standard_output(options):
        try:
            results = {value: mean_of([train(each, options) for each in group]) for value, group in trainings.items()}
        except Stopped as stopped:
            return stopped.exit_code
        best = best_of(results, first.experiment.train.best_by) if field else ""
        result, folder = results[best], str(trainings[best][0].folder)
        if field:
            result |= {"chosen": {field: best}, "run": folder}
            result["sweep"] = {value: found["metrics"] for value, found in results.items()}
            if jax.process_index() == 0:
                for value, metrics in result["sweep"].items():
                    figures = "  ".join(f"{name} {figure:.4f}" for name, figure in metrics.items())
                    print(f"--{field} {value}: {figures}")
                print(f"Chosen: --{field} {best}, {folder}")
        if options.test:
            if shared and jax.process_index() == 0:
                print(shared)
            result["test"] = evaluate_run(folder, ["--data.source", options.test], resamples=options.bootstrap)
    if jax.process_index() > 0:
        return 0
    if options.json:
        print(json.dumps(result))
        return 0
    print_result(result)
    if options.test:
        print(f"On {options.test}:")
        print_result(result["test"])
    return 0


def test_remark(path: str, resolved: Resolved) -> str:
    """Return a remark about rows of --test that are trained on; raise UserError for a file that cannot be meant."""
    from jaxlm.data.labelled import good_rows, refuse_same_file, shared_rows

    if not path.startswith(("tfds:", "hf:")) and not any_path(path).exists():
        raise UserError(f"--test {path} does not exist; name a file of rows.")
    data = dataclasses.replace(resolved.experiment.data, skip_bad_rows=True)
    refuse_same_file("--test", path, data.source)
    return shared_rows(path, good_rows(data, path)[0], data.source, good_rows(data, data.source)[0])


def parse_sweep(sweep: str | None) -> tuple[str, list[str]]:
    """Return the field and the values of --sweep; "" and one value without it."""
    if sweep is None:
        return "", [""]
    name, _, listed = sweep.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not name or not all(values) or len(values) < 2 or len(set(values)) < len(values):
        raise UserError(f"--sweep {sweep} is not FIELD=V1,V2,… with two different values or more.")
    return name.removeprefix("--"), values


def trainings_of(resolved: Resolved, subfolder: str, options: argparse.Namespace) -> list[Training]:
    """Return the trainings of a configuration: with its seed and, for --seeds, with the following ones."""
    from jaxlm.runs.resolve import require_command

    experiment, count, name = resolved.experiment, options.seeds, options.predictions
    require_command(experiment, "finetune", options.config)
    experiment.objective.require_packages()
    if count < 1:
        raise UserError(f"--seeds is {count}; it must be 1 or more.")
    if name and options.sweep:
        raise UserError("--predictions is for one run; leave it out and use `jaxlm evaluate` on the chosen run.")
    found = []
    for seed in range(experiment.train.seed, experiment.train.seed + count):
        folder, file = run_folder(options) / subfolder, name
        if count > 1:
            folder, file = folder / f"seed_{seed}", name and str(Path(name).with_stem(f"{Path(name).stem}_seed_{seed}"))
        check_output(file, "--predictions", options.overwrite, (experiment.data.source, experiment.data.dev))
        train = dataclasses.replace(experiment.train, seed=seed)
        found.append(Training(resolved._replace(experiment=dataclasses.replace(experiment, train=train)), folder, file))
    return found


def train(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """Train a run, or finish it, and return its result on the held-out rows."""
    import jax

    from jaxlm.runs.finetune import finetune
    from jaxlm.tasks.evaluate import evaluate

    evaluation = finetune(training.resolved, training.folder)
    if jax.process_index() == 0:
        update_curves(training.folder)
    if evaluation is None:
        print("Nothing is held out, so nothing is evaluated; give --data.dev FILE.")
        return {"task": training.resolved.experiment.objective.name, "metrics": {}, "examples": 0}
    return evaluate(evaluation, training.predictions, options.bootstrap if options.seeds == 1 else 0)


def mean_of(results: list[dict[str, Any]]) -> dict[str, Any]:
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


def best_of(results: dict[str, dict[str, Any]], best_by: str) -> str:
    """Return the value with the highest metric `best_by`, or first metric if `best_by` is none of the metrics."""
    names = list(next(iter(results.values()))["metrics"])
    metric = best_by if best_by in names else next(iter(names), None)
    if metric is None:
        raise UserError("--sweep chooses by the held-out rows, and there are none; give --data.dev FILE.")
    return max(results, key=lambda value: results[value]["metrics"][metric])
