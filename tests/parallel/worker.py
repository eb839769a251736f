"""Run by the tests in a process with eight devices: trains the same small model on meshes of all shapes and prints, as
JSON, what the tests look at. The same random choices must come out everywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.errors import Stopped
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import batch_sharding
from jaxlm.runs.pretrain import pretrain
from jaxlm.runs.resolve import resolve
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training import feed, loop
from jaxlm.training.program import Program, corruption_key
from jaxlm.trees import path_string
from jaxlm.types import TokenBatch
from tests.training.shared_steps import share_steps

LENGTH, ROWS, STEPS, SEED = 32, 8, 4, 5
VOCABULARY = 162  # divisible by 2, not by 4 or 8, as 30,522 is
OBJECTIVE = MaskedLM(
    model=Bert(
        hidden_size=32, num_layers=1, num_heads=4, intermediate_size=64, max_positions=LENGTH, remat="full",
    )
).bind(Vocabulary.stand_in(VOCABULARY), LENGTH)
MESHES = {
    "one": (1, 1, 1), "data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (1, 1, 8), "2x4": (2, 4, 1), "mixed": (2, 2, 2),
}


@dataclasses.dataclass(frozen=True)
class OwnRules(Bert):
    """Its first feed-forward matrix is split by rows over `tensor`, not by columns."""

    sharding_rules = ((r"mlp/wi/kernel", ("tensor", None)),)


CORRUPTED = ("one", "data", "2x4", "mixed")

INITIAL: dict[str, object] = {}


def mesh_of(name: str):
    data, fsdp, tensor = MESHES[name]
    return make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])


def batch_on(mesh, step: int) -> TokenBatch:
    draw = np.random.default_rng(step)
    width = OBJECTIVE.row_format(LENGTH).length
    real = np.arange(width) < draw.integers(4, width + 1, ROWS)[:, None]
    tokens = np.where(real, draw.integers(107, VOCABULARY, (ROWS, width)), 0).astype(np.int32)
    return jax.device_put(TokenBatch(tokens, real.astype(np.int32)), batch_sharding(mesh))


def digest(tree) -> str:
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]:
        total.update(f"{path_string(path)} {leaf.dtype} {leaf.shape}".encode())
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


def shards(tree) -> dict[str, list[list[int]]]:
    """path -> [shape, shape of each device's part]."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        path_string(path): [list(leaf.shape), *sorted({tuple(s.data.shape) for s in leaf.addressable_shards})]
        for path, leaf in leaves
    }


def parts_on(name: str, objective=OBJECTIVE) -> dict:
    """Shapes of the parts of the state."""
    program = program_on(name, objective)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.shapes)
    return {"shards": shards(jax.device_put(zeros, program.shardings))}


def program_on(name: str, objective=OBJECTIVE) -> Program:
    train = TrainConfig(steps=STEPS, batch_size=ROWS, seed=SEED)
    return Program(objective, train, OptimizerConfig(learning_rate=5e-3, warmup_steps=2), mesh_of(name))


def trained_on(name: str, train: bool) -> dict:
    """On CORRUPTED meshes what comes out of corruption, with `train` the losses of STEPS steps."""
    mesh, program = mesh_of(name), program_on(name)
    if name in ("one", "mixed"):
        state = program.init_state(program.init_params(0))
        INITIAL[name] = jax.device_get(state)
    else:  # saves a compilation
        state = jax.device_put(INITIAL["one"], program.shardings)
    before = shards(state)
    result: dict = {}
    if name in CORRUPTED:
        rows = batch_sharding(mesh)
        run = jax.jit(OBJECTIVE.corrupt, in_shardings=(None, TokenBatch(rows, rows)))
        examples = (run(corruption_key(SEED, number), batch_on(mesh, number)) for number in range(STEPS))
        result["examples"] = [digest(example) for example in examples]
    if train:
        result["losses"] = []
        for number in range(STEPS):
            state, terms = program.train_step(state, batch_on(mesh, number), program.constants)
            result["losses"].append(float(terms["loss"].total))
        assert shards(state) == before, "a step leaves everything where it was"
        if name in ("fsdp", "mixed"):
            _, terms = program.replay_step(state, batch_on(mesh, STEPS), program.constants)
            result["replayed"] = float(terms["replay"].total.sum())
    return result


def resumed(preset: str, folder: Path) -> dict:
    """A run on (8, 1, 1) alone, and one that stops there after step 5 and goes on on (2, 2, 2)."""
    share_steps()
    flags = ["--train.steps", "9", "--train.log-every", "1", "--data.held-out", "0",
             "--objective.model.attention-dropout", "0.1"]
    meshes = (["--mesh.data", "8"], ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"])
    losses, seen = {}, {}
    real_batch = feed.Batches.batch

    def go(name: str, mesh: list[str], stop: int) -> None:
        loop._stop_signals = lambda after: contextlib.nullcontext(lambda step: 15 * (step == stop))
        with contextlib.suppress(Stopped):
            pretrain(resolve(preset, [*flags, *mesh]), folder / name, report=lambda text: None)
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    def watched(self, step, rows=slice(None)):
        batch = real_batch(self, step, rows)
        seen.setdefault(step, set()).add(hashlib.sha256(np.ascontiguousarray(batch.tokens).tobytes()).hexdigest())
        return batch

    feed.Batches.batch = watched
    go("alone", meshes[0], -1)
    go("moved", meshes[0], 5)
    go("moved", meshes[1], -1)
    return {"losses": losses, "batches": [len(seen[step]) for step in range(9)]}


def fed(preset: str, name: str) -> dict:
    """Two steps of short rows and two of long ones: the batches, and the shapes of each device's part of them."""
    experiment = resolve(preset, ["--train.phases", "2x16,2"]).experiment
    tokenizer = experiment.data.prepare_tokenizer(lambda text: None)
    store = experiment.data.open(tokenizer, lambda text: None)
    objective = experiment.objective.bind(tokenizer.vocabulary, experiment.data.length)
    own = feed.Feed(store, dataclasses.replace(experiment, objective=objective), mesh_of(name))
    with contextlib.closing(own.after(0)) as source:
        batches = [batch._asdict() for batch in itertools.islice(source, 4)]
    return {"digests": [digest(batch) for batch in batches], "parts": [shards(batch)["tokens"] for batch in batches]}


def main(preset: str, folder: str, *trained: str) -> None:
    """Of all meshes the parts, and a run that moves; with `trained` meshes masks and losses instead."""
    with contextlib.redirect_stdout(sys.stderr):
        result = {"devices": jax.device_count()}
        if trained:
            result["meshes"] = {name: trained_on(name, name in ("one", *trained)) for name in MESHES}
            result["same_start"] = digest(INITIAL["one"]) == digest(INITIAL["mixed"])
        else:
            result["meshes"] = {name: parts_on(name) for name in MESHES}
            own = MaskedLM(model=OBJECTIVE.model.as_type(OwnRules)).bind(OBJECTIVE.vocabulary, LENGTH)
            result["meshes"]["own"] = parts_on("tensor", own)
            result["fed"] = {name: fed(preset, name) for name in ("one", "mixed")}
            result["resumed"] = resumed(preset, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
