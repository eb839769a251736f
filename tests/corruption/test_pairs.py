"""Next-sentence pairs: what they keep, how often they swap, with whom."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.corruption.pairs import sentence_pairs, single_segments
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


def expected_row(b: TokenBatch, row: int, partner: int) -> tuple[list[int], list[int]]:
    text = lambda r: [int(t) for t in b.tokens[r] if t]  # noqa: E731
    first, second = text(row), text(partner)
    a, rest = first[: len(first) // 2], second[len(second) // 2 :]
    return [CLS, *a, SEP, *rest, SEP], [0] * (len(a) + 2) + [1] * (len(rest) + 1)


def test_rows_are_what_the_formula_says():
    b = batch([29, 29, 10, 2, 1, 0, 28, 5], 29)
    partners = {row: set() for row in range(8)}
    for seed in range(200):
        p = pairs(seed, b)
        for row in range(8):
            ids = p.input_ids[row][p.attention_mask[row] > 0].tolist()
            if row == 5:
                assert ids == [] and not p.has_pair[row] and not p.is_random[row]
                continue
            assert p.has_pair[row] == (row != 4)
            if p.is_random[row]:
                partner = ids[-2] // 1000 - 1
                assert partner != row
                partners[row].add(partner)
            else:
                partner = row
            want_ids, want_types = expected_row(b, row, partner)
            assert ids == want_ids
            assert p.token_type_ids[row][: len(ids)].tolist() == want_types
            assert (p.input_ids[row][len(ids) :] == PAD).all() and (p.token_type_ids[row][len(ids) :] == 0).all()
    # Every other row that can be cut is a partner sooner or later.
    able = {0, 1, 2, 3, 6, 7}
    assert all(partners[row] == able - {row} for row in able)


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
    ids = np.asarray(single_segments(device, cls=CLS, sep=SEP, pad=PAD))
    assert ids.tolist() == [[1, 1000, 1001, 1002, 1003, 1004, 2], [0] * 7, [1, 3000, 3001, 3002, 2, 0, 0]]
