"""Microbatches: gradients, terms and evaluation losses equal those of the whole batch, for rows of unequal size."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.gpt3 import Gpt3
from jaxlm.models.layers.dropout import dropout, keep_scale
from jaxlm.models.reformer import Reformer
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import Constants, Objective, Term, total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.distillation import Distillation
from jaxlm.objectives.layer_distillation import LayerDistillation
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training import program as module
from jaxlm.training.metrics import Totals
from jaxlm.training.microbatches import gradients
from jaxlm.training.program import Program
from jaxlm.types import TokenBatch
from tests.params import random_params

LENGTH, ROWS = 24, 16
VOCABULARY = Vocabulary.stand_in(160)
QUIET = dict(dropout=0.0, attention_dropout=0.0)
SIZES = dict(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, **QUIET)
ENCODER = SIZES | dict(max_positions=LENGTH, init_std=0.2)
OBJECTIVES = {
    "masked": MaskedLM(model=Bert(**ENCODER)),
    "masked alone": MaskedLM(model=Bert(**ENCODER), input_format="document"),
    "packed": MaskedLM(model=Roberta(**ENCODER), input_format="full-sentences", mask_rate=0.3),
    "order": MaskedLM(
        model=Albert(**(ENCODER | dict(num_layers=2)), embedding_size=8), input_format="sentence-order",
        longest_ngram=3,
    ),
    "boundary": SpanBoundary(model=Bert(**ENCODER), offset_size=8, mask_rate=0.3),
    "replaced": ReplacedTokens(model=Electra(
        **ENCODER, embedding_size=12, generator_hidden_size=8, generator_num_layers=1, generator_num_heads=2,
        generator_intermediate_size=16,
    ), mask_rate=0.3),
    "causal": CausalLM(model=Gpt2(**ENCODER)),
    "gpt-1": CausalLM(model=Gpt1(**ENCODER)),
    "bands": CausalLM(model=Gpt3(**(ENCODER | dict(num_layers=2)), band=4)),
    "hashed": CausalLM(model=Reformer(
        **(SIZES | dict(num_layers=2)), head_dim=8, attention_types=("local", "lsh"), axial_shape=(4, 6),
        axial_widths=(8, 8), local_chunk_size=4, lsh_chunk_size=6, buckets=(4,), lsh_attention_dropout=0.0,
        init_std=0.2, new_hashes=False,
    )),
    "spans": SpanCorruption(model=T5(**SIZES, head_dim=8), z_loss=0.01),
    "distilled": Distillation(model=Distilbert(**ENCODER), teacher="BERT"),
    "layers": LayerDistillation(model=Bert(**ENCODER), teacher="BERT", teacher_hidden_size=16),
    "entities": EntityAutoencoder(model=Ernie(
        **(ENCODER | dict(num_layers=3)), num_text_layers=1, entity_hidden_size=8, entity_num_heads=2,
    )),
}
ENTITIES = 20

# Two losses of one example, with weights of their own; the others add no code to a loop over microbatches, and are
# slow, as are the arrays that all rows of `entities` share.
DISTINCT = ("masked",)


@functools.cache
def bound(name: str) -> Objective:
    return OBJECTIVES[name].bind(VOCABULARY, LENGTH)


@functools.cache
def corrupt(name: str):
    return jax.jit(bound(name).corrupt)


@functools.cache
def constants(name: str) -> Constants:
    """The teacher of an objective that has one, a BERT with other weights; the vectors of entities."""
    if name == "entities":
        vectors = np.random.default_rng(0).normal(size=(1 + ENTITIES, 8)).astype(np.float32)
        return {"vectors": jnp.asarray(vectors).at[0].set(0.0)}

    def load(_: str) -> PretrainedModel:
        return PretrainedModel(bound("masked"), jax.tree.map(jnp.asarray, random_params(bound("masked"), 5)))

    return bound(name).load_constants(VOCABULARY, load)


def text(objective: Objective, seed: int = 0) -> TokenBatch:
    """Return rows of all lengths: the first one full, the sixth one empty, packed rows with several documents."""
    rng = np.random.default_rng(seed)
    raw = objective.row_format(LENGTH).length
    sizes = rng.integers(5, raw + 1, ROWS)
    sizes[0], sizes[5] = raw, 0
    real = np.arange(raw) < sizes[:, None]
    ends = rng.random((ROWS, raw)) < (0.0 if objective.row_format(LENGTH).packing == "document" else 0.15)
    tokens = np.where(ends, VOCABULARY.eos, rng.integers(107, 160, (ROWS, raw)))
    documents = 1 + np.pad(np.cumsum(ends, axis=1)[:, :-1], ((0, 0), (1, 0)))
    entities = np.where(real & (rng.random(real.shape) < 0.2), rng.integers(0, ENTITIES, real.shape), -1)
    return TokenBatch(
        np.where(real, tokens, 0).astype(np.int32), np.where(real, documents, 0).astype(np.int32),
        entities.astype(np.int32) if isinstance(objective, EntityAutoencoder) else None,
    )


# An optimizer that stores the gradients in its state and updates nothing.
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradients, _, params: (jax.tree.map(jnp.zeros_like, params), gradients),
)


@functools.cache
def program(name: str, num_microbatches: int) -> Program:
    """Return the training program with that optimizer."""
    train = TrainConfig(steps=10, batch_size=ROWS, accumulate=num_microbatches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_optimizer", lambda *_: KEEP)
        mesh = make_mesh(MeshConfig(1), jax.devices()[:1])
        return Program(bound(name).with_constants(constants(name)), train, OptimizerConfig(), mesh)


@functools.cache
def params(name: str):
    return random_params(bound(name))


@functools.cache
def step(name: str, num_microbatches: int):
    """Return the gradients and terms of one step from the same parameters."""
    own = program(name, num_microbatches)
    state, terms = own.train_step(own.init_state(params(name)), text(bound(name)), constants(name))
    assert int(state.step) == 1
    return jax.device_get((state.opt_state, terms))


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in DISTINCT else pytest.mark.slow) for name in OBJECTIVES
])
def test_rows_are_as_unequal_as_they_can_be(name):
    """Microbatches differ in their number of targets, so a mean of means differs from the mean of the whole batch."""
    objective = bound(name)
    example = jax.device_get(corrupt(name)(module.corruption_key(0, 0), text(objective)))
    weights = example.get("masked_weights", example.get("weights")).sum(1)
    assert weights[5] == 0 and len(set(weights)) > 2
    for count in (2, 4, 8):
        assert len({weights[i::count].sum() for i in range(count)}) > 1


# The number of microbatches is only the length of a loop; the smallest microbatches differ most.
@pytest.mark.parametrize(("name", "num_microbatches"), [
    pytest.param(name, count, marks=() if count == 8 and name in DISTINCT else pytest.mark.slow)
    for name in OBJECTIVES for count in (2, 4, 8)
])
def test_microbatches_give_the_gradients_and_terms_of_the_whole(name, num_microbatches):
    expected, terms = step(name, 1)
    found, parts = step(name, num_microbatches)
    whole = norm(expected)
    difference = jax.tree.map(np.subtract, found, expected)
    assert norm(difference) < 1e-6 * whole
    for (path, own), error in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(difference), strict=True
    ):
        # Relative to each gradient's norm, or to the norm of all where a gradient is 0 up to rounding (biases of keys).
        # Rounding alone reaches 1.03e-6, the largest of 16 draws of `entities` in eight microbatches (median: 7e-7).
        assert norm(error) < 1.5e-6 * max(norm(own), 0.1 * whole), jax.tree_util.keystr(path)
    assert set(parts) == set(terms)
    likelihood = terms[bound(name).primary_metric].total
    for key, term in terms.items():
        assert parts[key].weight == term.weight
        # z_loss is a difference of two sums of the size of the likelihood, with their rounding.
        size = likelihood if key == "z_loss" else abs(term.total)
        assert abs(parts[key].total - term.total) <= 1e-6 * size, key


def test_microbatches_leave_the_coefficients_as_they_are():
    (_, terms), (_, parts) = step("masked", 1), step("masked", 8)
    assert parts["mlm_loss"].coefficient == terms["mlm_loss"].coefficient


@pytest.mark.slow  # the evaluation step, below, does it
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in DISTINCT else pytest.mark.slow) for name in OBJECTIVES
])
def test_an_evaluation_in_several_batches_is_one_of_a_large_batch(name):
    objective = bound(name)
    example = jax.device_get(corrupt(name)(jax.random.key(3), text(objective, seed=1)))
    teacher = constants(name)
    taught = objective.with_constants(teacher)
    run = jax.jit(lambda params, example: taught.loss(params, example, jax.random.key(0), False))
    loss = functools.partial(run, params(name))
    whole = loss(example)
    totals, means = Totals(), []
    for start in range(0, ROWS, 4):
        terms = loss({
            key: array if key in objective.shared_arrays else array[start : start + 4] for key, array in example.items()
        })
        totals.add(terms)
        means.append(float(total_loss(terms)))
    assert totals.loss() == pytest.approx(float(total_loss(whole)), rel=1e-6)
    assert abs(np.mean(means) - float(total_loss(whole))) > 1e-5  # the mean of the batches' means differs
    for key, term in whole.items():
        assert totals.sums[key][1] == term.weight
        size = whole[objective.primary_metric].total if key == "z_loss" else term.total
        assert totals.sums[key][0] == pytest.approx(float(term.total), abs=1e-6 * float(size))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in DISTINCT else pytest.mark.slow) for name in OBJECTIVES
])
def test_the_evaluation_step_in_microbatches_gives_the_same_in_less_memory(name):
    arguments = params(name), text(bound(name), seed=1), np.int32(0), constants(name), ()
    one, eight = (program(name, count).eval_step.lower(*arguments).compile() for count in (1, 8))
    assert eight.memory_analysis().temp_size_in_bytes < 0.75 * one.memory_analysis().temp_size_in_bytes
    (whole, _), (parts, _) = one(*arguments), eight(*arguments)
    assert set(parts) == set(whole)
    for key, term in whole.items():
        assert (parts[key].weight, parts[key].coefficient) == (term.weight, term.coefficient)
        size = whole[bound(name).primary_metric].total if key == "z_loss" else abs(term.total)
        assert abs(parts[key].total - term.total) <= 1e-6 * size, key


def test_rows_that_are_compared_with_each_other_are_evaluated_together(monkeypatch):
    monkeypatch.setattr(CausalLM, "is_separable", False)
    assert program.__wrapped__("causal", 2).eval_microbatches == 1


def test_dropout_differs_between_steps_and_is_off_in_evaluation():
    """The corruption of a causal LM draws nothing, and the optimizer here moves nothing."""
    objective = CausalLM(model=Gpt2(**(ENCODER | dict(dropout=0.3)))).bind(VOCABULARY, LENGTH)
    train = TrainConfig(steps=10, batch_size=ROWS, accumulate=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_optimizer", lambda *_: KEEP)
        own = Program(objective, train, OptimizerConfig(), make_mesh(MeshConfig(1), jax.devices()[:1]))
    rows = text(objective)
    state, losses, sums = own.init_state(random_params(objective)), [], []
    evaluated = float(total_loss(own.eval_step(state.params, rows, np.int32(0), (), ())[0]))
    for _ in range(2):
        state, terms = own.train_step(state, rows, ())
        losses.append(float(terms["lm_loss"].total / terms["lm_loss"].weight))
        sums.append(norm(jax.device_get(state.opt_state)))
    assert evaluated == float(total_loss(own.eval_step(state.params, rows, np.int32(1), (), ())[0]))
    assert len({round(loss, 4) for loss in (*losses, evaluated)}) == 3
    assert sums[0] != sums[1]


def test_each_microbatch_drops_other_elements():
    """The gradient of a sum of dropped parameters counts the microbatches that keep each: a binomial law."""

    class Dropped(SimpleNamespace):
        def stream_loss(self, params, example, memory, key, train):
            total = jnp.sum(dropout(params["x"], 0.5, key, row_axes=0))
            return {"sum": Term(total, jnp.float32(len(example["rows"])), 1.0)}, ()

    own, key = Dropped(shared_arrays=()), jax.random.key(0)
    run = jax.jit(lambda params, rows: gradients(own, params, {"rows": rows}, (), key, 4)[0])
    count = np.asarray(run({"x": jnp.ones(4096)}, jnp.zeros(8))["x"]) * 8 / keep_scale(0.5)
    found, expected = np.bincount(np.rint(count).astype(int)), 4096 / 16 * np.array([1, 4, 6, 4, 1])
    assert np.sum((found - expected) ** 2 / expected) < 18.5  # 4 degrees of freedom, p = 0.001


def test_the_evaluation_step_gives_the_same_in_batches():
    """Causal LM draws nothing, so that every batch of rows has the same examples wherever it is evaluated."""
    own, batch = program("causal", 1), text(bound("causal"), seed=2)
    whole, _ = own.eval_step(params("causal"), batch, np.int32(0), (), ())
    totals = Totals()
    for index, start in enumerate(range(0, ROWS, 4)):
        part = TokenBatch(*(array[start : start + 4] for array in batch[:2]))
        totals.add(own.eval_step(params("causal"), part, np.int32(index), (), ())[0])
    assert totals.loss() == pytest.approx(float(total_loss(whole)), rel=1e-6)
    assert totals.sums["lm_loss"][1] == whole["lm_loss"].weight
