"""Train a preset, or resume if the run folder has a checkpoint; then draw the run's curves.

jaxlm pretrain CONFIG [--run-dir DIR] [--init-from RUN_OR_HF_DIR] [--any.field VALUE …]
"""

from __future__ import annotations

from jaxlm.commands.common import (
    config_parser,
    parse_options,
    require_resumable,
    resolve_config,
    run_folder,
    update_curves,
)
from jaxlm.errors import Stopped


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = config_parser("jaxlm pretrain", __doc__)
    parser.add_argument("--run-dir", default=None, help="folder of the run; default runs/NAME_OF_PRESET")
    parser.add_argument("--init-from", default=None, metavar="RUN_OR_HF_DIR", help=(
        "begin from trained parameters: a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]"))
    options, flags = parse_options(parser, arguments)
    resolved = resolve_config(parser, options, flags)
    from jaxlm.runs.resolve import require_command

    require_command(resolved.experiment, "pretrain", options.config)
    run_dir = run_folder(options)
    require_resumable(options, run_dir)
    import jax

    from jaxlm.runs.pretrain import pretrain

    code = 0
    try:
        pretrain(resolved, run_dir)
    except Stopped as stopped:
        code = stopped.exit_code
    if jax.process_index() == 0:
        update_curves(run_dir, resolved.experiment.objective.token_losses)
    return code
