"""Objectives on one device and on eight virtual ones: identical examples, and the same train step fully sharded.

BERT's test is in tests/parallel/test_meshes.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable

import jax
import numpy as np
import optax
import pytest

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.data.base import Statistics
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import DebertaV3
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra
from jaxlm.models.elmo import Elmo
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.llama import Mistral
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.models.word2vec import Word2Vec
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import Constants, Objective
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.distillation import Distillation
from jaxlm.objectives.masked_diffusion import MaskedDiffusion
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import batch_sharding, shardings
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training import program
from jaxlm.types import TokenBatch, TripleBatch

MESHES = {"one": (1, 1, 1), "eight": (8, 1, 1), "2x4": (2, 4, 1), "mixed": (2, 2, 2), "tensor": (2, 1, 4)}
LENGTH, ROWS = 40, 16
SIZES = dict(hidden_size=16, num_layers=2, num_heads=4, intermediate_size=32)
TRAINED: dict[str, Objective] = {
    # The output matrix is sharded and the loss is chunked.
    "gpt2": CausalLM(model=Gpt2(**SIZES, max_positions=LENGTH), loss_chunk=8),
    "t5": SpanCorruption(
        model=T5(**SIZES, head_dim=4, activation="gated-gelu", tied_head=False, scaled_head=False)
    ),
    # Attention within documents, also of the last layer at masked positions.
    "packed": MaskedLM(model=Roberta(**SIZES, max_positions=LENGTH), input_format="packed", mask_rate=0.3),
    # The candidates are shared by all rows, and every device has the vectors.
    "ernie": EntityAutoencoder(model=Ernie(
        **(SIZES | dict(num_layers=3)), max_positions=LENGTH, num_text_layers=1, entity_hidden_size=8,
        entity_num_heads=2,
    )),
    "modernbert": MaskedLM(
        model=ModernBert(**SIZES | dict(num_layers=4), max_positions=LENGTH, local_attention=8), mask_rate=0.3,
        input_format="packed",
    ),
    # Times are spread over all rows of the batch.
    "diffusion": MaskedDiffusion(
        model=ModernBert(**SIZES | dict(num_layers=4), max_positions=LENGTH, local_attention=8)
    ),
    "ettin": CausalLM(model=ModernBertDecoder(**SIZES | dict(num_layers=4), max_positions=LENGTH, local_attention=8)),
    # Two key/value heads serve four query heads: "tensor" splits the heads of keys and values themselves.
    "llama": CausalLM(model=Mistral(**SIZES, num_kv_heads=2, head_dim=4, max_positions=LENGTH, window=8)),
    # Queries of the mask decoder are at the masked positions; the word embedding is a sum.
    "deberta": ReplacedTokens(
        model=DebertaV3(**SIZES, generator_num_layers=1, max_positions=LENGTH, position_buckets=8), two_segments=False
    ),
    # Every query is compared with the passages of all devices; the batch is encoded in chunks.
    "contrastive": Contrastive(
        model=Bert(**SIZES, max_positions=LENGTH), negatives=1, symmetric=True, widths=(8,), query_length=16, chunks=2,
    ),
    "late": Contrastive(
        model=Bert(**SIZES, max_positions=LENGTH), negatives=1, interaction="late", token_width=8, query_length=16,
        expand_queries=True, temperature=1.0, chunks=2,
    ),
}
STEPS = {"deberta": ("one", "eight", "2x4", "mixed"), "contrastive": ("one", "eight", "2x4", "mixed"),
         "late": ("one", "eight", "mixed"), "llama": ("one", "eight", "2x4", "mixed", "tensor")}
"""Meshes of an objective's train step; by default one device, and all axes split."""
TARGETS = {"contrastive": ROWS - 1, "late": ROWS - 1}
"""Targets of an objective's batch, where they are no tokens."""
ENTITIES = 300
OBJECTIVES: dict[str, Objective] = TRAINED | {
    "albert": MaskedLM(
        model=Albert(), input_format="sentence-order", whole_word=True, longest_ngram=3, max_predictions=5
    ),
    "spanbert": SpanBoundary(model=Bert()),
    "electra": ReplacedTokens(model=Electra()),
    "xlnet": PermutationLM(model=Xlnet()),
    "distilbert": Distillation(model=Distilbert()),
    "elmo": BidirectionalLM(model=Elmo(), noise_words=20),
    "word2vec": SkipGram(model=Word2Vec()),
    "cbow": SkipGram(model=Word2Vec(), bag_of_words=True, window=2),
    "transe": TripleRanking(model=TransE(num_relations=5), negatives=3),
}


def bound(name: str) -> Objective:
    v = Vocabulary.stand_in(200)
    v = dataclasses.replace(v, sentence_end=~v.special & (np.arange(200) % 7 == 0))
    return OBJECTIVES[name].bind(v, LENGTH, Statistics(np.arange(200), 0.0))


