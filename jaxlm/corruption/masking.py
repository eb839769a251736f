"""Masking for masked language modelling (BERT, Devlin et al. 2018, section 3.1, Task #1)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError


class Masked(NamedTuple):
    """Masked rows and the tokens to predict, by their names in an example.

    Attributes:
        input_ids: corrupted rows, int32 [batch, length].
        masked_positions: predicted positions in ascending order, int32 [batch, predictions]; unused slots hold 0.
        masked_labels: the original token at each position, int32 [batch, predictions].
        masked_weights: 1 for used slots, 0 for the others, float32 [batch, predictions].
    """

    input_ids: Array
    masked_positions: Array
    masked_labels: Array
    masked_weights: Array


def max_predictions(length: int, rate: float) -> int:
    """Return the number of prediction slots for rows of `length`: round(rate · length), at least 1."""
    return max(1, round(rate * length))


def num_to_predict(
    sizes: Int[Array, " batch"], rate: float, slots: int, length: int, key: jax.Array | None = None
) -> Int[Array, " batch"]:
    """Return the number of tokens to predict in each row: min(slots, max(1, round(rate · size))).

    Halves round to even, as in the original code; an empty row has no predictions. Sizes count [CLS] and [SEP] and are
    at most `length`. With a key, the number is floor(rate · size + u) with a random u in [0, 1), as in RoBERTa's code.
    """
    if key is not None:
        return jnp.minimum(slots, _round_randomly(sizes, rate, length, jax.random.uniform(key, sizes.shape)))
    # A table by size, since float32 arithmetic on a device would round some halves to the wrong side.
    table = np.array([0, *(min(slots, max(1, round(rate * size))) for size in range(1, length + 1))], np.int32)
    return jnp.asarray(table)[sizes]


def _round_randomly(
    sizes: Int[Array, "*shape"], rate: float, length: int, uniform: Float[Array, "*#shape"]
) -> Int[Array, "*shape"]:
    """Return rate · size for sizes up to `length`, rounded up where `uniform` is below its fraction."""
    part, whole = np.modf(rate * np.arange(length + 1))
    return jnp.asarray(whole, jnp.int32)[sizes] + (uniform < jnp.asarray(part, jnp.float32)[sizes])


def choose_in_documents(
    key: jax.Array, candidates: Bool[Array, "batch length"], documents: Int[Array, "batch length"], rate: float,
    slots: int,
) -> tuple[Int[Array, "batch slots"], Float[Array, "batch slots"]]:
    """Choose candidate positions in each document of packed rows as if it were a row of its own.

    A document of n tokens gets floor(rate · n + u) of them, with u uniform in [0, 1); all candidates are equally
    likely. One draw per row rounds rate · (tokens up to the end of a document): the differences have exactly this
    distribution for each document, and a row of `length` tokens needs no more than ceil(rate · length) slots.

    Arguments are those of `choose_positions`; `documents` has the document of each token, 0 at padding.

    Returns:
        As `choose_positions`.
    """
    rows, length = candidates.shape
    key_order, key_count = jax.random.split(key)
    place = jnp.broadcast_to(jnp.arange(length), (rows, length))
    borders = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(borders[:, :-1], place, 0), axis=1)
    end = jax.lax.cummin(jnp.where(borders[:, 1:], place + 1, length), axis=1, reverse=True)
    upto = functools.partial(
        _round_randomly, rate=rate, length=length, uniform=jax.random.uniform(key_count, (rows, 1))
    )
    # Sorted by random priority within documents, which stay in their places.
    priority = jnp.where(candidates, jax.random.uniform(key_order, (rows, length)), jnp.inf)
    order = jnp.lexsort((priority, first))
    is_chosen = jnp.take_along_axis(candidates, order, axis=1) & (place - first < upto(end) - upto(first))
    positions, is_used = in_slots(jnp.where(is_chosen, order, length), length, slots)
    return positions, is_used.astype(jnp.float32)


def in_slots(
    positions: Int[Array, "batch _"], length: int, slots: int
) -> tuple[Int[Array, "batch slots"], Bool[Array, "batch slots"]]:
    """Return the positions below `length` of each row in ascending order, 0 in unused slots, and the used slots."""
    positions = jnp.sort(positions, axis=1)[:, :slots]
    if positions.shape[1] < slots:
        positions = jnp.pad(positions, ((0, 0), (0, slots - positions.shape[1])), constant_values=length)
    is_used = positions < length
    return jnp.where(is_used, positions, 0).astype(jnp.int32), is_used


def write_at(
    ids: Int[Array, "batch length"], positions: Int[Array, "batch slots"], is_used: Bool[Array, "batch slots"],
    values: Int[Array, "batch slots"],
) -> Int[Array, "batch length"]:
    """Return `ids` with the values of the used slots at their positions."""
    # Unused slots write past the end of the row; mode="drop" discards these writes.
    where = jnp.where(is_used, positions, ids.shape[1])
    return ids.at[jnp.arange(len(ids))[:, None], where].set(values.astype(jnp.int32), mode="drop")


def choose_positions(
    key: jax.Array,
    candidates: Bool[Array, "batch length"],
    count: Int[Array, " batch"],
    slots: int,
    word_start: Bool[Array, "batch length"] | None = None,
    longest_ngram: int = 1,
    preference: Float[Array, "batch length"] | None = None,
) -> tuple[Int[Array, "batch slots"], Float[Array, "batch slots"]]:
    """Choose up to `count` candidate positions of each row without replacement.

    All candidates are equally likely by default. Whole words are chosen in random order with `word_start`: a word that
    would exceed `count` is skipped and later ones are tried.

    Args:
        key: sampling key.
        candidates: positions that may be chosen.
        count: number of positions to choose in each row.
        slots: static number of positions per row in the result.
        word_start: tokens that begin a word; enables whole-word masking.
        longest_ngram: above 1, chooses n-grams of words (of tokens without `word_start`), see `choose_ngrams`.
        preference: relative probability of each position; uniform by default.

    Returns:
        Positions in ascending order, and weights: 1 for used slots, 0 for the others.
    """
    rows, length = candidates.shape
    if longest_ngram > 1:
        selected = choose_ngrams(
            key, candidates, count, candidates if word_start is None else word_start, longest_ngram
        )
        positions = jnp.where(selected, jnp.arange(length)[None, :], length)
    elif word_start is None:
        if preference is None:
            priority = jax.random.uniform(key, (rows, length))
        else:  # weighted sampling without replacement by exponential keys (Efraimidis & Spirakis 2006)
            priority = jax.random.exponential(key, (rows, length)) / preference
        priority = jnp.where(candidates, priority, jnp.inf)
        order = jnp.argsort(priority, axis=1)[:, :slots]
        available = jnp.sum(priority < jnp.inf, axis=1)  # a preference of 0 is never chosen
        chosen = jnp.arange(min(slots, length))[None, :] < jnp.minimum(count, available)[:, None]
        positions = jnp.where(chosen, order, length)
    else:
        selected = _choose_words(key, candidates, count, word_start)
        positions = jnp.where(selected, jnp.arange(length)[None, :], length)
    positions, is_used = in_slots(positions, length, slots)
    return positions, is_used.astype(jnp.float32)


def draw_positions(
    key: jax.Array, candidates: Bool[Array, "batch length"], count: Int[Array, " batch"], slots: int
) -> tuple[Int[Array, "batch slots"], Float[Array, "batch slots"]]:
    """Draw `count` candidate positions of each row with replacement.

    Returns:
        Positions in the order of the draws (0 in unused slots), and weights: 1 for used slots, 0 for the others.
    """
    available = jnp.sum(candidates, axis=1)
    ranks = jnp.cumsum(candidates, axis=1)  # reaches k first at the k-th candidate (from 1)
    draws = jax.random.randint(key, (candidates.shape[0], slots), 0, jnp.maximum(available, 1)[:, None])
    used = (jnp.arange(slots)[None, :] < count[:, None]) & (available > 0)[:, None]
    positions = jax.vmap(jnp.searchsorted)(ranks, draws + 1)
    return jnp.where(used, positions, 0).astype(jnp.int32), used.astype(jnp.float32)


def number_words(
    candidates: Bool[Array, "batch length"], word_start: Bool[Array, "batch length"]
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Number the words of each row and count their tokens.

    A word begins at a word-start token and wherever a candidate follows a token that is no candidate.

    Returns:
        The number of each token's word, from 0 in each row (`length` for tokens that are no candidates), and the number
        of tokens of each word, 0 beyond the last word.
    """
    length = candidates.shape[1]
    follows = jnp.pad(candidates[:, :-1], ((0, 0), (1, 0)))
    is_first = candidates & (word_start | ~follows)
    word = jnp.where(candidates, jnp.cumsum(is_first, axis=1) - 1, length)
    return word, jax.vmap(lambda w: jnp.zeros(length + 1, jnp.int32).at[w].add(1))(word)[:, :length]


