"""Train a task from a pretrained model, or resume if the run folder has a checkpoint, and evaluate it.

jaxlm finetune CONFIG --init-from RUN_OR_HF_DIR --data.source TRAIN [--data.dev DEV] [--any.field VALUE …]
jaxlm finetune CONFIG … --sweep optimizer.learning-rate=2e-5,3e-5,5e-5 [--test TEST]

--sweep trains one run for each value of a field and chooses the best on the held-out rows by the metric of
--train.best-by, or the task's first one; ties go to the first value; a value whose loss diverges
is left out.
--test then evaluates that run on rows which had no part in the choice.
"""

from __future__ import annotations

import json

from jaxlm.commands.common import (
    bootstrap_option,
    config_parser,
    output_option,
    parse_options,
    require_resumable,
    resolve_config,
    run_folder,
    standard_output,
    task_options,
    update_curves,
)
from jaxlm.commands.evaluate import print_result
from jaxlm.errors import Stopped, UserError


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
    others = [resolve_config(parser, options, each, first.pretrained, start=False) for each in variants[1:]]
    from jaxlm.parallel.hosts import check_main_output
    from jaxlm.runs.resolve import require_command
    from jaxlm.runs.sweep import fine_tune_all, seeds_of, test_remark

    if options.predictions and field:
        raise UserError("--predictions is for one run; leave it out and use `jaxlm evaluate` on the chosen run.")
    if options.bootstrap and options.seeds > 1 and not options.test:
        raise UserError("--bootstrap is for one run or for --test; with --seeds there are deviations instead.")
    trainings = {}
    for value, resolved in zip(values, [first, *others], strict=True):
        require_command(resolved.experiment, "finetune", options.config)
        resolved.experiment.objective.require_packages()
        folder = run_folder(options) / (f"{field.rpartition('.')[2]}_{value}" if field else "")
        trainings[value] = seeds_of(resolved, folder, options.seeds, options.predictions)
        for training in trainings[value]:
            require_resumable(options, training.folder)
            data = resolved.experiment.data
            check_main_output(training.predictions, "--predictions", options.overwrite, (data.source, data.dev))
    if field and not first.experiment.data.has_held_out:
        raise UserError("--sweep chooses by the held-out rows, and there are none; set --data.held-out or --data.dev.")
    remark = test_remark(options.test, first) if options.test else ""
    import jax

    is_main = jax.process_index() == 0
    with standard_output(options):
        report = print if is_main else lambda _: None
        try:
            result = fine_tune_all(trainings, field, options.bootstrap, options.test, remark, update_curves, report)
        except Stopped as stopped:
            return stopped.exit_code
    if is_main and options.json:
        print(json.dumps(result))
    elif is_main:
        print_result(result)
        if options.test:
            print(f"On {options.test}:")
            print_result(result["test"])
    return 0


def parse_sweep(sweep: str | None) -> tuple[str, list[str]]:
    """Return the field and the values of --sweep; "" and one value without it."""
    if sweep is None:
        return "", [""]
    name, _, listed = sweep.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not name or not all(values) or len(values) < 2 or len(set(values)) < len(values):
        raise UserError(f"--sweep {sweep} is not FIELD=V1,V2,… with two different values or more.")
    return name.removeprefix("--"), values
