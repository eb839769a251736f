"""Span corruption: the published arithmetic, the distribution of its segmentations, and preservation of the text."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.corruption.spans import corrupt_spans, random_segments, raw_span_length, span_lengths, split_prefix
from jaxlm.errors import UserError
from jaxlm.types import TokenBatch
from tests.params import first_fast

PAD, EOS, SENTINEL, FIRST = 0, 3, 106, 107

# model length, density, mean span -> raw tokens, input length, target length, noise tokens, spans
GOLDEN = [
    (64, 0.15, 3, 70, 64, 14, 10, 3),
    (128, 0.15, 3, 141, 128, 29, 21, 7),
    (256, 0.15, 3, 284, 256, 58, 43, 14),
    (512, 0.15, 3, 568, 512, 114, 85, 28),
    (1024, 0.15, 3, 1137, 1024, 229, 171, 57),
    (2048, 0.15, 3, 2274, 2048, 456, 341, 114),
    (512, 0.15, 2, 552, 512, 126, 83, 42),
    (512, 0.15, 5, 581, 512, 105, 87, 17),
    (512, 0.15, 10, 591, 512, 99, 89, 9),
    (512, 0.10, 3, 548, 512, 74, 55, 18),
    (512, 0.25, 3, 614, 512, 206, 154, 51),
    (512, 0.50, 3, 766, 512, 512, 383, 128),
]


@pytest.mark.parametrize("length, density, mean, raw, inputs, targets, noise, spans", GOLDEN)
def test_lengths_are_the_published_ones(length, density, mean, raw, inputs, targets, noise, spans):
    assert raw_span_length(length, density, mean) == (raw, noise, spans, inputs, targets)


def test_halves_round_to_even():
    assert span_lengths(10).noise == 2  # 1.5
    assert span_lengths(30).noise == 4  # 4.5
    assert span_lengths(30, 0.15, 1.6).spans == 2  # 2.5


def text(rows: int, length: int, sizes=None, seed: int = 0) -> TokenBatch:
    """Return rows of distinct tokens, so that a misplaced token is visible."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(10_000)[:length] + FIRST for _ in range(rows)])
    sizes = np.full(rows, length) if sizes is None else np.asarray(sizes)
    real = np.arange(length)[None, :] < sizes[:, None]
    return TokenBatch(np.where(real, tokens, PAD).astype(np.int32), real.astype(np.int32))


compiled = jax.jit(
    functools.partial(corrupt_spans, sentinel=SENTINEL, eos=EOS, pad=PAD), static_argnames=("density", "mean_span")
)


def corrupted(key: int, batch: TokenBatch, density: float = 0.15, mean: float = 3.0):
    return jax.tree.map(np.asarray, compiled(jax.random.key(key), batch, density=density, mean_span=mean))


def merge(inputs: list[int], targets: list[int]) -> tuple[list[int], list[bool]]:
    """Return the text and its noise mask by the definition of sentinels; check their order and the end symbols."""
    assert inputs[-1] == targets[-1] == EOS
    spans: list[list[int]] = []
    for token in targets[:-1]:
        if token <= SENTINEL:
            assert token == SENTINEL - len(spans)
            spans.append([])
        else:
            spans[-1].append(token)
    merged, noise, k = [], [], 0
    for token in inputs[:-1]:
        piece = [token]
        if token <= SENTINEL:
            assert token == SENTINEL - k
            piece, k = spans[k], k + 1
        merged += piece
        noise += [token <= SENTINEL] * len(piece)
    assert k == len(spans) and all(spans)
    return merged, noise


@pytest.mark.parametrize(("length", "density", "mean"), first_fast([
    (40, 0.9, 3), (64, 0.15, 3), (64, 0.5, 1), (4, 0.15, 3)
]))
def test_inputs_and_targets_give_the_text_back(length, density, mean):
    expected = raw_span_length(length, density, mean)
    batch = text(16, expected.raw)
    pair = corrupted(1, batch, density, mean)
    assert pair.inputs.shape == (16, expected.inputs) and pair.targets.shape == (16, expected.targets)
    assert pair.inputs.dtype == pair.targets.dtype == np.int32
    assert (pair.inputs_size == expected.inputs).all() and (pair.targets_size == expected.targets).all()
    for row in range(16):
        merged, noise = merge(pair.inputs[row].tolist(), pair.targets[row].tolist())
        assert merged == batch.tokens[row].tolist()
        assert not noise[0] and noise[-1]  # starts with text, ends with noise
        runs = [key for key, _ in itertools.groupby(noise)]
        assert sum(noise) == expected.noise and sum(runs) == expected.spans


def test_every_size_of_a_short_row_follows_its_own_arithmetic():
    batch = text(72, 70, sizes=np.arange(72) % 71)
    pair = corrupted(3, batch)
    for row, size in enumerate(np.arange(72) % 71):
        inputs, targets = pair.inputs[row].tolist(), pair.targets[row].tolist()
        if size < 2:
            assert not any(inputs) and not any(targets)
            assert pair.inputs_size[row] == pair.targets_size[row] == 0
            continue
        expected = span_lengths(int(size))
        assert (pair.inputs_size[row], pair.targets_size[row]) == (expected.inputs, expected.targets)
        assert not any(inputs[expected.inputs:]) and not any(targets[expected.targets:])
        merged, noise = merge(inputs[: expected.inputs], targets[: expected.targets])
        assert merged == batch.tokens[row][:size].tolist() and sum(noise) == expected.noise


