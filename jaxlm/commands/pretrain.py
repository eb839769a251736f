"""jaxlm pretrain CONFIG [--run-dir DIR] [--any.field VALUE …]"""

from __future__ import annotations

from pathlib import Path

from jaxlm.commands.common import Parser, start_jax


def main(arguments: list[str]) -> int:
    parser = Parser("jaxlm pretrain", description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("config", help="a preset (configs/bert_tiny.py) or an existing run folder")
    parser.add_argument("--run-dir", default=None, help="folder of the run; default runs/NAME_OF_PRESET")
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        print("\nEvery field of the configuration is a flag: jaxlm pretrain CONFIG --help lists them.")
        return 0
    options, rest = parser.parse_known_args(arguments)

    from jaxlm.config.flags import override
    from jaxlm.config.presets import load_preset

    experiment = override(load_preset(options.config), rest, f"jaxlm pretrain {options.config}")
    start_jax()
    from jaxlm.training.loop import pretrain

    is_run = Path(options.config).is_dir()
    run_dir = options.run_dir or (options.config if is_run else Path("runs") / Path(options.config).stem)
    pretrain(experiment, run_dir)
    return 0
