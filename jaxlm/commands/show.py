"""jaxlm show CONFIG [--examples N] [--step K] [--any.field VALUE …]: examples before and after corruption, as text"""

from __future__ import annotations

from pathlib import Path

from jaxlm.commands.common import config_parser, read_config, start_jax
from jaxlm.errors import UserError


def main(arguments: list[str]) -> int:
    parser = config_parser("jaxlm show", __doc__)
    parser.add_argument("--examples", type=int, default=3, help="rows to show (3)")
    parser.add_argument("--step", type=int, default=0, help="the training step whose batch is shown (0)")
    options, experiment = read_config(parser, arguments)
    if options.step < 0:
        raise UserError(f"--step is {options.step}; it must be at least 0.")
    experiment.validate()
    start_jax()
    from jaxlm.analysis.show import show

    show(experiment, Path(options.config), options.step, options.examples)
    return 0
