"""SpanBERT's masks against a slow version of the original loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.corruption.span_masks import choose_spans, mask_spans

SUCCESS, LONGEST = 0.2, 10
SHARES = SUCCESS * (1 - SUCCESS) ** np.arange(LONGEST)
SHARES /= SHARES.sum()
WORDS = [1, 2, 1, 1, 3, 1, 1, 1, 2, 1, 4, 1, 1, 2, 1, 1, 1, 1, 5, 1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 2]  # tokens of each
SIZE = sum(WORDS)
STARTS = np.isin(np.arange(SIZE), np.cumsum(WORDS) - WORDS)
COUNT = 14


def slow_spans(rng: np.random.Generator) -> set[int]:
    """Return the tokens masked by the original loop over one text."""
    taken: set[int] = set()
    word_of = np.cumsum(STARTS) - 1
    while len(taken) < COUNT:
        words = 1 + int(np.searchsorted(np.cumsum(SHARES), rng.random()))
        anchor = int(rng.integers(SIZE))
        if anchor in taken:
            continue
        first = word_of[anchor]
        for token in np.flatnonzero((word_of >= first) & (word_of < first + words)):
            if len(taken) == COUNT:
                break
            taken.add(int(token))
    return taken


@pytest.mark.slow  # the loop has it
def test_the_law_of_lengths():
    """Shares of 1 to 10 words, mean 3.797 (SpanBERT, section 3.1: about 3.8).

    One span per row, in rows too long to cut it short.
    """
    np.testing.assert_allclose(SHARES[:3], [0.22406, 0.17925, 0.14340], atol=5e-6)
    rows, length = 4000, 400
    every = jnp.ones((rows, length), bool)
    taken = jax.device_get(jax.jit(
        lambda key: choose_spans(key, every, jnp.full(rows, LONGEST), every, LONGEST, SUCCESS, LONGEST)
    )(jax.random.key(0)))
    assert (taken.sum(1) == LONGEST).all()
    # Rows that end within their first span have a run of 10; the exact share is 1 - sum(p(<= 9)).
    runs = np.diff(np.pad(taken, ((0, 0), (1, 1))).astype(int), axis=1)
    spans = (runs == 1).sum(1)
    assert abs((spans == 1).mean() - SHARES[9]) < 0.04  # so do two spans that touch by chance
    two = [SHARES[n] * SHARES[8 - n :].sum() for n in range(9)]  # n + 1 words, then at least as many as are left
    assert abs((spans == 2).mean() - sum(two)) < 0.05


@functools.cache
def both(trials: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Return the masked tokens of many rows, ours and the loop's, bool [trials, SIZE]."""
    full = jnp.ones((trials, SIZE), bool)
    starts = jnp.tile(jnp.asarray(STARTS), (trials, 1))
    ours = jax.device_get(jax.jit(
        lambda key, full, starts: choose_spans(key, full, jnp.full(trials, COUNT), starts, COUNT, SUCCESS, LONGEST)
    )(jax.random.key(1), full, starts))
    rng, theirs = np.random.default_rng(2), np.zeros((trials, SIZE), bool)
    for row in theirs:
        row[list(slow_spans(rng))] = True
    return ours, theirs


def test_tokens_and_runs_have_the_distribution_of_the_loop():
    def figures(taken: np.ndarray) -> np.ndarray:
        """Return per row the masked tokens, the number of spans, and the numbers of spans of 1, 2, … tokens."""
        edges = np.diff(np.pad(taken, ((0, 0), (1, 1))).astype(int), axis=1)
        lengths = np.zeros((len(taken), COUNT + 1))
        for row, edge in enumerate(edges):
            np.add.at(lengths[row], np.flatnonzero(edge == -1) - np.flatnonzero(edge == 1), 1)
        return np.concatenate([taken, (edges == 1).sum(1, keepdims=True), lengths], axis=1)

    ours, theirs = both()
    assert (ours.sum(1) == COUNT).all() and (theirs.sum(1) == COUNT).all()
    first, second = figures(ours), figures(theirs)
    spread = np.sqrt((first.var(0) + second.var(0)) / len(first))
    assert (np.abs(first.mean(0) - second.mean(0)) <= 4.5 * spread + 1e-9).all()
    assert second.mean(0)[:SIZE].std() > 0.03  # long words and the ends of the row are masked at other rates


V, MASK, PAD, CLS, SEP = 400, 4, 0, 1, 2


@functools.cache
def masked():
    """Return ids, attention mask and the result of mask_spans for rows of all sizes, some of them empty."""
    rng = np.random.default_rng(4)
    rows, length = 1000, 64
    sizes = rng.integers(0, length - 1, rows)
    sizes[:4] = [0, 1, 2, length - 2]
    place = np.arange(length)
    text = (place > 0) & (place <= sizes[:, None])
    ids = np.where(text, rng.integers(5, V, (rows, length)), PAD)
    ids[sizes > 0, 0] = CLS
    ids[np.arange(rows)[sizes > 0], sizes[sizes > 0] + 1] = SEP
    share = np.cumsum(np.where(np.arange(V) < 5, 0, np.arange(V) % 3))  # ids of the form 3k are never drawn
    made = jax.jit(lambda key, ids: mask_spans(
        key, ids, jnp.arange(V) < 5, jnp.arange(V) % 4 > 0, jnp.asarray(share / share[-1], jnp.float32), mask=MASK,
        attention_mask=(ids != PAD).astype(jnp.int32), slots=10,
    ))(jax.random.key(5), jnp.asarray(ids, jnp.int32))
    return ids, sizes, jax.device_get(made)


def test_as_many_as_the_original_masks_and_nothing_else_changes():
    ids, sizes, m = masked()
    used = m.masked_weights > 0
    assert (used.sum(1) == np.ceil(0.15 * sizes)).all()
    restored = m.input_ids.copy()
    rows = np.broadcast_to(np.arange(len(ids))[:, None], used.shape)[used]
    assert (ids[rows, m.masked_positions[used]] >= 5).all()  # neither [CLS] nor [SEP]
    restored[rows, m.masked_positions[used]] = m.masked_labels[used]
    assert (restored == ids).all()


def test_one_draw_a_span():
    """80 % of the spans are masked, 10 % become random tokens by corpus frequency, 10 % stay unchanged."""
    ids, sizes, m = masked()
    kinds = []
    for row in range(len(ids)):
        used = m.masked_positions[row][m.masked_weights[row] > 0]
        for span in np.split(used, np.flatnonzero(np.diff(used) > 1) + 1):
            if len(span) == 0:
                continue
            new, old = m.input_ids[row, span], ids[row, span]
            kind = "mask" if (new == MASK).all() else "kept" if (new == old).all() else "random"
            assert kind != "random" or ((new != MASK) & (new >= 5) & (new % 3 > 0)).all()
            kinds.append(kind)
            # The boundaries of each span, and the offset of each token in it.
            slots = np.isin(m.masked_positions[row], span) & (m.masked_weights[row] > 0)
            assert set(m.boundary_left[row][slots]) == {span[0] - 1}
            assert set(m.boundary_right[row][slots]) == {span[-1] + 1}
            assert m.boundary_offsets[row][slots].tolist() == list(range(len(span)))
            inside = span[0] > 1 and span[-1] < sizes[row]
            assert set(m.boundary_weights[row][slots]) == {float(inside)}
    shares = [kinds.count(kind) / len(kinds) for kind in ("mask", "random", "kept")]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=5 * np.sqrt(0.16 / len(kinds)))
    assert not m.boundary_weights[m.masked_weights == 0].any()
