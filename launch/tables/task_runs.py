"""Fine-tunes models on tasks, one after another, and prints a table of what they reach.

    .venv/bin/python launch/tables/task_runs.py FOLDER NAME=RUN_OR_HF_DIR [NAME=…] [--tasks sst2,mrpc] [--seeds 3]

FOLDER has the data sets in folders of their own, under the names in `FILES`. Every model has the same number of steps,
batches and rate, so that their figures can be compared; published figures come of many more steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = {
    "sst2": ("glue/SST-2/train.tsv.gz", ""),
    "cola": ("glue/CoLA/train.tsv.gz", ""),
    "mrpc": ("glue/MRPC/train.tsv.gz", ""),
    "stsb": ("glue/STS-B/train.tsv.gz", ""),
    "rte": ("glue/RTE/train.tsv.gz", ""),
    "qnli": ("glue/QNLI/dev-part-train.tsv.gz", ""),
    "nsmc": ("nsmc/train.tsv.gz", ""),
    "squad": ("squad/squad_v1.1.train-articles.json.gz", ""),
    "squad2": ("squad/squad_v2.0_cs224n.train-articles.json.gz", ""),
    "coqa": ("format_samples/coqa/coqa-train-v1.0.json", "format_samples/coqa/coqa-dev-v1.0.json"),
    "codah": ("codah/fold_0.train.tsv", "codah/fold_0.dev.tsv"),
    "commonsenseqa": ("commonsenseqa/train.jsonl.gz", ""),
    "swag": ("format_samples/swag/train.csv", "format_samples/swag/val.csv"),
    "cosmosqa": ("cosmosqa/valid-part-train.csv.gz", ""),
    "ud_pos": ("ud_ewt/en_ewt-ud-train.conllu.xz", "ud_ewt/en_ewt-ud-dev.conllu.xz"),
    "wnut17": ("wnut17/train.conll.gz", "wnut17/dev.conll.gz"),
    "summarise": ("scitldr/train.jsonl.gz", "scitldr/dev.jsonl.gz"),
    "translate": ("tatoeba_en_fr/train.tsv.gz", ""),
}
"""Preset → rows to train on, rows to evaluate on. Where the second is empty, HELD_OUT's share of the first is held out,
else a tenth."""
HELD_OUT = {"sst2": 0.02, "nsmc": 0.03, "squad": 0.06, "translate": 0.01}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=RUN_OR_HF_DIR")
    parser.add_argument("--tasks", default=",".join(FILES), help="presets of configs/tasks, with commas between")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=None, help="folder for the runs; by default one that is removed")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        print("| task | model | rows | metrics | minutes |\n|---|---|---|---|---|", flush=True)
        for task in options.tasks.split(","):
            for model in options.models:
                print(row(task, model, runs, options, flags), flush=True)
    return 0


def row(task: str, model: str, runs: Path, options: argparse.Namespace, flags: list[str]) -> str:
    """One line of the table."""
    name, _, path = model.partition("=")
    train, dev = (options.folder / file if file else None for file in FILES[task])
    command = [
        sys.executable, "-m", "jaxlm.cli", "finetune", f"configs/tasks/{task}.py", "--init-from", path,
        "--data.source", str(train), *(["--data.dev", str(dev)] if dev else []),
        *(["--data.held-out", str(HELD_OUT[task])] if task in HELD_OUT else []), "--run-dir",
        str(runs / f"{task}-{name}"), "--train.steps", str(options.steps), "--train.eval-every",
        "0", "--train.checkpoint-every", "0", "--seeds", str(options.seeds), "--json", *flags,
    ]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        why = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        return f"| {task} | {name} | – | {why[-1]} | – |"
    result = json.loads(done.stdout)
    spread = result.get("deviations", {})
    metrics = ", ".join(
        f"{key} {value:.3f}" + (f" ± {spread[key]:.3f}" if key in spread else "")
        for key, value in result["metrics"].items()
    )
    return f"| {task} | {name} | {result['examples']:,} | {metrics} | {(time.monotonic() - start) / 60:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
