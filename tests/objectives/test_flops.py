"""FLOPs on which MFU rests, against the products of compiled forward passes in training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.analysis.costs import product_flops
from jaxlm.analysis.hlo import parse
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking
from jaxlm.models.bert import Bert
from jaxlm.models.elmo import Elmo
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.layer_distillation import LayerDistillation
from jaxlm.objectives.masked_diffusion import MaskedDiffusion
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.tasks.base import Task
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tasks.tagging import Tagging
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.params import random_params

VOCABULARY, ROWS, LENGTH = Vocabulary.stand_in(160), 8, 48
SIZES = dict(vocab_size=160, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128, dropout=0.0,
             attention_dropout=0.0)
# The count is of every layer at every position.
ENCODER = SIZES | dict(max_positions=LENGTH, last_layer_at_positions=False)
BERT = Bert(**ENCODER)
ELMO = Elmo(vocab_size=160, hidden_size=64, cell_size=128, filter_widths=3, dropout=0.0)
WORDS = dict(vocab_size=160, hidden_size=64)
LABELS = dict(labels=("a", "b", "c"), classifier_dropout=0.0)
LATE = dict(token_width=16, query_length=12)
SLOTS = LENGTH // 4
# The objective, what the count leaves out (FLOPs of a row), and the largest error of the rest, with its reason.
OBJECTIVES = {
    # The product with the label alone is compiled as a sum.
    "noise": (BidirectionalLM(model=ELMO, noise_words=20), -2 * LENGTH * 64, 1e-6),
    "softmax": (BidirectionalLM(model=ELMO, noise_words=0), 0, 1e-6),
    # The LSTMs also read <s> or </s>, and both are spelt once a batch.
    "elmo": (Tagging(model=ELMO, **LABELS), 0, 1 / LENGTH + 2 / (ROWS * LENGTH)),
    # Slots of the window without a neighbour, whose mean number is window - 1, have weight 0.
    "words": (SkipGram(model=Word2Vec(**WORDS), negatives=3), 2 * LENGTH * 4 * (1 + 3) * 64, 1e-6),
    # The sum of a context; the product with the word alone is compiled as a sum.
    "bag": (SkipGram(model=Word2Vec(**WORDS), negatives=3, bag_of_words=True), 2 * LENGTH * (10 - 1) * 64, 1e-6),
    "boundary": (SpanBoundary(model=BERT), 0, 1e-6),
    "layers": (LayerDistillation(model=BERT, teacher="T", teacher_hidden_size=96), 0, 1e-6),
    "diffusion": (MaskedDiffusion(model=BERT), 0, 1e-6),
    # Scores of each query and all texts of the batch.
    "contrastive": (Contrastive(model=BERT, negatives=1), 2 * ROWS * 2 * 64, 1e-6),
    "late": (Contrastive(model=BERT, negatives=1, interaction="late", **LATE), 2 * ROWS * 2 * 12 * LENGTH * 16, 1e-6),
    "pooler": (Classification(model=BERT, **LABELS), 0, 1e-6),
    "transform": (Classification(model=Roberta(**ENCODER), **LABELS), 0, 1e-6),
    # The classifier counts once, not at every token: 2 · width · labels of them.
    "tags": (Tagging(model=BERT, **LABELS), 2 * (LENGTH - 1) * 64 * 3, 1e-6),
    # Biases of relative positions are products of one-hot vectors with 32 rows for 2 heads, once a batch.
    "t5": (TextToText(model=T5(**SIZES, head_dim=32), max_target=24), 2 * (48**2 + 24**2) * 32 * 2 / ROWS, 1e-6),
    # The last position predicts nothing.
    "decoder": (TextToText(model=Gpt2(**SIZES, max_positions=LENGTH)), -2 * 64 * 160, 1e-6),
    # Logits of the candidates: one for each slot of the batch, the one for none, and padding to a multiple of 8. The
    # entities after the last layer's feed-forward are counted, but nothing reads them.
    "entities": (EntityAutoencoder(model=Ernie(
        **(ENCODER | dict(num_layers=4)), num_text_layers=1, entity_hidden_size=32, entity_num_heads=2,
    )), 2 * SLOTS * (1 + ROWS * SLOTS + 7) * 32 - 2 * LENGTH * 128 * 32, 1e-6),
}


def constants(objective):
    if isinstance(objective, LayerDistillation):
        teacher = MaskedLM(model=dataclasses.replace(BERT, hidden_size=96)).bind(VOCABULARY, LENGTH)
        return objective.load_constants(VOCABULARY, lambda path: PretrainedModel(teacher, random_params(teacher)))
    if isinstance(objective, EntityAutoencoder):
        return {"vectors": jnp.zeros((21, 32))}
    return objective.load_constants(VOCABULARY, str) if isinstance(objective, BidirectionalLM) else ()


def compiled(objective, constants):
    """Return the compiled forward pass of a training batch of full rows."""

    def loss(params, example, memory, constants):
        terms, _ = objective.with_constants(constants).stream_loss(params, example, memory, jax.random.key(0), True)
        return total_loss(terms)

    if isinstance(objective, (Task, Contrastive)):
        example = objective.synthetic(ROWS, LENGTH)
    else:
        raw = np.full((ROWS, objective.row_format(LENGTH).length), 120, np.int32)
        example = jax.eval_shape(objective.corrupt, jax.random.key(0), TokenBatch(raw, np.ones_like(raw)))
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    return jax.jit(loss).lower(shapes, example, objective.initial_memory(ROWS), constants).compile()


@pytest.mark.parametrize("name", [  # each compiles for seconds, but for these two
    pytest.param(name, marks=() if name in ("softmax", "bag") else pytest.mark.slow) for name in OBJECTIVES
])
def test_flops_are_the_products_of_a_row(name):
    objective, left_out, error = OBJECTIVES[name]
    objective = objective.bind_unchecked(VOCABULARY)
    found = constants(objective)
    objective = objective.with_constants(found)
    counted = objective.flops(LENGTH) + objective.constants_flops(LENGTH) + left_out
    program = parse(compiled(objective, found).as_text())
    assert product_flops(program) / ROWS == pytest.approx(counted, rel=error)


@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_flops_of_triples_are_those_of_distances(distance):
    """There are no products: |h + r - t|, or its square, takes four operations an element, but for the first of the
    sum. l2 also has a root and its limit."""
    objective = TripleRanking(TransE(hidden_size=64, distance=distance), negatives=4)
    vectors = jax.ShapeDtypeStruct((1 + 4, 64), jnp.float32)
    run = jax.jit(lambda head, relation, tail: objective.model.distances(head + relation, tail))
    found = run.lower(vectors, vectors, vectors).cost_analysis()
    assert found["flops"] == objective.flops(3) - 5 + (5 if distance == "l2" else 0)
