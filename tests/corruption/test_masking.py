"""BERT's masking against a slow version of its reference code (create_pretraining_data.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.corruption.masking import choose_positions, mask_tokens, max_predictions, num_to_predict
from jaxlm.errors import UserError

V, MASK, PAD, CLS, SEP = 500, 4, 0, 1, 2
SPECIAL = np.arange(V) < 5


def rows(seed: int, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows `[CLS] … [SEP]` of different sizes, and their attention mask."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, length + 1, batch)
    sizes[0] = length
    ids = rng.integers(5, V, (batch, length))
    ids[:, 0] = CLS
    ids[np.arange(batch), sizes - 1] = SEP
    real = np.arange(length)[None] < sizes[:, None]
    return np.where(real, ids, PAD).astype(np.int32), real.astype(np.int32)


@jax.jit
def corrupt(key: jax.Array, ids: jax.Array, mask: jax.Array):
    slots = max_predictions(ids.shape[1], 0.15)
    return mask_tokens(key, ids, jnp.asarray(SPECIAL), mask=MASK, attention_mask=mask, slots=slots, random_ids=(0, V))


def run(seed: int, ids: np.ndarray, mask: np.ndarray):
    return jax.device_get(corrupt(jax.random.key(seed), ids, mask))


@pytest.mark.parametrize(
    ("size", "count"),
    # At 190 and 350 the product is exactly a half in float64, as in the reference, and above it in float32.
    [(8, 1), (10, 2), (64, 10), (100, 15), (126, 19), (128, 19), (190, 28), (350, 52), (512, 77), (0, 0)],
)
def test_count_is_specs_golden_table(size, count):
    assert int(num_to_predict(jnp.array([size]), 0.15, 77, 512)[0]) == count


def test_tokens_with_a_preference_of_zero_stay():
    ids, mask = rows(0, 16, 64)
    preference = (np.arange(V) % 3 == 0).astype(np.float32)
    options = dict(mask=MASK, attention_mask=jnp.asarray(mask), slots=30, random_ids=(0, V), rate=0.45)
    run = jax.jit(lambda key, **more: mask_tokens(
        key, jnp.asarray(ids), jnp.asarray(SPECIAL), preference=jnp.asarray(preference), **options, **more))
    m = run(jax.random.key(0))
    labels = m.masked_labels[m.masked_weights > 0]
    assert len(labels) and not (labels % 3).any() and not SPECIAL[labels].any()
    allowed = ((ids % 3 == 0) & ~SPECIAL[ids]).sum(axis=1)
    np.testing.assert_array_equal(m.masked_weights.sum(axis=1), np.minimum(allowed, np.floor(0.45 * mask.sum(axis=1))))
    with pytest.raises(UserError, match="a preference of tokens is for"):
        mask_tokens(jax.random.key(0), jnp.asarray(ids), jnp.asarray(SPECIAL), preference=jnp.asarray(preference),
                    word_start=jnp.asarray(~SPECIAL), **options)


def test_counts_rounded_at_random():
    """int(0.15 · size + u) of fairseq's mask_tokens_dataset.py, whose mean is 0.15 · size."""
    sizes = np.repeat([0, 3, 20, 64, 128], 4000)
    found = np.asarray(num_to_predict(jnp.asarray(sizes), 0.15, 20, 128, jax.random.key(0))).reshape(5, -1)
    assert [set(row.tolist()) for row in found] == [{0}, {0, 1}, {3}, {9, 10}, {19, 20}]
    np.testing.assert_allclose(found.mean(axis=1), [0, 0.45, 3, 9.6, 19.2], atol=5 * 0.5 / 4000**0.5)


def test_labels_restore_the_original_and_nothing_else_changes():
    ids, mask = rows(0, 16, 64)
    m = run(1, ids, mask)
    restored = m.input_ids.copy()
    for row in range(16):
        used = m.masked_weights[row] > 0
        positions = m.masked_positions[row][used]
        assert len(set(positions)) == used.sum() == max(1, round(0.15 * mask[row].sum()))
        assert (np.diff(positions) > 0).all()
        assert not SPECIAL[ids[row, positions]].any()
        assert (m.masked_labels[row][used] == ids[row, positions]).all()
        restored[row, positions] = m.masked_labels[row][used]
        untouched = np.setdiff1d(np.arange(64), positions)
        assert (m.input_ids[row, untouched] == ids[row, untouched]).all()
    assert (restored == ids).all()


