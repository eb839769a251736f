"""Train a task from a pretrained model, or resume if the run folder has a checkpoint, and evaluate it.

jaxlm finetune CONFIG --init-from RUN_OR_HF_DIR --data.source TRAIN [--data.dev DEV] [--any.field VALUE …]
jaxlm finetune CONFIG … --sweep optimizer.learning-rate=2e-5,3e-5,5e-5 [--test TEST]

--sweep trains one run for each value of a field and chooses the best on the held-out rows by --train.best-by, or by
the task's first metric; ties go to the first value.
--test then evaluates that run on rows which had no part in the choice.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.commands.common import (
    bootstrap_option,
    config_parser,
    output_option,
    parse_options,
    resolve_config,
    start_jax,
    task_options,
    update_curves,
)
from jaxlm.errors import Stopped, UserError
from jaxlm.paths import any_path, check_output, run_path

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
    choices: dict[str, Resolved] = {}
    pretrained = None
    for value in values:
        choices[value] = resolve_config(parser, options, [*flags, *([field, value] if field else [])], pretrained)
        pretrained = choices[value].pretrained  # loaded once
    config = any_path(options.config)
    run_dir = run_path(options.run_dir or (config if config.is_dir() else f"runs/{config.stem}"))
    start_jax()
    import jax

    from jaxlm.commands.evaluate import evaluate_run, print_result
    from jaxlm.runs.resolve import require_command

    trainings = {}
    for value, resolved in choices.items():
        require_command(resolved.experiment, "finetune", options.config)
        resolved.experiment.objective.require_packages()
        folder = run_dir / f"{field.rpartition('.')[2]}_{value}" if field else run_dir
        trainings[value] = seeds_of(resolved, folder, options)

    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            results = {value: mean_of([train_run(run, options) for run in runs]) for value, runs in trainings.items()}
        except Stopped as stopped:
            return stopped.exit_code
        result = results[values[0]]
        if field:
            folders = {value: str(runs[0].folder) for value, runs in trainings.items()}
            result = best_of(results, field, folders, choices[values[0]].experiment.train.best_by)
            if jax.process_index() == 0:
                print_sweep(result["sweep"], field)
                print(f"Chosen: {field} {result['chosen'][field.removeprefix('--')]}, {result['run']}")
        if options.test:
            run = result.get("run", str(trainings[values[0]][0].folder))
            result |= {"test": evaluate_run(run, ["--data.source", options.test], resamples=options.bootstrap)}
    if jax.process_index() > 0:
        return 0
    if options.json:
        print(json.dumps(result))
        return 0
    print_result(result)
    if "test" in result:
        print(f"On {options.test}:")
        print_result(result["test"])
    return 0


def parse_sweep(sweep: str | None) -> tuple[str, list[str]]:
    """Return the flag and the values of --sweep; "" and one value without it."""
    if sweep is None:
        return "", [""]
    name, _, listed = sweep.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not name or not all(values) or len(values) < 2 or len(set(values)) < len(values):
        raise UserError(f"--sweep {sweep} is not FIELD=V1,V2,… with two different values or more.")
    return f"--{name.removeprefix('--')}", values


def seeds_of(resolved: Resolved, folder: epath.Path, options: argparse.Namespace) -> list[Training]:
    """Return the trainings of a configuration: with its seed and, for --seeds, with the following ones."""
    count, train = options.seeds, resolved.experiment.train
    if count < 1:
        raise UserError(f"--seeds is {count}; it must be 1 or more.")
    if options.predictions and options.sweep:
        raise UserError("--predictions is for one run; leave it out and use `jaxlm evaluate` on the chosen run.")
    found, inputs = [], (resolved.experiment.data.source, getattr(resolved.experiment.data, "dev", ""))
    for seed in range(train.seed, train.seed + count):
        experiment = dataclasses.replace(resolved.experiment, train=dataclasses.replace(train, seed=seed))
        name = options.predictions
        if name and count > 1:
            name = str(Path(name).with_stem(f"{Path(name).stem}_seed_{seed}"))
        check_output(name, "--predictions", options.overwrite, inputs)
        run_dir = folder if count == 1 else folder / f"seed_{seed}"
        found.append(Training(resolved._replace(experiment=experiment), run_dir, name))
    return found


def train_run(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """Train a run, or finish it, and return its result on the held-out rows."""
    import jax

    from jaxlm.commands.evaluate import evaluate_run
    from jaxlm.runs.pretrain import pretrain

    figures = pretrain(training.resolved, training.folder)
    if jax.process_index() == 0:
        update_curves(training.folder)
    if not figures:
        print("Nothing is held out, so nothing is evaluated; give --data.dev FILE.")
        return {"task": training.resolved.experiment.objective.name, "metrics": {}, "examples": 0}
    resamples = options.bootstrap if options.seeds == 1 else 0
    return evaluate_run(training.folder, predictions=training.predictions, resamples=resamples)


def mean_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of one run, or the mean of each metric, and the standard deviations (n - 1) as `deviations`."""
    if len(results) == 1:
        return results[0]
    figures = {name: [result["metrics"][name] for result in results] for name in results[0]["metrics"]}
    shared = {name: value for name, value in results[0].items() if name not in ("classes", "confusion")}
    return shared | {
        "metrics": {name: statistics.fmean(values) for name, values in figures.items()},
        "deviations": {name: statistics.stdev(values) for name, values in figures.items()},
        "seeds": len(results),
    }


def best_of(
    results: dict[str, dict[str, Any]], field: str, folders: dict[str, str], best_by: str
) -> dict[str, Any]:
    """Return the best result, with the `sweep` of all values and the `run` that it chose.

    The best is that with the highest metric `best_by`, or first metric if `best_by` is none of the metrics.
    """
    names = list(next(iter(results.values()))["metrics"])
    metric = best_by if best_by in names else next(iter(names), None)
    if metric is None:
        raise UserError("--sweep chooses by the held-out rows, and there are none; give --data.dev FILE.")
    best = max(results, key=lambda value: results[value]["metrics"][metric])
    sweep = {value: result["metrics"] for value, result in results.items()}
    return results[best] | {"chosen": {field.removeprefix("--"): best}, "run": folders[best], "sweep": sweep}


def print_sweep(sweep: dict[str, dict[str, float]], field: str) -> None:
    """Print the metrics for each value of the field."""
    for value, metrics in sweep.items():
        print(f"{field} {value}: {'  '.join(f'{name} {figure:.4f}' for name, figure in metrics.items())}")
