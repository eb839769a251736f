"""Time the train step on this machine: tokens per second, MFU and the share of the corruption.

jaxlm bench CONFIG [--peer huggingface] [--steps N | --generate N] [--phase N] [--json] [--any.field VALUE …]
jaxlm bench TASK --init-from RUN_OR_HF_DIR [--as-text] [--peer huggingface] [--any.field VALUE …]

The text is synthetic; if a flag names the data, such as --data.source, the vocabulary is the one that pretraining
would use. --peer huggingface also times the Transformers class of the same sizes under torch.compile, in alternating
rounds. --generate N times greedy generation of N tokens a row instead; its peer is Transformers' generate.
A task (with --init-from and --data.source) is timed on its rows; its peer is the Transformers Trainer.
"""

from __future__ import annotations

import json
import os

from jaxlm.commands.common import (
    config_parser,
    log_line,
    parse_options,
    phase_option,
    resolve_config,
    task_options,
)
from jaxlm.errors import UserError


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = config_parser("jaxlm bench", __doc__)
    parser.add_argument("--peer", choices=["huggingface"], default=None, help="implementation to compare with")
    parser.add_argument("--steps", type=int, default=None,
                        help="steps in each round; default: two seconds' worth, for a task 64")
    parser.add_argument("--generate", type=int, default=None, metavar="N", help="time the generation of N tokens a row")
    phase_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    task_options(parser)
    options, flags = parse_options(parser, arguments)
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps is {options.steps}; it must be at least 1.")
    if options.steps and options.generate is not None:
        raise UserError("--steps are those of training; leave it out beside --generate.")
    if options.peer:  # jax would otherwise reserve most of a GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    resolved = resolve_config(parser, options, flags)
    import jax

    from jaxlm.analysis import bench
    from jaxlm.analysis.step import open_stand_in
    from jaxlm.analysis.timing import readable
    from jaxlm.runs.load import constant_arrays, load_model
    from jaxlm.runs.resolve import require_command
    from jaxlm.runs.session import set_up

    has_peer = options.peer is not None
    if options.init_from:
        if option := next((name for name in ("generate", "phase") if getattr(options, name) is not None), None):
            raise UserError(f"--{option} is for pretrained models; leave it out beside --init-from.")
        require_command(resolved.experiment, "finetune", options.config)
        session = set_up(resolved, load_model, report=log_line, constants_of=constant_arrays).open_data(log_line)
        found = bench.bench_fine_tuning(session, has_peer, options.steps, log_line)
    else:
        session = open_stand_in(resolved.experiment, options.config, constant_arrays, log_line, options.phase)
        if options.generate is not None:
            found = bench.bench_generation(session, options.generate, has_peer, log_line)
        else:
            found = bench.bench_pretraining(session, has_peer, options.steps, log_line)
    if jax.process_index() == 0:
        print(json.dumps(found) if options.json else readable(found))
    return 0
