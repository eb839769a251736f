"""Corruptions on one device and on eight virtual ones: the same examples, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxlm.data.base import Statistics
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra
from jaxlm.models.elmo import Elmo
from jaxlm.models.word2vec import Word2Vec
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import Objective
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.distillation import Distillation
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import batch_sharding
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

MESHES = {"one": (1, 1, 1), "eight": (8, 1, 1), "2x4": (2, 4, 1)}
LENGTH, ROWS = 40, 16
OBJECTIVES: dict[str, Objective] = {
    "albert": MaskedLM(
        model=Albert(), next_sentence=False, sentence_order=True, whole_word=True, longest_ngram=3, max_predictions=5
    ),
    "spanbert": SpanBoundary(model=Bert()),
    "electra": ReplacedTokens(model=Electra()),
    "xlnet": PermutationLM(model=Xlnet()),
    "distilbert": Distillation(model=Distilbert()),
    "elmo": BidirectionalLM(model=Elmo(), noise_words=20),
    "word2vec": SkipGram(model=Word2Vec()),
    "cbow": SkipGram(model=Word2Vec(), bag_of_words=True, window=2),
}


def digest(name: str, shape: tuple[int, int, int]) -> str:
    """Of an example that is made on this mesh."""
    v = Vocabulary.stand_in(200)
    v = dataclasses.replace(v, sentence_end=~v.special & (np.arange(200) % 7 == 0))
    objective = OBJECTIVES[name].bind(v, LENGTH, Statistics(np.arange(200), 0.0))
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
    draw = np.random.default_rng(0)
    real = np.arange(objective.raw_length(LENGTH)) < draw.integers(3, LENGTH - 2, ROWS)[:, None]
    arrays = np.where(real, draw.integers(107, 200, real.shape), 0), np.where(real, 1 + np.arange(ROWS)[:, None], 0)
    batch = TokenBatch(*(jax.device_put(array.astype(np.int32), batch_sharding(mesh)) for array in arrays))
    made = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(0), batch))
    assert all(made[key].any() for key in made if key.endswith(("_labels", "words", "weights", "noise")))
    return hashlib.sha256(b"".join(np.ascontiguousarray(made[key]).tobytes() for key in sorted(made))).hexdigest()


@pytest.fixture(scope="module")
def results() -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests.objectives.test_corruption_meshes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_same_on_any_mesh(results, name):
    assert len(results[name]) == 3 and len(set(results[name])) == 1


if __name__ == "__main__":
    print(json.dumps({name: [digest(name, shape) for shape in MESHES.values()] for name in OBJECTIVES}))
