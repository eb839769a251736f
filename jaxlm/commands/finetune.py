"""Train a task from a pretrained model, or resume if the run folder has a checkpoint, and evaluate it.

jaxlm finetune CONFIG --init-from RUN_OR_HF_DIR --data.source TRAIN [--data.dev DEV] [--any.field VALUE …]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.commands.common import (
    config_parser,
    output_option,
    parse_options,
    resolve_config,
    start_jax,
    task_options,
    update_curves,
)
from jaxlm.errors import Stopped, UserError
from jaxlm.paths import check_output

if TYPE_CHECKING:
    from jaxlm.config.experiment import Experiment


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = config_parser("jaxlm finetune", __doc__)
    parser.add_argument("--run-dir", default=None, help="folder of the run; default runs/NAME_OF_PRESET")
    task_options(parser)
    output_option(parser, "--predictions", "file for the answers to the held-out rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train N times, in run folders of their own")
    options, flags = parse_options(parser, arguments)
    resolved = resolve_config(parser, options, flags)
    experiment, config = resolved.experiment, Path(options.config)
    run_dir = Path(options.run_dir or (config if config.is_dir() else Path("runs") / config.stem))
    start_jax()
    import jax

    from jaxlm.commands.evaluate import evaluate_run, print_result
    from jaxlm.runs.pretrain import pretrain
    from jaxlm.tasks.resolve import require_task, with_rows

    require_task(experiment)
    experiment.objective.require_packages()
    runs = seeds_of(experiment, run_dir, options.seeds)
    inputs = experiment.data.source, getattr(experiment.data, "dev", "")
    for seed, _ in runs:
        check_output(predictions_of(seed, options), "--predictions", options.overwrite, inputs)

    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        results = []
        for seed, folder in runs:
            train = dataclasses.replace(experiment.train, seed=seed)
            seeded = resolved._replace(experiment=dataclasses.replace(experiment, train=train))
            try:
                figures = pretrain(with_rows(seeded, folder), folder)
            except Stopped as stopped:
                return stopped.exit_code
            if jax.process_index() == 0:
                update_curves(folder)
            if not figures:
                print("Nothing is held out, so nothing is evaluated; give --data.dev FILE.")
                results.append({"task": experiment.objective.name, "metrics": {}, "examples": 0})
                continue
            results.append(evaluate_run(folder, predictions=predictions_of(seed, options)))
    result = results[0] if len(results) == 1 else mean_of(results)
    if jax.process_index() > 0:
        return 0
    print(json.dumps(result)) if options.json else print_result(result)
    return 0


def seeds_of(experiment: Experiment, run_dir: Path, count: int) -> list[tuple[int, Path]]:
    """Return the seed and run folder of each training: the configuration's seed and the following ones."""
    if count < 1:
        raise UserError(f"--seeds is {count}; it must be 1 or more.")
    first = experiment.train.seed
    return [(first, run_dir)] if count == 1 else [(s, run_dir / f"seed_{s}") for s in range(first, first + count)]


def predictions_of(seed: int, options: argparse.Namespace) -> str | None:
    """Return the file for the answers of one training."""
    name = options.predictions
    return str(Path(name).with_stem(f"{Path(name).stem}_seed_{seed}")) if name and options.seeds > 1 else name


def mean_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each metric, and the standard deviations (n - 1) as `deviations`."""
    figures = {name: [result["metrics"][name] for result in results] for name in results[0]["metrics"]}
    shared = {name: value for name, value in results[0].items() if name not in ("classes", "confusion")}
    return shared | {
        "metrics": {name: statistics.fmean(values) for name, values in figures.items()},
        "deviations": {name: statistics.stdev(values) for name, values in figures.items()},
        "seeds": len(results),
    }
