"""Replaced-token detection against SPEC section 11 and slow, obvious versions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlm.corruption.masking import draw_positions, mask_tokens
from jaxlm.corruption.replaced import max_replacements, sample_tokens, write_tokens


@pytest.mark.parametrize(
    ("length", "rate", "slots"), [(128, 0.15, 19), (512, 0.15, 79), (512, 0.25, 130), (128, 0.25, 32), (8, 0.01, 1)]
)
def test_slots_are_specs_golden_table(length, rate, slots):
    assert max_replacements(length, rate) == slots


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(temperature):
    logits = jnp.array([2.0, 0.0, 1.0, -1.0, 0.5])
    many = jnp.broadcast_to(logits, (200, 100, 5))
    drawn = np.asarray(jax.jit(sample_tokens, static_argnums=2)(jax.random.key(0), many, temperature))
    expected = np.exp(np.asarray(logits, np.float64) / temperature)
    expected *= drawn.size / expected.sum()
    assert scipy.stats.chisquare(np.bincount(drawn.ravel(), minlength=5), expected).pvalue > 1e-4


def test_samples_carry_no_gradient():
    def total(logits):
        return jnp.sum(sample_tokens(jax.random.key(0), logits).astype(jnp.float32))

    assert not np.any(jax.grad(total)(jnp.ones((2, 3, 4))))


def test_any_kind_of_key_will_do():
    logits = jnp.zeros((4, 8, 50))
    one, other = (sample_tokens(jax.random.split(jax.random.key(seed, impl="rbg"))[0], logits) for seed in (0, 1))
    assert (np.asarray(one) != np.asarray(other)).mean() > 0.8


def test_parts_draw_what_the_whole_does():
    key, logits = jax.random.key(0), jnp.zeros((4, 9, 50))
    parts = [sample_tokens(key, logits[:, at : at + 3], first=at) for at in (0, 3, 6)]
    np.testing.assert_array_equal(sample_tokens(key, logits), jnp.concatenate(parts, axis=1))


def test_write_tokens_against_a_loop():
    rng = np.random.default_rng(0)
    rows, length, slots = 6, 20, 8
    ids = rng.integers(0, 1000, (rows, length)).astype(np.int32)
    positions = rng.integers(0, 10, (rows, slots)).astype(np.int32)  # few places for many slots: duplicates
    weights = (rng.random((rows, slots)) < 0.7).astype(np.float32)
    tokens = rng.integers(0, 1000, (rows, slots)).astype(np.int32)
    expected = ids.copy()
    for r in range(rows):
        for p in range(length):
            written = [int(tokens[r, s]) for s in range(slots) if weights[r, s] and positions[r, s] == p]
            if written:
                expected[r, p] = sum(written) // len(written)
    assert any(len({*p[w > 0]}) < (w > 0).sum() for p, w in zip(positions, weights, strict=True))
    np.testing.assert_array_equal(jax.jit(write_tokens)(ids, positions, weights, tokens), expected)


@pytest.mark.parametrize(("candidates", "draws", "distinct"), [(125, 19, 17.7), (509, 77, 71.5)])
def test_draws_with_replacement_repeat_as_often_as_spec_says(candidates, draws, distinct):
    rows, length = 1000, candidates + 3
    places = np.zeros((rows, length), bool)
    places[:, 1 : candidates + 1] = True
    draw = jax.jit(draw_positions, static_argnums=3)
    positions, weights = jax.device_get(draw(jax.random.key(3), places, np.full(rows, draws), draws + 2))
    assert (weights.sum(1) == draws).all() and (positions[weights == 0] == 0).all()
    chosen = positions[:, :draws]
    assert chosen.min() == 1 and chosen.max() == candidates
    found = np.mean([len(set(row)) for row in chosen])
    assert abs(found - distinct) < 0.25
    assert scipy.stats.chisquare(np.bincount(chosen.ravel())[1:]).pvalue > 1e-4


def test_draws_from_nothing_are_no_draws():
    _, weights = draw_positions(jax.random.key(0), jnp.zeros((2, 9), bool), jnp.array([3, 0]), 4)
    assert not np.any(weights)


def test_repeated_positions_are_masked_if_any_of_their_draws_is():
    rows, length, mask = 400, 8, 4
    ids = np.full((rows, length), 9, np.int32)
    masked = jax.device_get(
        mask_tokens(
            jax.random.key(0), jnp.asarray(ids), jnp.arange(20) < 5, mask=mask, attention_mask=jnp.ones_like(ids),
            rate=0.5, slots=4, mask_share=0.5, random_share=0.0, vocab_size=20, with_replacement=True,
        )
    )
    assert (masked.labels == 9).all() and set(np.unique(masked.input_ids)) == {mask, 9}
    hits = np.zeros((rows, length), int)
    np.add.at(hits, (np.arange(rows)[:, None], masked.positions), 1)
    assert (masked.input_ids[hits == 0] == 9).all()
    for times in (1, 2, 3):  # 1 - P(every draw keeps)
        group = masked.input_ids[hits == times] == mask
        assert abs(group.mean() - (1 - 0.5**times)) < 5 * 0.5 / np.sqrt(group.size)
