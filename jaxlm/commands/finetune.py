"""jaxlm finetune CONFIG --init-from RUN_OR_HF_DIR --data.source TRAIN [--data.dev DEV] [--any.field VALUE …]

Trains a task from a pretrained model, or resumes if the run folder has a checkpoint, and evaluates it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from jaxlm.commands.common import config_parser, read_config, start_jax


def main(arguments: list[str]) -> int:
    parser = config_parser("jaxlm finetune", __doc__)
    parser.add_argument("--run-dir", default=None, help="folder of the run; default runs/NAME_OF_PRESET")
    parser.add_argument("--init-from", default=None, metavar="RUN_OR_HF_DIR", help="the pretrained model")
    parser.add_argument("--predictions", default=None, help="file for the answers to the held-out rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--as-text", action="store_true", help="let a decoder write the answer (T5 always does)")
    options, experiment = read_config(parser, arguments)
    config = Path(options.config)
    run_dir = Path(options.run_dir or (config if config.is_dir() else Path("runs") / config.stem))
    start_jax()
    from jaxlm.commands.evaluate import evaluate_run, print_result
    from jaxlm.tasks.finetune import finetune, written

    if options.as_text:
        experiment = dataclasses.replace(experiment, objective=written(experiment.objective))
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        finetune(experiment, run_dir, options.init_from)
        result = evaluate_run(run_dir, predictions=options.predictions)
    print(json.dumps(result)) if options.json else print_result(result)
    return 0