def choose_ngrams(
    key: jax.Array, candidates: Bool[Array, "batch length"], count: Int[Array, " batch"],
    word_start: Bool[Array, "batch length"], longest: int,
) -> Bool[Array, "batch length"]:
    """Choose n-grams of words of up to `count` tokens per row, p(n) ∝ 1/n (ALBERT, Lan et al. 2019, section 4.1).

    As in the original code, words are tried in random order as the first word of an n-gram. Its n is drawn and then
    lowered until the n-gram fits into the remaining `count`; the end of the row cuts it short. An n-gram that overlaps
    an earlier one is skipped, and the next word is tried. Symbols between words ([SEP]) do not end an n-gram.

    Arguments are those of `choose_positions`; `longest` is the largest n.

    Returns:
        Mask of the chosen positions.
    """
    rows, length = candidates.shape
    key_order, key_n = jax.random.split(key)
    word, sizes = number_words(candidates, word_start)
    num_words = jnp.sum(sizes > 0, axis=1)
    order = jnp.argsort(jnp.where(sizes > 0, jax.random.uniform(key_order, (rows, length)), 2.0), axis=1)
    share = jnp.cumsum(1.0 / jnp.arange(1, longest + 1))  # unnormalized probability of at most n words
    n = 1 + jnp.sum(jax.random.uniform(key_n, (rows, length, 1)) * share[-1] >= share[:-1], axis=-1)
    before = jnp.pad(jnp.cumsum(sizes, axis=1), ((0, 0), (1, 0)))  # tokens before each word
    lengths, position = jnp.arange(1, longest + 1)[None, :], jnp.arange(length)[None, :]

    def remaining(selected):
        return count - jnp.sum(jnp.where(selected, sizes, 0), axis=1)

    def unfinished(state):
        trial, selected = state
        return jnp.any((trial < num_words) & (remaining(selected) > 0))

    def try_next(state):
        trial, selected = state
        first, most = order[:, trial][:, None], n[:, trial][:, None]
        needed = jnp.take_along_axis(before, jnp.minimum(first + lengths, length), axis=1)
        needed -= jnp.take_along_axis(before, first, axis=1)
        num_words_fitting = jnp.sum((lengths <= most) & (needed <= remaining(selected)[:, None]), axis=1, keepdims=True)
        ngram = (position >= first) & (position < first + num_words_fitting)
        return trial + 1, selected | (ngram & ~jnp.any(selected & ngram, axis=1, keepdims=True))

    _, selected = jax.lax.while_loop(unfinished, try_next, (jnp.array(0), jnp.zeros((rows, length), bool)))
    return jnp.take_along_axis(jnp.pad(selected, ((0, 0), (0, 1))), word, axis=1)


