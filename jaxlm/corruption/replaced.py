"""Replaced-token detection (ELECTRA, Clark et al. 2020, section 2): what a generator's guesses make of a text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
"""Tokens of the vocabulary in one block of the two-level search."""


def max_replacements(length: int, rate: float) -> int:
    """Slots for the tokens that a generator fills in rows of `length`: floor((rate + 0.005) · length), at least 1."""
    return max(1, int((rate + 0.005) * length))


def sample_tokens(
    uniform: Float[Array, "batch slots"], logits: Float[Array, "batch slots vocab"], temperature: float = 1.0
) -> Int[Array, "batch slots"]:
    """One token a slot from softmax(logits / temperature), where its cumulative distribution passes `uniform`, a number
    in [0, 1); no gradient goes through it.

    The place is found in two levels, by the sums of blocks of the vocabulary and then inside one block, so that neither
    a cumulative sum over the vocabulary nor a random number for each of its tokens is needed.
    """
    vocab = logits.shape[-1]
    logits = jnp.pad(jax.lax.stop_gradient(logits), ((0, 0), (0, 0), (0, -vocab % BLOCK)), constant_values=-jnp.inf)
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    weights = weights.reshape(*uniform.shape, -1, BLOCK)
    blocks = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    threshold = uniform * blocks[..., -1]
    block = jnp.minimum(jnp.sum(blocks <= threshold[..., None], axis=-1), blocks.shape[-1] - 1)
    inside = jnp.take_along_axis(weights, block[..., None, None], axis=-2)[..., 0, :]
    before = jnp.take_along_axis(jnp.pad(blocks, ((0, 0), (0, 0), (1, 0))), block[..., None], axis=-1)[..., 0]
    # Rounding may leave the threshold just above the block's last cumulative sum: then its last likely token is drawn.
    cumulative = jnp.cumsum(inside, axis=-1)
    threshold = jnp.minimum(threshold - before, cumulative[..., -1] * (1 - 1e-6))
    return (block * BLOCK + jnp.sum(cumulative <= threshold[..., None], axis=-1)).astype(jnp.int32)


def write_tokens(
    input_ids: Int[Array, "batch length"],
    positions: Int[Array, "batch slots"],
    weights: Float[Array, "batch slots"],
    tokens: Int[Array, "batch slots"],
) -> Int[Array, "batch length"]:
    """`input_ids` with `tokens` at `positions`, where the slot's weight is above 0.

    A position that several slots name (drawn with replacement) gets the integer mean of their ids, as in ELECTRA's
    original code.
    """

    def one_row(ids, where, tokens):
        total = jnp.zeros_like(ids).at[where].add(tokens, mode="drop")
        count = jnp.zeros_like(ids).at[where].add(1, mode="drop")
        return jnp.where(count > 0, total // jnp.maximum(count, 1), ids)

    # Unused slots write past the end of the row, and such writes are dropped.
    where = jnp.where(weights > 0, positions, input_ids.shape[1])
    return jax.vmap(one_row)(input_ids, where, tokens)
