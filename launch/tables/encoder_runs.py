#!/usr/bin/env python3
"""Trains encoders with equal FLOPs on one text and prints their held-out losses at the same masks.

    .venv/bin/python launch/tables/encoder_runs.py TEXT [--flops 1e13] [--seeds 3] [--out runs/encoders] [PRESET …]

Each preset keeps the shares of its phases; only their steps are scaled. All have one vocabulary and one token store.
The loss is that of 15 % of the tokens of single documents, each replaced by [MASK]; rows and masks are the same for
all. For tags and pairs, give the runs to task_runs.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import jax

import jaxlm
from jaxlm.config.experiment import Experiment
from jaxlm.config.presets import load_config, load_preset
from jaxlm.tokenizers.vocabulary import Vocabulary

PRESETS = ("modernbert_tiny", "eurobert_tiny", "clm_then_mlm_tiny", "bert_mini")
SIZE, BATCHES = 8192, 32
STORE = ("--data.tokenizer-kind", "unigram", "--data.vocab-size", str(SIZE), "--data.held-out", "0.01")


def scaled(name: str, flops: float) -> tuple[Experiment, float]:
    """Return a preset and the factor on its steps with which it takes `flops`."""
    experiment = load_preset(name)
    bound = experiment.objective.bind(Vocabulary.stand_in(SIZE, experiment.symbols), experiment.data.length)
    experiment = dataclasses.replace(experiment, objective=bound)
    total = sum(
        ((phase.last or experiment.train.steps) - phase.after) * phase.experiment.objective.step_flops(
            phase.experiment.data.length, phase.experiment.train.batch_size)
        for phase in experiment.phases
    )
    return experiment, flops / total


def flags(name: str, flops: float, folder: Path) -> list[str]:
    """Return a preset of its own, with scaled phases, and the flags of the other steps."""
    experiment, factor = scaled(name, flops)
    counts = [max(1, round(phase.steps * factor)) for phase in experiment.train.phases]
    steps = sum(counts) or round(experiment.train.steps * factor)
    warmup = max(1, round((experiment.optimizer.warmup_steps or 0) * factor))
    preset = folder / f"{name}.py"
    preset.write_text(
        "import dataclasses\nfrom jaxlm.config.presets import load_preset\n"
        f"experiment = load_preset({name!r})\n"
        f"phases = tuple(dataclasses.replace(p, steps=n) for p, n in zip(experiment.train.phases, {counts}))\n"
        "experiment = dataclasses.replace(experiment, train=dataclasses.replace("
        f"experiment.train, steps={steps}, phases=phases))\n"
    )
    return [str(preset), "--optimizer.warmup-steps", str(warmup), "--train.eval-every", "0", *STORE]


def masked_loss(run: Path) -> float:
    """Return the held-out loss at the masks that all models have."""
    model, data = jaxlm.load(run), load_config(run / "config.json").data
    objective = dataclasses.replace(
        model.objective, mask_rate=0.15, mask_share=1.0, random_share=0.0, input_format="document", short_rate=0.0,
        whole_word=False,
    )
    rows = data.open(model.tokenizer).batches("held_out", 32, objective.row_format(data.length), 0)

    @jax.jit
    def step(params, batch, key):
        return objective.loss(params, objective.corrupt(key, batch), key, False)["mlm_loss"]

    terms = [step(model.params, batch, jax.random.key(n)) for n, batch in enumerate(rows.evaluation(32, BATCHES))]
    return float(sum(term.total for term in terms) / sum(term.weight for term in terms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("presets", nargs="*", default=PRESETS)
    parser.add_argument("--flops", type=float, default=1e13)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/encoders"))
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| preset | parameters | steps | held-out loss of masks |\n|---|---|---|---|")
    for name in options.presets:
        losses, words = [], flags(name, options.flops, options.out)
        for seed in range(options.seeds):
            run = options.out / f"{name}-{seed}"
            command = [sys.executable, "-m", "jaxlm.cli", "pretrain", *words, "--run-dir", str(run)]
            subprocess.run([*command, "--data.source", options.source, "--train.seed", str(seed)], check=True,
                           stdout=sys.stderr)
            losses.append(masked_loss(run))
        size = sum(leaf.size for leaf in jax.tree.leaves(jaxlm.load(run).params))
        steps = load_config(run / "config.json").train.steps
        print(f"| `{name}` | {size:,} | {steps:,} | {', '.join(f'{loss:.3f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main()