def _choose_words(key, candidates, count, word_start):
    """Choose whole words of up to `count` tokens per row; return the mask of their positions."""
    rows, length = candidates.shape
    word, counts = number_words(candidates, word_start)
    order = jnp.argsort(jnp.where(counts > 0, jax.random.uniform(key, (rows, length)), 2.0), axis=1)
    sizes = jnp.take_along_axis(counts, order, axis=1)  # word sizes in the order of the trials

    # Trying words one by one would be a loop over words. A few passes find the same set: each pass selects the longest
    # fitting prefix of the words that can still fit, and skips the word after it.
    def one_pass(state):
        selected, alive, _ = state
        remaining = count[:, None] - jnp.sum(jnp.where(selected, sizes, 0), axis=1, keepdims=True)
        alive = alive & (sizes <= remaining)
        fits = alive & (jnp.cumsum(jnp.where(alive, sizes, 0), axis=1) <= remaining)
        return selected | fits, alive & ~fits, jnp.any(alive & ~fits)

    start = (jnp.zeros((rows, length), bool), sizes > 0, jnp.array(True))
    selected, _, _ = jax.lax.while_loop(lambda state: state[2], one_pass, start)
    by_word = jax.vmap(lambda o, t: jnp.zeros(length + 1, bool).at[o].set(t))(order, selected)
    return jnp.take_along_axis(by_word, word, axis=1) & candidates


