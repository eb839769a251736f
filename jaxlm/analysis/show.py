"""Rows of a training batch before and after corruption, as text."""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np
from etils import epath
from rich.console import Console
from rich.text import Text

from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError
from jaxlm.objectives.base import Describes
from jaxlm.runs.folder import RunFolder
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.feed import Stage, stage_after, stages_of
from jaxlm.training.program import corruption_key
from jaxlm.types import Params, Report

STYLES = {
    "": "", "special": "dim", "padding": "dim", "masked": "bold white on red", "random": "bold black on yellow",
    "kept": "bold white on blue", "target": "bold green", "span": "bold white on magenta",
}
BRACKETS = {"masked": "«»", "random": "‹›", "kept": "{}", "target": "**", "span": "⟨⟩"}  # without colours
LEGEND = {"masked": "masked", "random": "replaced", "kept": "kept, predicted", "target": "predicted", "span": "span"}


def show(
    experiment: Experiment, folder: epath.Path, step: int, examples: int, report: Report = print,
    tokenizer: Tokenizer | None = None, params: Params | None = None,
) -> None:
    """Print rows of a training batch and their examples.

    Args:
        experiment: The preset or run.
        folder: Run folder whose tokenizer is used if it exists.
        step: Training step, from 0.
        examples: Number of rows.
        report: Receives progress messages.
        tokenizer: Tokenizer of a pretrained model, whose embedding keeps its number of rows; used instead.
        params: Parameters of a task's run, whose predictions are shown, too.
    """
    if not isinstance(experiment.objective, Describes):
        raise UserError(f"{type(experiment.objective).__name__} has no `describe` method; add it to show examples.")
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())  # in a pipe rows stay on one line
    run, data = RunFolder.read(folder), experiment.data
    if run.tokenizer_folder:
        data = dataclasses.replace(data, tokenizer=str(run.tokenizer_folder))
    symbols, preserve_rows = experiment.objective.symbols, run.is_imported or tokenizer is not None
    tokenizer = tokenizer.with_symbols(symbols) if tokenizer else data.prepare_tokenizer(report, symbols)
    text = data.open(tokenizer, report)
    vocabulary = dataclasses.replace(tokenizer.vocabulary, preserve_rows=preserve_rows)
    objective = experiment.objective.bind(vocabulary, data.length, text.statistics)
    stages = stages_of(text, objective, experiment.train, experiment.data.length)
    first = stage_after(stages, step)
    used: dict[str, None] = {}

    def show_batch(stage: Stage, step: int, examples: int) -> None:
        batch = stage.batches.batch(step - stage.first)
        example = jax.device_get(jax.jit(objective.corrupt)(corruption_key(experiment.train.seed, step), batch))
        real = float(np.mean(objective.real_tokens(example, batch)))
        rows = len(jax.tree.leaves(batch)[0])
        console.print(
            f"{type(objective).__name__}, step {step}: {rows} rows of at most {stage.length} tokens ({real:.1%} of "
            "this batch is not padding)"
        )
        for name, value in example.items():
            console.print(f"  {name} {value.dtype}{list(value.shape)}", markup=False)
        if params is not None:
            example |= jax.device_get(jax.jit(objective.predict)(params, example))
        for row in range(min(examples, rows)):
            console.print(f"\nrow {row}", style="bold")
            for line in objective.describe(batch, example, row):
                shown = Text(f"{line.title:>12}  ", style="cyan")
                for piece, mark in zip(tokenizer.pieces(line.ids), line.marks, strict=True):
                    used[mark] = None
                    shown.append(_marked(piece, mark, console)).append(" ")
                console.print(shown)

    show_batch(first, step, examples)
    if first.last is not None and first.last < experiment.train.steps:
        following = stages[stages.index(first) + 1]
        console.print(
            f"\nThe first {first.last:,} steps read rows of {first.length} tokens; then rows have {following.length}:\n"
        )
        show_batch(following, first.last, 1)
    legend = (_marked(f" {LEGEND[mark]} ", mark, console) for mark in used if mark in LEGEND)
    console.print(Text("  ").join(legend))


def _marked(piece: str, mark: str, console: Console) -> Text:
    """Return the piece in its mark's colour, or in brackets outside of a terminal."""
    left, right = BRACKETS.get(mark, ("", ""))
    return Text(piece, STYLES.get(mark, "")) if console.is_terminal else Text(f"{left}{piece}{right}")