def rows_on(mesh: jax.sharding.Mesh, objective: Objective) -> TokenBatch | TripleBatch | dict[str, jax.Array]:
    """Return rows of all lengths, one full and one empty; in packed rows several documents; triples, or texts."""
    draw = np.random.default_rng(0)
    if isinstance(objective, TripleRanking):
        batch = TripleBatch(*(draw.integers(0, 5, shape, np.int32) for shape in ((ROWS, 3), (ROWS, 2, 7))))
        return jax.device_put(batch, batch_sharding(mesh))
    if isinstance(objective, Contrastive):
        batch = objective.synthetic(ROWS, LENGTH)
        batch["row"][-1] = -1
        batch["input_ids"][3, 1] = batch["input_ids"][12, 1]  # the same positive on two devices
        batch["attention_mask"] *= np.arange(LENGTH) < draw.integers(3, LENGTH, (ROWS, 3))[..., None]
        return jax.device_put(batch, batch_sharding(mesh))
    raw = objective.row_format(LENGTH).length
    sizes = np.array([raw, *draw.integers(3, raw, ROWS - 2), 0])
    real = np.arange(raw) < sizes[:, None]
    documents = 1 + np.arange(ROWS)[:, None]
    has_room = objective.row_format(LENGTH).packing == "packed-room"
    if isinstance(objective, CausalLM) or has_room:
        documents = 1 + np.cumsum(draw.random(real.shape) < 0.15, axis=1)
    if has_room:
        real &= np.arange(raw) + 2 * documents < raw + 2
    arrays = [np.where(real, draw.integers(107, 200, real.shape), 0), np.where(real, documents, 0)]
    if isinstance(objective, EntityAutoencoder):
        arrays.append(np.where(real & (draw.random(real.shape) < 0.2), draw.integers(0, ENTITIES, real.shape), -1))
    return TokenBatch(*(jax.device_put(array.astype(np.int32), batch_sharding(mesh)) for array in arrays))


def digest(name: str, mesh: jax.sharding.Mesh) -> str:
    """Return a digest of an example made on this mesh."""
    objective = bound(name)
    made = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(0), rows_on(mesh, objective)))
    assert all(made[key].any() for key in made if key.endswith(("_labels", "words", "weights", "noise", "entities")))
    return hashlib.sha256(b"".join(np.ascontiguousarray(made[key]).tobytes() for key in sorted(made))).hexdigest()


def constants_of(name: str, mesh: jax.sharding.Mesh) -> Constants:
    """Return the vectors of entities, on the mesh."""
    if name != "ernie":
        return ()
    table = np.random.default_rng(1).normal(size=(1 + ENTITIES, 8)).astype(np.float32)
    tree = {"vectors": table}
    return jax.device_put(tree, shardings(tree, mesh))


def step(name: str, mesh: jax.sharding.Mesh) -> dict:
    """Return the loss of a step of gradient descent and the sums of the new parameters."""
    objective = bound(name)
    program.make_optimizer = lambda *_: optax.sgd(0.5)
    constants = constants_of(name, mesh)
    own = program.Program(objective.with_constants(constants), TrainConfig(batch_size=ROWS), OptimizerConfig(), mesh)
    state = own.init_state(own.init_params(0))
    part = state.params["discriminator" if name == "deberta" else "decoder" if name == "gpt2" else "encoder"]
    query = part.get("encoder", part)["layers"]["attention"]["query"]["kernel"]
    split = [list(query.shape), list(query.addressable_shards[0].data.shape)]
    state, terms = own.train_step(state, rows_on(mesh, objective), constants)
    return {
        "loss": float(terms["loss"].total), "targets": float(terms[objective.primary_metric].weight), "split": split,
        "params": [float(abs(p).sum()) for p in jax.tree.leaves(state.params)],
    }


def found(*names: str) -> dict:
    """The figures of these objectives that the tests compare, from a process with eight devices."""
    meshes = {name: make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
              for name, shape in MESHES.items()}
    return {
        "digests": {
            name: {on: digest(name, meshes[on])
                   for on in ("one", "2x4", *["eight"] * (name in ("ernie", "packed", "deberta")))}
            for name in names
        },
        "steps": {name: {on: step(name, meshes[on]) for on in STEPS.get(name, ("one", "mixed"))}
                  for name in names if name in TRAINED},
    }


# Each objective compiles for seconds: tests/parallel/test_meshes.py has masked language modelling in the suite.
IN_SUITE = ()


@functools.cache
def figures(is_slow: bool) -> dict:
    """Return the figures of the objectives in the suite, or of the others."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    names = [name for name in OBJECTIVES if is_slow != (name in IN_SUITE)]
    command = [sys.executable, "-m", "tests.objectives.test_meshes", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def cases(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases(OBJECTIVES))
def test_the_same_examples_on_eight_devices(name):
    assert len(set(figures(name not in IN_SUITE)["digests"][name].values())) == 1


@pytest.mark.parametrize("name", cases(TRAINED))
def test_the_same_step_where_everything_is_split(name):
    steps = figures(name not in IN_SUITE)["steps"][name]
    one = steps["one"]
    for many in steps.values():
        assert many["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert many["targets"] == one["targets"]
        assert one["targets"] == TARGETS[name] if name in TARGETS else one["targets"] > 40
        assert many["params"] == pytest.approx(one["params"], rel=1e-4, abs=1e-5)
    layers = OBJECTIVES[name].model.num_layers
    assert one["split"] == [[layers, 16, 16]] * 2 and steps["mixed"]["split"] == [[layers, 16, 16], [layers, 8, 8]]


if __name__ == "__main__":
    print(json.dumps(found(*sys.argv[1:])))
