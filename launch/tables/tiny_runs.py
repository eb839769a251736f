#!/usr/bin/env python3
"""Trains fifteen tiny presets on one text and prints the table in configs/RESULTS.md of what each has learnt.

    .venv/bin/python launch/tables/tiny_runs.py "$JAXLM_DATA/pretrain/wiki_en.jsonl.xz" [--out runs/tiny] [PRESET …]

"Before" is the held-out loss of the initial weights: a run of one step at a vanishing learning rate. All presets of one
kind of vocabulary use the same one and the same token store, so that their losses are of the same tokens (bert_tiny's
own vocabulary is made for less text); roberta_tiny's and reformer_tiny's are of bytes, those of elmo_tiny and
word2vec_tiny are of words. A run that is there already is resumed or found finished, so the script can be started
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from jaxlm.config.presets import load_config
from jaxlm.training.metrics import last_evaluation, read_metrics

PRESETS = ("bert_tiny", "roberta_tiny", "albert_tiny", "spanbert_tiny", "electra_tiny", "xlnet_tiny", "t5_tiny",
           "gpt1_tiny", "gpt2_tiny", "gpt3_tiny", "reformer_tiny", "elmo_tiny", "word2vec_tiny", "distilbert_tiny",
           "tinybert_tiny")
TAUGHT = ("distilbert_tiny", "tinybert_tiny")  # by a bert_mini, which is trained first
STORE = ("--data.vocab-size", "8192", "--data.held-out", "0.01")


def pretrain(preset: Path, source: str, run: Path, *flags: str, store: tuple[str, ...] = STORE) -> float:
    """Runs the preset and returns the seconds that it took, whatever was done before included."""
    start = time.monotonic()
    command = [sys.executable, "-m", "jaxlm.cli", "pretrain", str(preset), "--run-dir", str(run)]
    subprocess.run([*command, "--data.source", source, *store, *flags], check=True, stdout=sys.stderr)
    seconds = run / "seconds.json"
    total = time.monotonic() - start + (json.loads(seconds.read_text()) if seconds.exists() else 0.0)
    seconds.write_text(json.dumps(total))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("presets", nargs="*", default=PRESETS)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"))
    options = parser.parse_intermixed_args()  # presets may follow --out
    configs = Path(__file__).resolve().parents[2] / "configs"
    print("| preset | steps | held-out loss before | after | other held-out figures | minutes | real tokens |")
    print("|---|---|---|---|---|---|---|")
    for name in options.presets:
        preset, run = configs / f"{name}.py", options.out / name
        flags = ["--data.vocab-size", "258"] if name == "reformer_tiny" else []
        if name in TAUGHT:
            flags = ["--objective.teacher", str(options.out / "bert_mini")]
            pretrain(configs / "bert_mini.py", options.source, options.out / "bert_mini")
        start = options.out / f"{name}-start"
        pretrain(preset, options.source, start, "--train.steps", "1", "--optimizer.learning-rate", "1e-12", *flags)
        seconds = pretrain(preset, options.source, run, *flags)
        experiment = load_config(run / "config.json")
        before, after = last_evaluation(start)[1], last_evaluation(run)[1]
        loss = experiment.objective.primary_metric
        others = [f"{key} {value:.3f}" for key, value in after.items() if key not in ("loss", loss)]
        real = [line["real_tokens"] for line in read_metrics(run) if "real_tokens" in line]
        print(
            f"| `{name}` | {experiment.train.steps:,} | {loss} {before[loss]:.3f} | {after[loss]:.3f} | "
            f"{', '.join(others)} | {seconds / 60:.1f} | {sum(real) / len(real):.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
