"""Replaced-token detection against slow versions of the reference code (google-research/electra)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlm.corruption.masking import draw_positions, mask_tokens
from jaxlm.corruption.replaced import max_replacements, sample_tokens, write_tokens
from tests.params import first_fast


@pytest.mark.parametrize(
    ("length", "rate", "slots"), [(128, 0.15, 19), (512, 0.15, 79), (512, 0.25, 130), (128, 0.25, 32), (8, 0.01, 1)]
)
def test_slots_are_specs_golden_table(length, rate, slots):
    assert max_replacements(length, rate) == slots


def draw(uniform, logits, temperature=1.0) -> np.ndarray:
    return np.asarray(jax.jit(sample_tokens, static_argnums=2)(uniform, logits, temperature))


def softmax(logits, temperature: float = 1.0) -> np.ndarray:
    scores = np.asarray(logits, np.float64) / temperature
    scores = np.exp(scores - scores.max())
    return scores / scores.sum()


@pytest.mark.parametrize(("vocab", "temperature"), first_fast(
    [(129, 0.5), *((vocab, temperature) for vocab in (1, 5, 127, 128, 300) for temperature in (1.0, 0.5, 3.0))]
))
def test_samples_follow_the_softmax(vocab, temperature):
    logits = jnp.asarray(np.random.default_rng(vocab).normal(0, 1.5, vocab), jnp.float32)
    uniform = jax.random.uniform(jax.random.key(0), (200, 100))
    drawn = draw(uniform, jnp.broadcast_to(logits, (200, 100, vocab)), temperature)
    assert drawn.dtype == np.int32 and drawn.min() >= 0 and drawn.max() < vocab
    expected = softmax(logits, temperature) * drawn.size
    rare = expected < 5  # the chi-square approximation needs larger counts; rare tokens are pooled
    counts = np.bincount(drawn.ravel(), minlength=vocab)
    if rare.any():
        expected, counts = (np.append(x[~rare], x[rare].sum()) for x in (expected, counts))
    if len(expected) > 1:
        assert scipy.stats.chisquare(counts, expected).pvalue > 1e-4


def test_the_place_is_where_the_cumulative_distribution_passes_the_number():
    """Same tokens as numpy's search in float64, at numbers that are not within rounding of a border."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (40, 30, 300)).astype(np.float32)
    uniform = rng.random((40, 30)).astype(np.float32)
    found = draw(uniform, logits)
    clear = 0
    for r, s in np.ndindex(40, 30):
        borders = np.cumsum(softmax(logits[r, s]))
        if np.abs(borders - uniform[r, s]).min() > 1e-5:
            assert found[r, s] == np.searchsorted(borders, uniform[r, s], side="right")
            clear += 1
    assert clear > 1000


@pytest.mark.parametrize("number", [0.0, np.nextafter(np.float32(1), np.float32(0))])
@pytest.mark.parametrize("vocab", first_fast([130, 1, 2, 100, 128, 1000]))
def test_the_ends_of_the_numbers_stay_in_the_vocabulary(number, vocab):
    """0 draws the first possible token; the largest number below 1 draws a likely one at the end."""
    rng = np.random.default_rng(vocab)
    logits = np.concatenate([
        rng.normal(0, scale, (50, 4, vocab)) for scale in (0.0, 1.0, 30.0, 1000.0)  # the last ones are almost certain
    ]).astype(np.float32)
    impossible = rng.random(logits.shape) < 0.3
    impossible[..., rng.integers(vocab)] = False
    logits = np.where(impossible & (rng.random((200, 1, 1)) < 0.5), -1e30, logits).astype(np.float32)
    tokens = draw(np.full((200, 4), number, np.float32), logits)
    assert tokens.min() >= 0 and tokens.max() < vocab
    chances = np.apply_along_axis(softmax, -1, logits)
    drawn = np.take_along_axis(chances, tokens[..., None], -1)[..., 0]
    assert (drawn > 1e-45).all()  # float32's smallest number above 0
    if number == 0:
        possible = np.argmax(chances > 1e-37, axis=-1)
        assert (tokens <= possible).all()
    else:
        behind = 1 - np.take_along_axis(np.cumsum(chances, -1), tokens[..., None], -1)[..., 0]
        assert (behind < 1e-5).all()


@pytest.mark.slow
def test_extreme_logits():
    """A certain token is always drawn, equal logits of any size are drawn alike, an impossible token never is."""
    uniform = jax.random.uniform(jax.random.key(1), (100, 100))
    certain = jnp.full((100, 100, 200), -1e4).at[..., 150].set(1e4)
    assert (draw(uniform, certain) == 150).all()
    for level in (-1e4, 0.0, 1e4, 3e38):
        drawn = draw(uniform, jnp.full((100, 100, 200), level))
        assert scipy.stats.chisquare(np.bincount(drawn.ravel(), minlength=200)).pvalue > 1e-4
    half = jnp.where(jnp.arange(200) % 2 == 0, -1e30, 0.0)
    drawn = draw(uniform, jnp.broadcast_to(half, (100, 100, 200)))
    assert (drawn % 2 == 1).all() and len(np.unique(drawn)) == 100


def test_samples_carry_no_gradient():
    def total(logits):
        return jnp.sum(sample_tokens(jnp.full((2, 3), 0.5), logits).astype(jnp.float32) + jnp.sum(0.0 * logits))

    assert not np.any(jax.jit(jax.grad(total))(jnp.ones((2, 3, 4))))


def test_slots_are_drawn_for_themselves():
    """The token of a slot depends on its own number and logits only."""
    rng = np.random.default_rng(0)
    uniform, logits = rng.random((4, 9)).astype(np.float32), rng.normal(size=(4, 9, 150)).astype(np.float32)
    parts = [draw(uniform[:, at : at + 3], logits[:, at : at + 3]) for at in (0, 3, 6)]
    np.testing.assert_array_equal(draw(uniform, logits), np.concatenate(parts, axis=1))


def test_write_tokens_against_a_loop():
    rng = np.random.default_rng(0)
    rows, length, slots = 6, 20, 8
    ids = rng.integers(0, 1000, (rows, length)).astype(np.int32)
    positions = rng.integers(0, 10, (rows, slots)).astype(np.int32)  # few positions for many slots: duplicates
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


@pytest.mark.parametrize(("candidates", "draws", "distinct"), first_fast([(125, 19, 17.7), (509, 77, 71.5)]))
def test_draws_with_replacement_repeat_as_often_as_expected(candidates, draws, distinct):
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


@pytest.mark.slow
def test_repeated_positions_are_masked_if_any_of_their_draws_is():
    rows, length, mask = 400, 8, 4
    ids = np.full((rows, length), 9, np.int32)
    masked = jax.device_get(
        mask_tokens(
            jax.random.key(0), jnp.asarray(ids), jnp.arange(20) < 5, mask=mask, attention_mask=jnp.ones_like(ids),
            rate=0.5, slots=4, mask_share=0.5, random_share=0.0, random_ids=(0, 20), with_replacement=True,
        )
    )
    assert (masked.masked_labels == 9).all() and set(np.unique(masked.input_ids)) == {mask, 9}
    hits = np.zeros((rows, length), int)
    np.add.at(hits, (np.arange(rows)[:, None], masked.masked_positions), 1)
    assert (masked.input_ids[hits == 0] == 9).all()
    for times in (1, 2, 3):  # 1 - P(every draw keeps)
        group = masked.input_ids[hits == times] == mask
        assert abs(group.mean() - (1 - 0.5**times)) < 5 * 0.5 / np.sqrt(group.size)
