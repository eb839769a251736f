"""Next-sentence pairs: what they keep, how often they swap, with whom."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlm.corruption.pairs import sentence_pairs, shorten, single_segments
from jaxlm.types import TokenBatch

PAD, CLS, SEP = 0, 1, 2


def batch(sizes: list[int], length: int) -> TokenBatch:
    """Token = 1000·row + position, so that every token tells where it came from."""
    tokens = 1000 * (1 + np.arange(len(sizes)))[:, None] + np.arange(length)[None]
    real = np.arange(length)[None] < np.array(sizes)[:, None]
    return TokenBatch(np.where(real, tokens, PAD).astype(np.int32), real.astype(np.int32))


@functools.partial(jax.jit, static_argnames="rate")
def make_pairs(key: jax.Array, b: TokenBatch, rate: float):
    return sentence_pairs(key, b, cls=CLS, sep=SEP, pad=PAD, random_rate=rate)


def pairs(seed: int, b: TokenBatch, rate: float = 0.5):
    return jax.device_get(make_pairs(jax.random.key(seed), b, rate=rate))


def expected_row(b: TokenBatch, row: int, partner: int, swapped: bool = False) -> tuple[list[int], list[int]]:
    text = lambda r: [int(t) for t in b.tokens[r] if t]  # noqa: E731
    halves = lambda t: (t[: len(t) // 2], t[len(t) // 2 :])  # noqa: E731
    (a, rest), (_, other) = halves(text(row)), halves(text(partner))
    if partner != row:
        shorter = min(len(rest), len(other))
        a, rest = a[-shorter:], (other if swapped else rest)[:shorter]
    return [CLS, *a, SEP, *rest, SEP], [0] * (len(a) + 2) + [1] * (len(rest) + 1)


def test_rows_are_what_the_formula_says():
    b = batch([29, 29, 10, 2, 1, 0, 28, 5], 29)
    partners = {0: 1, 1: 0, 6: 2, 2: 6, 7: 3, 3: 7, 4: 4}  # by size, two by two
    swaps = {row: set() for row in partners}
    for seed in range(40):
        p = pairs(seed, b)
        assert p.input_ids[5].tolist() == [PAD] * 32 and not p.has_pair[5] and not p.is_random[5]
        for row, partner in partners.items():
            ids = p.input_ids[row][p.attention_mask[row] > 0].tolist()
            assert p.has_pair[row] == (row != 4)
            swaps[row].add(bool(p.is_random[row]))
            want_ids, want_types = expected_row(b, row, partner, bool(p.is_random[row]))
            assert ids == want_ids
            assert p.token_type_ids[row][: len(ids)].tolist() == want_types
            assert (p.input_ids[row][len(ids) :] == PAD).all() and (p.token_type_ids[row][len(ids) :] == 0).all()
    assert all(swaps[row] == ({False} if row == 4 else {False, True}) for row in partners)


def test_rows_of_one_size_have_every_partner():
    b, met = batch([20] * 6, 20), {row: set() for row in range(6)}
    for seed in range(120):
        for row, ids in enumerate(pairs(seed, b, rate=1.0).input_ids):
            met[row].add(int(ids[-2]) // 1000 - 1)
    assert all(met[row] == set(range(6)) - {row} for row in range(6))


def test_sizes_do_not_tell_what_was_swapped():
    """With the same key, hence the same partners, rows have the same shape whether all swap or none."""
    b = batch(np.random.default_rng(0).integers(0, 31, 33).tolist(), 30)
    able = int((b.segment_ids.sum(1) >= 2).sum())
    for seed in range(20):
        none, every = pairs(seed, b, rate=1e-9), pairs(seed, b, rate=1.0)
        assert none.is_random.sum() == 0 and every.is_random.sum() == able - able % 2
        np.testing.assert_array_equal(none.attention_mask, every.attention_mask)
        np.testing.assert_array_equal(none.token_type_ids, every.token_type_ids)


def test_nothing_is_cut_where_nothing_is_swapped():
    b = batch([29, 10, 2, 17], 29)
    p = pairs(0, b, rate=0.0)
    for row in range(4):
        assert p.input_ids[row][p.attention_mask[row] > 0].tolist() == expected_row(b, row, row)[0]


def test_text_stays_joined_across_the_middle():
    b = batch(np.random.default_rng(1).integers(2, 31, 32).tolist(), 30)
    p = pairs(3, b, rate=1e-9)
    for row in range(32):
        text = [int(t) for t in p.input_ids[row] if t > SEP]
        assert text == list(range(text[0], text[0] + len(text)))


def test_half_of_the_rows_are_swapped():
    b = batch([30] * 64, 30)
    share = np.mean([pairs(seed, b).is_random.mean() for seed in range(60)])
    assert abs(share - 0.5) < 5 * np.sqrt(0.25 / (60 * 64))
    assert pairs(0, b, rate=0.0).is_random.sum() == 0
    assert pairs(0, b, rate=1.0).is_random.sum() == 64


def test_a_batch_of_one_row_has_no_partner():
    p = pairs(0, batch([20], 20), rate=1.0)
    assert p.is_random.tolist() == [0]
    assert p.input_ids[0].tolist() == expected_row(batch([20], 20), 0, 0)[0]


def test_single_segments():
    b = batch([5, 0, 3], 5)
    device = TokenBatch(jnp.asarray(b.tokens), jnp.asarray(b.segment_ids))
    ids, mask = single_segments(device, cls=CLS, sep=SEP, pad=PAD)
    assert ids.tolist() == [[1, 1000, 1001, 1002, 1003, 1004, 2], [0] * 7, [1, 3000, 3001, 3002, 2, 0, 0]]
    assert mask.tolist() == [[1] * 7, [0] * 7, [1] * 5 + [0] * 2]


@pytest.mark.parametrize(("rate", "least"), [(0.1, 2), (0.05, 5), (1.0, 2), (0.0, 2)])
def test_short_rows(rate, least):
    """BERT's short_seq_prob of 0.1 from 2 tokens on, ELECTRA's 0.05 from 5; each length as often as any other."""
    width, rows, draws = 29, 64, 200
    b = batch([width] * rows, width)
    cut = jax.jit(lambda key: shorten(key, b, rate=rate, least=least))
    sizes = []
    for seed in range(draws):
        short = jax.device_get(cut(jax.random.key(seed)))
        size = (short.segment_ids > 0).sum(1)
        kept = np.arange(width) < size[:, None]
        np.testing.assert_array_equal(short.tokens, np.where(kept, b.tokens, PAD))
        np.testing.assert_array_equal(short.segment_ids, kept)
        sizes.append(size)
    sizes = np.concatenate(sizes)
    assert sizes.min() >= least
    counts = np.bincount(sizes, minlength=width + 1)[least:]
    expected = np.full(len(counts), rate / len(counts))
    expected[-1] += 1 - rate  # the whole width is one of the lengths drawn
    assert (abs(counts - len(sizes) * expected) <= 4.5 * np.sqrt(len(sizes) * expected * (1 - expected))).all()
    if rate == 1:
        chi = ((counts - len(sizes) * expected) ** 2 / (len(sizes) * expected)).sum()
        assert chi < scipy.stats.chi2.ppf(0.999, len(counts) - 1)


def test_short_rows_of_rows_that_are_short_already():
    b = batch([3, 0, 29], 29)
    for seed in range(40):
        short = shorten(jax.random.key(seed), b, rate=1.0, least=5)
        sizes = (np.asarray(short.segment_ids) > 0).sum(1)
        assert sizes[:2].tolist() == [3, 0] and sizes[2] >= 5


def test_some_rows_stay_one_segment():
    """ELECTRA's one in ten: [CLS] text [SEP], nothing lost, all of the first type, and never swapped."""
    b = batch([29, 29, 10, 2], 29)
    make = jax.jit(functools.partial(sentence_pairs, cls=CLS, sep=SEP, pad=PAD, random_rate=0.0, single_rate=0.1))
    single = 0
    for seed in range(400):
        p = jax.device_get(make(jax.random.key(seed), b))
        for row, size in enumerate([29, 29, 10, 2]):
            ids = p.input_ids[row][p.attention_mask[row] > 0].tolist()
            text = b.tokens[row][:size].tolist()
            assert [i for i in ids if i not in (CLS, SEP)] == text
            if ids.count(SEP) == 1:
                single += 1
                assert ids == [CLS, *text, SEP] and not p.token_type_ids[row].any() and not p.has_pair[row]
            else:
                assert ids == expected_row(b, row, row)[0] and p.has_pair[row]
    assert abs(single - 160) < 4 * np.sqrt(1600 * 0.1 * 0.9)
