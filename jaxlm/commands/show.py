"""Print examples before and after corruption, as text.

jaxlm show CONFIG [--init-from RUN_OR_HF_DIR [--as-text]] [--examples N] [--step K] [--any.field VALUE …]

Examples of a task are printed as the model of --init-from reads them.
"""

from __future__ import annotations

from jaxlm.commands.common import config_parser, parse_options, resolve_config, task_options
from jaxlm.errors import UserError
from jaxlm.paths import any_path


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = config_parser("jaxlm show", __doc__)
    parser.add_argument("--examples", type=int, default=3, help="rows to show (3)")
    parser.add_argument("--step", type=int, default=0, help=(
        "number of steps before the batch: K shows the batch of step K + 1 of the log (0)"))
    task_options(parser)
    options, flags = parse_options(parser, arguments)
    for name, least in (("step", 0), ("examples", 1)):
        if not least <= (value := getattr(options, name)) < 2**31:
            raise UserError(f"--{name} is {value}; it must be at least {least}, and below 2,147,483,648.")
    resolved = resolve_config(parser, options, flags)
    from jaxlm.analysis.show import show
    from jaxlm.objectives.base import Objective
    from jaxlm.runs.folder import RunFolder
    from jaxlm.runs.load import load_model, load_run
    from jaxlm.runs.session import set_up

    kind = type(resolved.experiment.objective)
    if kind.describe is Objective.describe:
        raise UserError(f"{kind.__name__} has no `describe` method; add it to show examples.")
    session, params = set_up(resolved, load_model, RunFolder.read(any_path(options.config))).open_data(), None
    if session.objective.shows_predictions and session.run.newest_step:
        params = load_run(session.run.path).params
    show(session, options.step, options.examples, params)
