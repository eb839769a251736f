"""Spans and orders of permutation language modelling, against the official sampling in NumPy."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.corruption.permutation import choose_spans, draw_order
from tests.params import first_fast

LENGTH, COUNT = 48, 8


def official_spans(rng: np.random.Generator, word_start: np.ndarray, count: int) -> np.ndarray:
    """Run the official procedure for one row, token by token (mask_alpha 6, mask_beta 1, spans of 1 to 5 tokens)."""
    length = len(word_start)
    chosen = np.zeros(length, bool)
    shares = 1.0 / np.arange(1, 6)
    begin = 0
    while begin < length and chosen.sum() < count:
        size = min(rng.choice(np.arange(1, 6), p=shares / shares.sum()), count - chosen.sum())
        left = rng.integers(6 * size)
        start = begin + left
        while start < length and not word_start[start]:
            start += 1
        if start >= length or start + size >= length:
            break
        chosen[start : start + size] = True
        begin = start + size + 6 * size - left
    while chosen.sum() < count:
        chosen[rng.integers(length)] = True
    return chosen


@pytest.mark.parametrize("every", first_fast([3, 1]))
def test_spans_have_the_law_of_the_official_sampling(every):
    """Frequencies of each position, and numbers of runs and of chosen tokens in each half."""
    draws, rng = 6000, np.random.default_rng(0)
    word_start = np.arange(LENGTH) % every == 0
    theirs = np.stack([official_spans(rng, word_start, COUNT) for _ in range(draws)])
    ours = np.asarray(jax.jit(choose_spans, static_argnums=2)(
        jax.random.key(0), jnp.broadcast_to(word_start, (draws, LENGTH)), COUNT
    ))
    assert (ours.sum(axis=1) == COUNT).all()
    # 5 standard deviations of the difference of two shares of at most 1/2.
    tolerance = 5 * np.sqrt(2 * 0.25 / draws)
    np.testing.assert_allclose(ours.mean(axis=0), theirs.mean(axis=0), atol=tolerance)

    def law(values):
        return {key: count / draws for key, count in collections.Counter(values.tolist()).items()}

    for statistic in (
        lambda x: (x[:, 1:] > x[:, :-1]).sum(axis=1), lambda x: x[:, : LENGTH // 2].sum(axis=1),
        lambda x: np.argmax(x, axis=1), lambda x: LENGTH - np.argmax(x[:, ::-1], axis=1),
    ):
        mine, official = law(statistic(ours)), law(statistic(theirs))
        for key in mine.keys() | official.keys():
            assert abs(mine.get(key, 0) - official.get(key, 0)) < tolerance, key


@pytest.mark.slow
def test_a_row_of_any_length_has_its_count():
    for length, count in ((1, 1), (9, 9)):
        chosen = choose_spans(jax.random.key(1), jnp.ones((4, length), bool), count)
        assert (np.asarray(chosen).sum(axis=1) == count).all()


def visible(order):
    """Return the [query, key] masks of one row for the content stream and the query stream."""
    query = np.asarray(order.rank)[None, :] < np.asarray(order.limit)[:, None]
    return query, query | np.eye(len(query), dtype=bool)


def official_mask(index: np.ndarray, chosen: np.ndarray, special: np.ndarray) -> np.ndarray:
    """Return the [query, key] mask of one block by the official rule for the order `index`."""
    target, plain = chosen & ~special, ~chosen & ~special
    order = np.where(plain, -1, index)
    own = np.where(target, order, order + 1)
    return ~((own[:, None] <= order[None, :]) & ~plain[None, :])


def test_masks_are_the_official_ones():
    rng = np.random.default_rng(0)
    chosen, special = rng.random((5, 12)) < 0.4, np.zeros((5, 12), bool)
    special[:, [8, 11]] = True
    order = draw_order(jax.random.key(0), jnp.asarray(chosen), jnp.asarray(special), 2)
    for row in range(5):
        query, _ = visible(jax.tree.map(lambda x, row=row: x[row], order))
        assert not query[:6, 6:].any() and query[6:, :6].all()
        for half in (slice(0, 6), slice(6, 12)):
            known = np.asarray(order.rank[row, half])
            index = known - known.min()  # any numbers in the same order give the same mask
            expected = official_mask(index, chosen[row, half], special[row, half])
            np.testing.assert_array_equal(query[half, half], expected)


def test_every_order_of_the_targets_is_equally_likely():
    chosen = jnp.asarray(np.tile([True, False, True, True], (6000, 1)))
    order = draw_order(jax.random.key(2), chosen, jnp.zeros_like(chosen), 1)
    found = collections.Counter(tuple(np.argsort(row)) for row in np.asarray(order.rank)[:, [0, 2, 3]].tolist())
    assert len(found) == 6
    np.testing.assert_allclose(np.array(list(found.values())) / 6000, 1 / 6, atol=5 * np.sqrt(5 / 36 / 6000))
