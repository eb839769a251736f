"""ALBERT's n-gram masks and sentence order against a slow version of the original loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.corruption.masking import choose_positions, mask_tokens
from jaxlm.corruption.pairs import ordered_pairs
from jaxlm.types import TokenBatch
from tests.params import first_fast

LONGEST = 3
WORDS = [1, 1, 2, 1, 3, 1, 1, 1, 2, 1, 1, 4, 1, 2, 1, 1, 1, 1, 2, 1, 3, 1, 1, 2, 1, 1, 1, 2, 1, 1]  # tokens of each
SIZE, COUNT = sum(WORDS), 7
ENDS = np.cumsum(WORDS)
SEP_AT = 20  # a symbol that is no candidate, between two words


def candidates() -> tuple[np.ndarray, np.ndarray]:
    """Return candidates and word starts of one row: symbols first and in the middle, two positions of padding last."""
    text = np.zeros(SIZE, bool)
    text[ENDS - WORDS] = True
    starts = np.concatenate([[False], text[:SEP_AT], [False], text[SEP_AT:], [False, False]])
    real = np.concatenate([[False], np.ones(SEP_AT, bool), [False], np.ones(SIZE - SEP_AT, bool), [False, False]])
    return real, starts


def slow_ngrams(rng: np.random.Generator) -> list[list[int]]:
    """Return the n-grams of words that the original loop chooses, in its order."""
    taken, used = [], set()
    for first in rng.permutation(len(WORDS)):
        tokens = sum(WORDS[word] for word in used)
        if tokens >= COUNT:
            break
        n = 1 + np.searchsorted([6 / 11, 9 / 11], rng.random(), side="right")
        n = min(n, len(WORDS) - first)
        while n > 0 and tokens + sum(WORDS[first : first + n]) > COUNT:
            n -= 1
        words = list(range(first, first + n))
        if n > 0 and not used & set(words):
            used |= set(words)
            taken.append(words)
    return taken


def runs(words: set[int]) -> list[int]:
    """Return the lengths of the runs of consecutive words."""
    lengths, last = [], None
    for word in sorted(words):
        if last == word - 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
        last = word
    return lengths


@functools.cache
def masked_words(trials: int = 4000) -> list[set[int]]:
    """Return the masked words, all of whose tokens must be masked."""
    real, starts = candidates()
    rows = [jnp.tile(jnp.asarray(array), (trials, 1)) for array in (real, starts)]
    positions, weights = jax.device_get(jax.jit(
        lambda key: choose_positions(key, rows[0], jnp.full(trials, COUNT), COUNT, rows[1], LONGEST)
    )(jax.random.key(0)))
    word = np.full(len(real), -1)
    word[real] = np.repeat(np.arange(len(WORDS)), WORDS)
    result = []
    for row in range(trials):
        used = positions[row][weights[row] > 0]
        assert (np.diff(used) > 0).all() and real[used].all() and len(used) <= COUNT
        words = set(word[used].tolist())
        assert sum(WORDS[w] for w in words) == len(used)  # whole words
        result.append(words)
    return result


@pytest.mark.slow
def test_words_and_runs_have_the_distribution_of_the_loop():
    ours = masked_words()
    rng = np.random.default_rng(1)
    theirs = [{word for ngram in slow_ngrams(rng) for word in ngram} for _ in range(len(ours))]

    def shares(samples: list[set[int]]) -> np.ndarray:
        """Return frequencies over the trials: masked words, numbers of masked tokens, and runs of 1, 2, … words."""
        counts = np.zeros((len(samples), len(WORDS) + COUNT + 8))
        for row, words in enumerate(samples):
            counts[row, list(words)] = 1
            counts[row, len(WORDS) + sum(WORDS[w] for w in words)] = 1
            np.add.at(counts[row, len(WORDS) + COUNT :], runs(words), 1)
        return counts

    first, second = shares(ours), shares(theirs)
    spread = np.sqrt((first.var(0) + second.var(0)) / len(ours))
    assert (np.abs(first.mean(0) - second.mean(0)) <= 4.5 * spread).all()
    # Words at the end are in fewer n-grams and long words fit less often, so the distributions are not trivial.
    assert second.mean(0)[: len(WORDS)].std() > 0.02


def test_the_law_of_n():
    """6/11, 3/11, 2/11: three tokens of a long row are one n-gram, two (the second shortened to the rest) or three.

    N-grams that happen to touch are one row in a hundred.
    """
    trials, length = 4000, 512
    full = jnp.ones((trials, length), bool)
    positions, weights = jax.device_get(jax.jit(
        lambda key: choose_positions(key, full, jnp.full(trials, 3), 3, None, LONGEST)
    )(jax.random.key(1)))
    assert (weights.sum(1) == 3).all()
    joins = (np.diff(positions, axis=1) == 1).sum(1)
    shares = [(joins == count).mean() for count in (2, 1, 0)]
    np.testing.assert_allclose(shares, [2 / 11, 3 / 11 + 6 / 11 * 5 / 11, (6 / 11) ** 2], atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("count", first_fast([200, 0, 1]))
def test_counts_that_cannot_be_met(count):
    """A count of none, of one, or above the number of candidates: never more than asked for, and no endless loop."""
    real, starts = candidates()
    _, weights = choose_positions(
        jax.random.key(2), jnp.asarray(real)[None], jnp.array([count]), 64, jnp.asarray(starts)[None], LONGEST
    )
    found = int(weights.sum())
    assert found == {0: 0, 1: 1}.get(count, found) and found <= min(count, SIZE)
    if count == 200:
        assert found > SIZE // 2  # an n-gram that overlaps another is skipped, but most words are chosen


def test_masking_by_ngrams_restores_and_replaces_by_token():
    ids = jnp.asarray(np.random.default_rng(3).integers(5, 500, (256, 64)), jnp.int32)
    m = jax.device_get(jax.jit(lambda key: mask_tokens(
        key, ids, jnp.arange(500) < 5, mask=4, attention_mask=jnp.ones_like(ids), slots=10, random_ids=(0, 500),
        word_start=jnp.arange(500) % 3 > 0, longest_ngram=LONGEST,
    ))(jax.random.key(4)))
    used = m.masked_weights > 0
    restored = m.input_ids.copy()
    rows = np.broadcast_to(np.arange(256)[:, None], m.masked_positions.shape)[used]
    restored[rows, m.masked_positions[used]] = m.masked_labels[used]
    assert (restored == ids).all() and used.sum() > 2500
    new = m.input_ids[rows, m.masked_positions[used]]
    assert abs((new == 4).mean() - 0.8) < 0.04 and abs((new == m.masked_labels[used]).mean() - 0.1) < 0.03
    # Neighbours are replaced independently of one another.
    beside = np.flatnonzero((np.diff(m.masked_positions[used]) == 1) & (np.diff(rows) == 0))
    assert 0.5 < ((new == 4)[beside] & (new == 4)[beside + 1]).mean() < 0.75


EVERY = 7  # a sentence ends with each token whose number is a multiple of it


@functools.cache
def pairs(seed: int = 0):
    """Return rows of all sizes whose tokens count up from a random start."""
    rows, length = 400, 40
    rng = np.random.default_rng(seed)
    tokens = 100 + rng.integers(0, EVERY, rows)[:, None] + np.arange(length)[None]
    sizes = rng.integers(0, length + 1, rows)
    sizes[:4] = [0, 1, 2, length]
    real = np.arange(length) < sizes[:, None]
    batch = TokenBatch(np.where(real, tokens, 0).astype(np.int32), real.astype(np.int32))
    everywhere, ends = jnp.ones(200, bool), jnp.arange(200) % EVERY == 0
    return sizes, batch, jax.device_get(jax.jit(lambda key: ordered_pairs(
        key, batch, everywhere, ends, cls=1, sep=2, pad=0
    ))(jax.random.key(seed)))


def test_half_of_the_pairs_change_places():
    sizes, batch, p = pairs()
    assert not p.label[sizes < 2].any() and (p.has_pair == (sizes >= 2)).all()
    for row in np.flatnonzero(sizes >= 2):
        ids = p.input_ids[row][: p.attention_mask[row].sum()].tolist()
        middle = ids.index(2)
        a, b = ids[1:middle], ids[middle + 1 : -1]
        source = p.source[row][: len(ids)]
        assert [int(batch.tokens.reshape(-1)[place]) if place >= 0 else 2 for place in source[1:]] == ids[1:]
        assert source[0] == -1 and set(source[source >= 0] // 40) == {row} and (p.source[row][len(ids) :] == -1).all()
        text, found = batch.tokens[row][: sizes[row]].tolist(), b + a if p.label[row] else a + b
        assert found == list(range(found[0], found[-1] + 1)) and set(found) <= set(text) and a and b
        assert p.token_type_ids[row].tolist() == [0] * (middle + 1) + [1] * (len(b) + 1) + [0] * (43 - len(ids))
        # Whole sentences, without those that begin or end outside the row, or whole words.
        boundaries = [token for token in range(text[1], text[-1] + 2) if token % EVERY == 1]
        if len(boundaries) > 2 and found not in (text, text[:-1]):
            assert (found[0], found[-1] + 1) == (boundaries[0], boundaries[-1])
            assert all(part[0] % EVERY == 1 and part[-1] % EVERY == 0 for part in (a, b))
        else:
            assert found in (text, text[:-1]) and abs(len(a) - len(b)) <= 1  # the last word may not be whole
    share = p.label[sizes >= 2].mean()
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt((sizes >= 2).sum())


def test_the_ends_of_segments_do_not_tell_the_order():
    """Sentence ends before each [SEP] and the longer part are as frequent in swapped rows as in others."""
    sizes, _, p = pairs(1)
    seen = {0: [], 1: []}
    for row in np.flatnonzero(sizes >= 2):
        ids = p.input_ids[row][: p.attention_mask[row].sum()].tolist()
        middle = ids.index(2)
        longer = np.sign(2 * middle + 1 - len(ids))
        ends = (ids[middle - 1] % EVERY == 0, ids[-2] % EVERY == 0, ids[1] % EVERY == 1, longer)
        seen[int(p.label[row])].append(ends)
    shares = [np.mean(seen[label], axis=0) for label in (0, 1)]
    assert (np.abs(shares[0] - shares[1]) < 0.2).all()  # 4 standard errors; cut without care, the first differ by 0.6
    assert shares[0][0] > 0.4
