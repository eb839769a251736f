#!/usr/bin/env python3
"""Makes an encoder of a decoder and prints its held-out loss beside encoders that begin from random weights.

    .venv/bin/python launch/tables/decoder_to_encoder.py "$JAXLM_DATA/pretrain/wiki_en.jsonl.xz" \
        [--out runs/direction] [--steps 1000] [--more 200]

`llama_tiny` learns the next token for `--steps` steps and then, as a EuroBERT, masks for `--more` steps, each predicted
at its own position or at the one before it. EuroBERTs of its sizes and its vocabulary learn masks for `--more` and for
all of the steps; rows of the first half of these have 16 tokens, as in `eurobert_tiny`. A step reads 4,096 tokens, and
all held-out losses are of the same masks. A run that is there already is resumed or found finished.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tiny_runs import STORE, pretrain

from jaxlm.training.metrics import last_evaluation

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MASKS = ("--objective.mask-rate", "0.3", "--optimizer.schedule", "cosine", "--optimizer.final-share", "0.1",
         "--train.eval-batches", "12")
SIZES = ("--objective.model.intermediate-size", "352", "--objective.model.tied-head", "True",
         "--objective.model.rope-theta", "10000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--out", type=Path, default=Path("runs/direction"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--more", type=int, default=200)
    o = parser.parse_args()
    decoder, masked = o.out / "decoder", CONFIGS / "eurobert_tiny.py"
    pretrain(CONFIGS / "llama_tiny.py", o.source, decoder, "--train.steps", str(o.steps))
    goes_on = ("--init-from", str(decoder), "--optimizer.learning-rate", "1e-3")
    fresh = ("--data.tokenizer", str(decoder / "tokenizer"), *SIZES)
    runs = {
        "encoder": (o.steps, o.more, goes_on), "fresh": (0, o.steps + o.more, fresh),
        "encoder-next": (o.steps, o.more, (*goes_on, "--objective.predicts-next", "True")),
        "fresh-short": (0, o.more, fresh),
    }
    print("| run | steps of the next token | steps of masks | held-out mlm_loss | mlm_accuracy | minutes |")
    print("|---|---|---|---|---|---|")
    for name, (before, steps, flags) in runs.items():
        short = f"{steps // 2}x16," * (not before) + str(steps if before else steps - steps // 2)
        seconds = pretrain(masked, o.source, o.out / name, *MASKS, "--train.steps", str(steps), "--train.phases", short,
                           "--optimizer.warmup-steps", str(steps // 20), *flags, store=STORE[2:])
        found = last_evaluation(o.out / name)[1]
        print(f"| {name} | {before:,} | {steps:,} | {found['mlm_loss']:.3f} | {found['mlm_accuracy']:.3f} | "
              f"{seconds / 60:.1f} |", flush=True)


if __name__ == "__main__":
    main()
