"""Rows of a training batch before and after corruption, as text."""

from __future__ import annotations

import sys

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from jaxlm.runs.session import Session
from jaxlm.training.feed import Stage, stage_after, stages_of
from jaxlm.training.program import corruption_key
from jaxlm.types import Params

STYLES = {
    "": "", "special": "dim", "padding": "dim", "masked": "bold white on red", "random": "bold black on yellow",
    "kept": "bold white on blue", "target": "bold green", "span": "bold white on magenta",
}
BRACKETS = {"masked": "«»", "random": "‹›", "kept": "{}", "target": "**", "span": "⟨⟩"}  # without colours
LEGEND = {"masked": "masked", "random": "replaced", "kept": "kept, predicted", "target": "predicted", "span": "span"}


def show(session: Session, step: int, examples: int, params: Params | None = None) -> None:
    """Print rows of a training batch and their examples.

    With the `params` of a task's run, its predictions are shown too.
    """
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())  # in a pipe rows stay on one line
    experiment, text, tokenizer = session.experiment, session.source, session.tokenizer
    stages = stages_of(text, experiment)
    stage = stage_after(stages, step)
    used: dict[str, None] = {}

    def show_batch(stage: Stage, step: int, examples: int) -> None:
        objective = stage.phase.experiment.objective
        batch = stage.batches.batch(step - stage.phase.after)
        example = jax.device_get(jax.jit(objective.corrupt)(corruption_key(experiment.train.seed, step), batch))
        real = float(np.mean(objective.real_tokens(example, batch)))
        rows = len(jax.tree.leaves(batch)[0])
        console.print(
            f"{type(objective).__name__}, batch of step {step + 1:,}: {rows} rows of at most "
            f"{stage.phase.experiment.data.length} tokens ({real:.1%} of this batch is not padding)"
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

    show_batch(stage, step, examples)
    if (last := stage.phase.last) is not None and last < experiment.train.steps:
        following = stages[stage.phase.number]
        console.print(f"\nBatches are {stage.phase} up to step {last:,}, then {following.phase}:\n")
        show_batch(following, last, 1)
    legend = (_marked(f" {LEGEND[mark]} ", mark, console) for mark in used if mark in LEGEND)
    console.print(Text("  ").join(legend))


def _marked(piece: str, mark: str, console: Console) -> Text:
    """Return the piece in its mark's colour, or in brackets outside of a terminal."""
    left, right = BRACKETS.get(mark, ("", ""))
    return Text(piece, STYLES.get(mark, "")) if console.is_terminal else Text(f"{left}{piece}{right}")
