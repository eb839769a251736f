"""Run by tests/parallel/test_inference.py in a process of its own: fine-tunes, evaluates, scores and generates on the
devices at hand, and prints as JSON the answers and the largest share of a model that a device held meanwhile."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np

import jaxlm
from jaxlm.cli import main
from jaxlm.commands.common import start_jax
from jaxlm.parallel import inference
from tests.tasks.support import sentences

MESH = {"data": 1, "fsdp": -1}
PROMPTS = ["the cat runs", "red river", "old house the dog sleeps", "new", "blue cat eats the"]
HELD: list[int] = []
"""Bytes that a device holds, each time that results are fetched."""


def held() -> int:
    """Bytes of all buffers on this process's first device; a shard's `data` is an array of the same buffer."""
    device = jax.local_devices()[0]
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards if shard.device == device]
    plain = [data for data in shards if not jax.dtypes.issubdtype(data.dtype, jax.dtypes.prng_key)]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in plain}.values())


def watch_memory() -> None:
    """Note what a device holds at every batch of inference."""
    place = inference.place_batch

    def noted(rows, params):
        HELD.append(held())
        return place(rows, params)

    inference.place_batch = noted


def size_of(model) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def most_held(size: int) -> float:
    """The largest share of a model of `size` bytes that a device held since the last call."""
    most = max(HELD) / size
    HELD.clear()
    gc.collect()
    return most


def fine_tuned(folder: Path, run: Path) -> dict:
    """Train, evaluate on the way and at the end, and again from the checkpoint."""
    size = size_of(jaxlm.load(str(folder / "bert"), mesh=MESH))
    flags = ["--train.steps", "4", "--train.eval-every", "2", "--train.batch-size", "16", "--data.length", "64",
             "--train.best-by", "accuracy", "--mesh.data", "1", "--mesh.fsdp", "-1", "--train.tracker", "none",
             "--optimizer.learning-rate", "1e-3"]
    assert main(["finetune", "configs/tasks/classify.py", "--init-from", str(folder / "bert"), "--data.source",
                 str(folder / "classify.tsv"), "--data.dev", str(folder / "same.tsv"), "--run-dir", str(run),
                 *flags]) == 0
    trained = most_held(size)  # with the optimizer's two moments
    out = run.with_suffix(".jsonl")
    assert main(["evaluate", str(run), "--predictions", str(out), "--train.batch-size", "12"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()] if jax.process_index() == 0 else []
    return {"scores": [[*row["scores"].values()] for row in rows], "trained": trained, "evaluated": most_held(size)}


def answers(folder: Path) -> dict:
    """What a masked model and a decoder answer."""
    bert, gpt2 = (jaxlm.load(str(folder / name), mesh=MESH) for name in ("bert", "gpt2"))
    found = {
        "shards": [[list(leaf.shape), list(leaf.addressable_shards[0].data.shape)]
                   for leaf in jax.tree.leaves(bert.params)],
        "vectors": bert.encode(sentences(11)).tolist(),
        "masks": [[p for _, p in each] for masks in bert.fill(["the [MASK] eats"] * 3, 4) for each in masks],
        "pseudo": [each.total for each in bert.score(PROMPTS)],
        "texts": [each.total for each in gpt2.score(PROMPTS)],
        "pairs": [each.log_probs.tolist() for each in gpt2.score([(text, " the cat") for text in PROMPTS])],
    }
    settings = {
        "greedy": {"stop": ["zz"]}, "sampled": {"temperature": 0.9, "seed": 3, "stop_ids": ()}, "beams": {"beams": 3},
    }
    for name, each in settings.items():
        found[name] = [answer.ids for answer in gpt2.generate(PROMPTS, max_new_tokens=9, **each)]
    return found | {"answered": most_held(size_of(bert) + size_of(gpt2))}


if __name__ == "__main__":
    start_jax()
    watch_memory()
    here, there = map(Path, sys.argv[1:])
    result = fine_tuned(here, there) | answers(here) | {"devices": jax.device_count()}
    print("RESULT" + json.dumps(result, default=np.ndarray.tolist))