def mask_tokens(
    key: jax.Array,
    input_ids: Int[Array, "batch length"],
    special: Bool[Array, " vocab"],
    *,
    mask: int,
    attention_mask: Int[Array, "batch length"],
    rate: float = 0.15,
    slots: int,
    mask_share: float = 0.8,
    random_share: float = 0.1,
    random_ids: tuple[int, int],
    word_start: Bool[Array, " vocab"] | None = None,
    preference: Float[Array, " vocab"] | None = None,
    with_replacement: bool = False,
    longest_ngram: int = 1,
    round_randomly: bool = False,
    documents: Int[Array, "batch length"] | None = None,
) -> Masked:
    """Apply BERT's masking: choose `rate` of the tokens, replace 80 % by `mask` and 10 % by a random token.

    Special symbols and padding are never chosen. The choice of replacement is per token, also for whole words.

    Args:
        key: sampling key.
        input_ids: rows to corrupt.
        special: tokens that are never masked, by id.
        mask: id of the mask token.
        attention_mask: 1 for non-padding tokens.
        rate: share of tokens to predict.
        slots: static number of predictions per row.
        mask_share: share of the chosen tokens replaced by `mask`.
        random_share: share of the chosen tokens replaced by a random token; the rest stay unchanged.
        random_ids: half-open range of random tokens, sampled uniformly, so they may equal the original token.
        word_start: tokens that begin a word, by id; enables whole-word masking.
        preference: relative probability of choosing each id; uniform by default.
        with_replacement: draw positions that may repeat, as ELECTRA's original code does.
        longest_ngram: see `choose_positions`.
        round_randomly: round the number of predictions up or down at random, see `num_to_predict`.
        documents: document of each token in packed rows, see `choose_in_documents`; None for rows of one document.
    """
    key_choice, key_kind, key_random, key_count = jax.random.split(key, 4)
    if preference is not None and (documents is not None or with_replacement or word_start is not None
                                   or longest_ngram > 1):
        raise UserError("a preference of tokens is for masking tokens of rows of one document; leave out packed rows, "
                        "whole words, n-grams and repeated positions.")
    candidates = (attention_mask > 0) & ~special[input_ids]
    count = num_to_predict(
        jnp.sum(attention_mask, axis=1), rate, slots, input_ids.shape[1], key_count if round_randomly else None
    )
    if documents is not None:
        positions, weights = choose_in_documents(key_choice, candidates, documents, rate, slots)
    elif with_replacement:
        positions, weights = draw_positions(key_choice, candidates, count, slots)
    else:
        starts = None if word_start is None else word_start[input_ids]
        preferences = None if preference is None else preference[input_ids]
        positions, weights = choose_positions(key_choice, candidates, count, slots, starts, longest_ngram, preferences)
    labels = jnp.take_along_axis(input_ids, positions, axis=1)
    kind = jax.random.uniform(key_kind, positions.shape)
    drawn = jax.random.randint(key_random, positions.shape, *random_ids)
    replacement = jnp.select([kind < mask_share, kind < mask_share + random_share], [mask, drawn], labels)
    is_replaced = (weights > 0) & (kind < mask_share + random_share)
    return Masked(write_at(input_ids, positions, is_replaced, replacement), positions, labels, weights)
