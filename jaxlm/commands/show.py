"""jaxlm show CONFIG: examples before and after corruption, as text"""

from __future__ import annotations

from pathlib import Path

from jaxlm.commands.common import Parser, start_jax
from jaxlm.errors import UserError

STYLES = {
    "": "", "special": "dim", "padding": "dim", "masked": "bold white on red", "random": "bold black on yellow",
    "kept": "bold white on blue", "target": "bold green", "span": "bold white on magenta",
}
BRACKETS = {"masked": "«»", "random": "‹›", "kept": "{}", "target": "«»", "span": "«»"}  # on paper, for colours
LEGEND = {"masked": "masked", "random": "replaced", "kept": "kept but asked", "target": "asked", "span": "span"}


def main(arguments: list[str]) -> int:
    parser = Parser("jaxlm show", description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("config", help="a preset or a run folder")
    parser.add_argument("--examples", type=int, default=3, help="rows to show (3)")
    parser.add_argument("--step", type=int, default=0, help="the training step whose batch is shown (0)")
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(arguments)
    if options.step < 0:
        raise UserError(f"--step is {options.step}; it must be at least 0.")

    from jaxlm.config.experiment import load_preset
    from jaxlm.config.flags import override

    experiment = override(load_preset(options.config), rest, f"jaxlm show {options.config}")
    experiment.validate()
    start_jax()
    import jax
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from jaxlm.runs import folder as run_folder
    from jaxlm.training.feed import stage_after, stages_of
    from jaxlm.training.step import corruption_key

    # A run has a tokenizer of its own, and may have an imported model; at a preset's path there is neither.
    folder = Path(options.config)
    data = run_folder.data_of(folder, experiment.data)
    tokenizer = data.prepare_tokenizer(print)
    objective = run_folder.bind(folder, experiment, tokenizer.vocabulary)
    stage = stage_after(stages_of(experiment, data.open(tokenizer, print), objective), options.step)
    batch = stage.batches.batch(options.step - stage.first)
    example = jax.device_get(jax.jit(objective.corrupt)(corruption_key(experiment.train.seed, options.step), batch))
    real = float(np.mean(np.asarray(batch.segment_ids) > 0))

    console = Console(highlight=False)
    console.print(
        f"{type(objective).__name__}, step {options.step}: rows of {batch.tokens.shape[1]} tokens of text "
        f"({real:.1%} real in this batch) become"
    )
    for name, value in example.items():
        console.print(f"  {name} {value.dtype}{list(value.shape)}")
    used: dict[str, None] = {}
    for row in range(min(options.examples, batch.tokens.shape[0])):
        console.print(f"\nrow {row}", style="bold")
        for line in objective.describe(batch, example, row):
            text = Text(f"{line.title:>12}  ", style="cyan")
            for piece, mark in zip(tokenizer.pieces(line.ids), line.marks, strict=True):
                used[mark] = None
                text.append(piece if console.is_terminal else bracketed(piece, mark), STYLES.get(mark, ""))
                text.append(" ")
            console.print(text)
    legend = Text("\n")
    for mark in used:
        if mark in LEGEND:
            said = LEGEND[mark] if console.is_terminal else bracketed(LEGEND[mark], mark)
            legend.append(f" {said} ", STYLES[mark])
            legend.append("  ")
    console.print(legend)
    return 0


def bracketed(piece: str, mark: str) -> str:
    """The piece as it stands on paper, where there is no colour."""
    left, right = BRACKETS.get(mark, ("", ""))
    return f"{left}{piece}{right}"