def test_shares_and_positions_over_many_keys():
    """80/10/10 and uniform positions, within five standard errors of their expectations."""
    ids, mask = rows(2, 64, 128)
    masked = kept = other = total = 0
    hits = np.zeros(128)
    random_ids = np.zeros(V)
    for seed in range(60):
        m = run(seed, ids, mask)
        used = m.masked_weights > 0
        new = np.take_along_axis(m.input_ids, m.masked_positions, 1)[used]
        old = m.masked_labels[used]
        total += used.sum()
        masked += (new == MASK).sum()
        kept += (new == old).sum()
        other += ((new != old) & (new != MASK)).sum()
        np.add.at(random_ids, new[(new != old) & (new != MASK)], 1)
        np.add.at(hits, m.masked_positions[0][used[0]], 1)
    # A random token equals the original with probability 1/V and [MASK] with probability 1/V.
    for seen, expected in ((masked, 0.8 + 0.1 / V), (kept, 0.1 + 0.1 / V), (other, 0.1 * (1 - 2 / V))):
        assert abs(seen / total - expected) < 5 * np.sqrt(expected * (1 - expected) / total)
    # Row 0 is full: each of its 126 text positions is chosen with probability 19/126, [CLS] and [SEP] never.
    assert hits[0] == hits[127] == 0
    expected = 60 * 19 / 126
    assert np.abs(hits[1:127] - expected).max() < 5 * np.sqrt(expected)
    # Random tokens are uniform over all ids, special ones included: chi-square over the vocabulary.
    chi = ((random_ids - random_ids.sum() / V) ** 2 / (random_ids.sum() / V)).sum()
    assert random_ids[:4].sum() > 0
    assert chi < V + 6 * np.sqrt(2 * V)


def slow_whole_words(order: list[list[int]], count: int) -> set[int]:
    """Return the words chosen by the original loop, which takes words in order and skips one that would overflow."""
    taken: set[int] = set()
    for word in order:
        if len(taken) >= count:
            break
        if len(taken) + len(word) <= count:
            taken |= set(word)
    return taken


def words_of(candidates: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    words: list[list[int]] = []
    for i, is_candidate in enumerate(candidates):
        if not is_candidate:
            continue
        if starts[i] or i == 0 or not candidates[i - 1]:
            words.append([])
        words[-1].append(i)
    return words


def test_whole_words_follow_the_greedy_loop():
    """Same distribution as the loop: whole words only, never more than the count.

    Where slots are left, no unchosen word that was tried could have fitted at the end.
    """
    rng = np.random.default_rng(3)
    candidates = rng.random((64, 80)) < 0.9
    starts = rng.random((64, 80)) < 0.5
    count = rng.integers(1, 13, 64).astype(np.int32)
    arrays = jnp.asarray(candidates), jnp.asarray(count), 12, jnp.asarray(starts)
    choose = jax.jit(lambda k: choose_positions(k, *arrays))
    fast_sizes, slow_sizes = [], []
    for seed in range(20):
        positions, weights = jax.device_get(choose(jax.random.key(seed)))
        for row in range(64):
            words = words_of(candidates[row], starts[row])
            taken = set(positions[row][weights[row] > 0].tolist())
            assert len(taken) <= count[row]
            complete = [word for word in words if set(word) <= taken]
            assert set().union(*map(set, complete)) == taken
            left = count[row] - len(taken)
            assert all(len(word) > left for word in words if not set(word) <= taken)
            fast_sizes.append(len(taken) / count[row])
            order = [words[i] for i in rng.permutation(len(words))]
            slow_sizes.append(len(slow_whole_words(order, count[row])) / count[row])
    assert abs(np.mean(fast_sizes) - np.mean(slow_sizes)) < 5 * np.std(slow_sizes) / np.sqrt(len(slow_sizes)) + 1e-9


def test_a_word_piece_after_sep_begins_a_group():
    """Pieces on both sides of [SEP] never form one word, even where the second part begins within a word."""
    ids = jnp.array([[CLS, 10, 11, SEP, 12, 13, SEP, PAD]] * 64)
    starts = jnp.asarray(np.arange(V) == 10)
    choose = jax.jit(lambda key: mask_tokens(
        key, ids, jnp.asarray(SPECIAL), mask=MASK, attention_mask=(ids != PAD).astype(int), rate=0.3, slots=2,
        random_ids=(0, V), word_start=starts,
    ))
    m = jax.device_get(choose(jax.random.key(0)))
    assert {tuple(row) for row in m.masked_labels.tolist()} == {(10, 11), (12, 13)}


def test_empty_rows_ask_nothing():
    ids, mask = rows(0, 4, 32)
    ids[2], mask[2] = PAD, 0
    m = run(0, ids, mask)
    assert m.masked_weights[2].sum() == 0
    assert (m.input_ids[2] == PAD).all()
    assert m.masked_weights[[0, 1, 3]].sum(1).min() >= 1
