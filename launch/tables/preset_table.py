#!/usr/bin/env python3
"""Prints the table of presets in configs/README.md as Markdown. Nothing is initialized: parameters are counted from
the shapes of `init`, with the vocabulary that the preset names.

    .venv/bin/python launch/tables/preset_table.py [PRESET …]
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import os
import re
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jaxlm.config.experiment import Experiment
from jaxlm.config.presets import load_preset
from jaxlm.tokenizers.vocabulary import Vocabulary

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def num_parameters(experiment: Experiment) -> int:
    """Trained parameters of a preset."""
    data = experiment.data
    size = getattr(data, "vocab_size", experiment.objective.model.vocab_size)
    vocabulary = Vocabulary.stand_in(size, experiment.objective.symbols)
    objective = experiment.objective.bind(vocabulary, data.length)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def result(name: str) -> str:
    """Return the result in a preset's docstring; a dash if there is none."""
    doc = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text(encoding="utf-8"))) or ""
    # Further lines of an entry are indented.
    found = re.search(r"^Result: +(?! |none)(.+(?:\n +.+)*)", doc, re.M)
    text = " ".join(found[1].split()) if found else "–"
    return text.removesuffix(" (configs/RESULTS.md)").removesuffix(" (launch/tables/STUDIES.md)")


def row(name: str) -> str:
    """Return one line of the table."""
    experiment = load_preset(str(CONFIGS / f"{name}.py"))
    objective, train, optimizer = experiment.objective, experiment.train, experiment.optimizer
    lengths = itertools.groupby(experiment.phases, lambda phase: phase.experiment.data.length)
    spans = [(length, next(phase.after for phase in phases)) for length, phases in lengths]
    ends = [*(after for _, after in spans[1:]), train.steps]
    parts = (f"{end - after:,} of {length:,}" for (length, after), end in zip(spans, ends, strict=True))
    phases = f": {', '.join(parts)}" if train.phases else ""
    mesh = "fsdp" if experiment.mesh.fsdp != 1 else "data"
    return (
        f"| `{name}` | {type(objective).__name__} on {type(objective.model).__name__} "
        f"| {num_parameters(experiment):,} | {experiment.data.length} × {train.batch_size} "
        f"| {optimizer.name}, {optimizer.schedule}, {optimizer.learning_rate:g} | {train.steps:,}{phases} | {mesh} "
        f"| {result(name)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help="names without .py; all by default")
    names = parser.parse_args().presets or [path.stem for path in CONFIGS.glob("*.py")]
    columns = ("preset", "objective on model", "parameters", "length × batch", "optimizer, schedule, peak", "steps",
               "mesh", "result")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in sorted(names):
        print(row(name))


if __name__ == "__main__":
    main()
