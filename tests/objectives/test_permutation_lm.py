"""Permutation language modelling: rows of a stream, what a prediction can depend on, and the memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import gradients
from jaxlm.types import TokenBatch

LENGTH, ROWS = 32, 6
V = Vocabulary.stand_in(400)
SMALL = Xlnet(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, dropout=0.0, attention_dropout=0.0,
              init_std=0.3)
OBJECTIVE = PermutationLM(model=SMALL, memory_length=24).bind(V, LENGTH)
MODEL = OBJECTIVE.model


def batch(step: int = 0, stride: int = LENGTH // 2) -> TokenBatch:
    """Every token of a row is another one: row r is 110 + 40 r, … ; the odd rows go back through the text."""
    start = 110 + 40 * np.arange(ROWS)[:, None] + np.where(np.arange(ROWS)[:, None] % 2, 1 - step, step) * stride // 4
    tokens = (start + np.arange(OBJECTIVE.raw_length(LENGTH))).astype(np.int32)
    return TokenBatch(tokens, np.ones_like(tokens))


@functools.cache
def corrupt():
    return jax.jit(OBJECTIVE.corrupt)


@functools.cache
def run():
    return jax.jit(functools.partial(OBJECTIVE.stream_loss, key=jax.random.key(0), train=False))


@functools.cache
def params():
    return jax.jit(OBJECTIVE.init)(jax.random.key(0))


def test_rows_are_two_segments_of_the_stream():
    text = batch().tokens.copy()
    text[1::2] = text[1::2, ::-1]
    swapped = 0
    for seed in range(20):
        example = jax.device_get(corrupt()(jax.random.key(seed), batch()))
        np.testing.assert_array_equal(example["is_backward"], np.arange(ROWS) % 2)
        for row in range(ROWS):
            ids, types = example["input_ids"][row], example["token_type_ids"][row]
            first, last = np.flatnonzero(ids == V.sep)
            assert LENGTH // 2 < first < last == LENGTH - 2 and ids[-1] == V.cls
            np.testing.assert_array_equal(ids[:first], text[row, :first])
            others = [other for other in range(ROWS) if (ids[first + 1 : last] == text[other, first:]).all()]
            assert len(others) == 1 and others[0] % 2 == row % 2
            swapped += others[0] != row
            np.testing.assert_array_equal(types, [0] * (first + 1) + [1] * (last - first) + [2])
            used = example["weights"][row] > 0
            positions = example["positions"][row][used]
            assert len(positions) >= 3 and len(set(positions)) == len(positions)
            np.testing.assert_array_equal(example["labels"][row][used], ids[positions])
            assert not set(positions) & {first, last, LENGTH - 1}
    assert 0.35 < swapped / (20 * ROWS) < 0.65


def test_a_prediction_depends_on_what_comes_before_it_alone():
    """Tokens are changed one by one; a prediction changes exactly where the order says that it may."""
    example = corrupt()(jax.random.key(1), batch())
    names, fresh = ("token_type_ids", "known", "sees", "positions"), params()

    @jax.jit
    def predicted(ids):
        return MODEL.encode(fresh, ids, *(example[name][:1] for name in names)).query[0]

    ids = example["input_ids"][:1]
    before, weights = predicted(ids), np.asarray(example["weights"][0]) > 0
    positions = np.asarray(example["positions"][0])
    known, sees = np.asarray(example["known"][0]), np.asarray(example["sees"][0])
    reach = known[None, :] < sees[:, None]
    # Through a token that a query sees come those that this one sees: never more than the query itself sees.
    for place in range(LENGTH):
        changed = np.abs(predicted(ids.at[0, place].set(7)) - before).max(axis=-1) > 1e-6
        np.testing.assert_array_equal(changed[weights], reach[positions, place][weights])
    assert not reach[positions, positions][weights].any()


def test_the_memory_is_the_first_halves():
    """After two rows of a stream: the hidden states that entered each layer, of the first half of each, newest last."""
    memory, expected = OBJECTIVE.empty_memory(ROWS), []
    encode = jax.jit(MODEL.encode)
    for step in range(3):
        example = corrupt()(jax.random.key(step), batch(step))
        streams = encode(
            params(), *(example[name] for name in ("input_ids", "token_type_ids", "known", "sees", "positions")),
            memory=memory, is_backward=example["is_backward"],
        )
        expected.append(streams.inputs)
        terms, memory = run()(params(), example, memory)
        assert np.isfinite(terms["plm_loss"].total)
    half = LENGTH // 2
    for layer, kept in enumerate(memory):
        assert kept.shape == (ROWS, 24, 16)
        np.testing.assert_allclose(kept[:, 8:], expected[2][layer][:, :half], atol=1e-5)
        np.testing.assert_allclose(kept[:, :8], expected[1][layer][:, half - 8 : half], atol=1e-5)


def test_the_memory_is_read_and_no_gradient_flows_into_it():
    example = corrupt()(jax.random.key(0), batch())
    memory = OBJECTIVE.empty_memory(ROWS)
    filled = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape), memory)
    assert abs(run()(params(), example, memory)[0]["plm_loss"].total -
               run()(params(), example, filled)[0]["plm_loss"].total) > 1e-3

    def carried(params):
        return sum(jnp.sum(x) for x in OBJECTIVE.stream_loss(params, example, memory, jax.random.key(0), True)[1])

    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(jax.grad(carried)(params())))


def test_microbatches_give_the_gradients_and_memories_of_the_whole():
    """Rows of both directions, one of them padding, so that the parts have unequal numbers of targets."""
    text = batch()
    text.segment_ids[2] = 0
    example = corrupt()(jax.random.key(0), text)
    memory = jax.tree.map(lambda x: x + 0.5, OBJECTIVE.empty_memory(ROWS))
    step = jax.jit(functools.partial(gradients, OBJECTIVE, frozen=()), static_argnames="num_microbatches")
    whole, parts = (
        step(params(), example, memory, key=jax.random.key(0), num_microbatches=count)
        for count in (1, 3)
    )
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_rows_of_padding_have_no_weight():
    text = batch()
    text.segment_ids[2], text.tokens[2] = 0, 0
    example = corrupt()(jax.random.key(0), text)
    sums = np.asarray(example["weights"]).sum(axis=1)
    assert sums[2] == 0 and (np.delete(sums, 2) > 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"predict_share": 0.6}, "predict_share"), ({"memory_length": -1}, "memory_length"),
     ({"random_rate": 2.0}, "random_rate")],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(OBJECTIVE, **changes)


@pytest.mark.parametrize("length", [8, 33])
def test_lengths_that_do_not_suit_are_refused(length):
    with pytest.raises(UserError, match=r"data\.length"):
        OBJECTIVE.bind(V, length)