def compositions(items: int, parts: int) -> list[tuple[int, ...]]:
    """Return all ways to write `items` as a sum of `parts` positive numbers."""
    if parts == 1:
        return [(items,)]
    return [(first, *rest) for first in range(1, items - parts + 2) for rest in compositions(items - first, parts - 1)]


def chi_square_p_value(observed: list[int]) -> float:
    """Return the p-value for equal expected counts, by the approximation of Wilson and Hilferty."""
    expected = sum(observed) / len(observed)
    statistic = sum((o - expected) ** 2 / expected for o in observed)
    degrees = len(observed) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize(("items", "parts"), first_fast([(8, 4), (9, 2), (5, 5), (7, 1)]))
def test_every_composition_is_equally_likely(items, parts):
    rows = 40_000
    # The numbers of the row decide, not the static bounds, which are larger here.
    lengths = jax.jit(random_segments, static_argnums=(3, 4))(
        jax.random.key(7), jnp.full(rows, items), jnp.full(rows, parts), items + 3, parts + 2
    )
    lengths = np.asarray(lengths)
    assert not lengths[:, parts:].any()
    counts = Counter(map(tuple, lengths[:, :parts].tolist()))
    possible = compositions(items, parts)
    assert set(counts) == set(possible) and len(possible) == math.comb(items - 1, parts - 1)
    if len(possible) > 1:
        assert chi_square_p_value([counts[c] for c in possible]) > 1e-4


def test_masks_are_equally_likely_over_many_keys():
    """12 tokens, 4 of them noise in 2 spans, one row per key: C(3,1) · C(7,1) = 21 masks, equally likely."""
    expected = span_lengths(12, 0.34, 2)
    assert (expected.noise, expected.spans) == (4, 2)
    batch = text(1, 12)

    def one(key):
        return corrupt_spans(key, batch, sentinel=SENTINEL, eos=EOS, pad=PAD, density=0.34, mean_span=2)

    pairs = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 20_000))
    counts = Counter(
        tuple(merge(i, t)[1]) for i, t in zip(pairs.inputs[:, 0].tolist(), pairs.targets[:, 0].tolist(), strict=True)
    )
    masks = [
        tuple(itertools.chain.from_iterable([False] * x + [True] * y for x, y in zip(plain, noise, strict=True)))
        for plain in compositions(8, 2) for noise in compositions(4, 2)
    ]
    assert set(counts) == set(masks) and len(masks) == 21
    assert chi_square_p_value([counts[m] for m in masks]) > 1e-4


def test_rows_and_keys_differ_and_a_key_repeats():
    batch = TokenBatch(*(np.repeat(x, 16, axis=0) for x in text(1, 70)[:2]))
    first, again, other = corrupted(5, batch), corrupted(5, batch), corrupted(6, batch)
    assert (first.inputs == again.inputs).all() and (first.targets == again.targets).all()
    assert (first.inputs[0] != first.inputs[1]).any() and (first.inputs != other.inputs).any()


def test_no_loop_over_tokens():
    def primitives(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from primitives(inner)

    jaxpr = jax.make_jaxpr(lambda k, b: corrupt_spans(k, b, sentinel=SENTINEL, eos=EOS, pad=PAD))(
        jax.random.key(0), text(2, 70)
    )
    names = set(primitives(jaxpr.jaxpr))
    assert "sort" in names and not names & {"while", "scan"}


def test_prefixes_are_cut_anywhere_and_nothing_is_lost():
    sizes = np.array([0, 1, 2, 3, 9] + [10] * 4000)
    batch = text(1, 10)
    tokens = np.where(np.arange(10) < sizes[:, None], batch.tokens, PAD)
    batch = TokenBatch(tokens, (np.arange(10) < sizes[:, None]).astype(np.int32))
    pair = jax.jit(functools.partial(split_prefix, eos=EOS, pad=PAD))(jax.random.key(0), batch)
    pair = jax.tree.map(np.asarray, pair)
    assert pair.inputs.shape == pair.targets.shape == (len(sizes), 10)
    cuts = Counter()
    for row, size in enumerate(sizes):
        inputs = pair.inputs[row][: pair.inputs_size[row]].tolist()
        targets = pair.targets[row][: pair.targets_size[row]].tolist()
        assert not pair.inputs[row][len(inputs):].any() and not pair.targets[row][len(targets):].any()
        if size < 2:
            assert inputs == targets == []
            continue
        assert inputs[-1] == targets[-1] == EOS and len(inputs) >= 2 and len(targets) >= 2
        assert inputs[:-1] + targets[:-1] == tokens[row][:size].tolist()
        if size == 10:
            cuts[len(inputs) - 1] += 1
    assert set(cuts) == set(range(1, 10))
    assert chi_square_p_value(list(cuts.values())) > 1e-4


def test_a_length_without_room_for_a_span_is_refused():
    with pytest.raises(UserError, match=r"data\.length 3 is too short for one span"):
        raw_span_length(3)
    assert raw_span_length(4).raw >= 2
