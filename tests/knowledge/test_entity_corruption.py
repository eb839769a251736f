"""Corruption of entities: its law, its candidates, and rows with more entities than slots."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from jaxlm.knowledge.entity_corruption import NONE, UNUSED, corrupt_entities


@functools.partial(jax.jit, static_argnames="slots")
def corrupt(key, entities, slots):
    return corrupt_entities(key, entities, slots=slots)


def test_the_law_over_a_hundred_thousand_entities():
    """5 % one of the batch, each equally likely and itself included; 15 % none; 80 % as they are."""
    rows, length, count = 512, 256, 40
    entities = np.full((rows, length), NONE, np.int32)
    entities[:, 1::2] = 1000 + 7 * np.random.default_rng(0).integers(0, count, (rows, length // 2))
    kinds, drawn, total = np.zeros(3), np.zeros(count), 0
    for seed in range(2):
        found = jax.device_get(corrupt(jax.random.key(seed), jnp.asarray(entities), slots=128))
        assert found.candidates[: count + 2].tolist() == [NONE, *range(1000, 1000 + 7 * count, 7), UNUSED]
        read = found.entities[:, 1::2]
        is_other = (read != entities[:, 1::2]) & (read != NONE)
        kinds += [is_other.sum(), (read == NONE).sum(), (read == entities[:, 1::2]).sum()]
        drawn += np.bincount((read[is_other] - 1000) // 7, minlength=count)
        total += read.size
        assert (found.entities[:, ::2] == NONE).all() and found.entity_weights.sum() == read.size
    assert total > 100_000
    other = 0.05 * (1 - 1 / count)
    assert scipy.stats.chisquare(kinds, total * np.array([other, 0.15, 0.8 + 0.05 / count])).pvalue > 1e-4
    # A candidate replaces others than itself, of which there are as many as it has not of its own.
    own = np.bincount((entities[entities >= 0] - 1000) // 7, minlength=count)
    expected = drawn.sum() * (own.sum() - own) / (own.sum() - own).sum()
    assert scipy.stats.chisquare(drawn, expected).pvalue > 1e-4


def test_what_is_dropped_does_not_depend_on_the_place():
    entities = np.arange(64 * 32, dtype=np.int32).reshape(64, 32)
    share = np.mean([np.asarray(corrupt(jax.random.key(s), entities, slots=32).entities) == NONE for s in range(60)], 0)
    assert scipy.stats.kstest((share.ravel() - 0.15) / np.sqrt(0.15 * 0.85 / 60), "norm").statistic < 0.1
    assert abs(np.corrcoef(share[:, 1:].ravel(), share[:, :-1].ravel())[0, 1]) < 0.1


def test_labels_are_the_original_entities_of_the_first_slots():
    entities = np.array([
        [-1, 9, -1, 4, 9, -1, 7], [-1, -1, -1, -1, -1, -1, -1], [3, -1, -1, -1, -1, -1, 0], [5, 5, 6, 2, 2, 2, 2],
    ], np.int32)
    found = jax.device_get(corrupt(jax.random.key(1), entities, slots=3))
    assert found.entity_positions.tolist() == [[1, 3, 4], [0, 0, 0], [0, 6, 0], [0, 1, 2]]
    assert found.entity_weights.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1]]
    # 7 and 2 have no slot: they are read by nobody and are no candidates.
    assert found.candidates.tolist() == [NONE, 0, 3, 4, 5, 6, 9] + [UNUSED] * 6
    original = found.candidates[found.entity_labels]
    np.testing.assert_array_equal(np.where(found.entity_weights > 0, original, -9), [
        [9, 4, 9], [-9, -9, -9], [3, 0, -9], [5, 5, 6],
    ])
    assert (found.entities[0, 5:] == NONE).all() and (found.entities[3, 3:] == NONE).all()
    np.testing.assert_array_equal(found.entities[1], NONE)


def test_a_batch_without_entities():
    found = jax.device_get(corrupt(jax.random.key(0), np.full((2, 6), NONE, np.int32), slots=2))
    assert not found.entity_weights.any() and (found.entities == NONE).all()
    assert found.candidates.tolist() == [NONE] + [UNUSED] * 4
