"""Replaced-token detection (ELECTRA, Clark et al. 2020, section 2): drawing and writing the generator's tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
"""Number of vocabulary entries per block of the two-level search."""


def max_replacements(length: int, rate: float) -> int:
    """Return the number of slots for masked tokens in rows of `length`: floor((rate + 0.005) · length), at least 1."""
    return max(1, int((rate + 0.005) * length))


def sample_tokens(
    uniform: Float[Array, "batch slots"], logits: Float[Array, "batch slots vocab"], temperature: float = 1.0
) -> Int[Array, "batch slots"]:
    """Sample one token per slot from softmax(logits / temperature) by inverting the cumulative distribution.

    No gradient flows through the sample. The search has two levels, over the sums of vocabulary blocks and then within
    one block, so that it needs neither a cumulative sum over the vocabulary nor a random number per vocabulary entry.

    `uniform` in [0, 1) is the point of the distribution to invert.
    """
    vocab = logits.shape[-1]
    logits = jnp.pad(jax.lax.stop_gradient(logits), ((0, 0), (0, 0), (0, -vocab % BLOCK)), constant_values=-jnp.inf)
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    weights = weights.reshape(*uniform.shape, -1, BLOCK)
    blocks = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    threshold = uniform * blocks[..., -1]
    block = jnp.minimum(jnp.sum(blocks <= threshold[..., None], axis=-1), blocks.shape[-1] - 1)
    block_weights = jnp.take_along_axis(weights, block[..., None, None], axis=-2)[..., 0, :]
    before = jnp.take_along_axis(jnp.pad(blocks, ((0, 0), (0, 0), (1, 0))), block[..., None], axis=-1)[..., 0]
    # Rounding may leave the threshold just above the block's last cumulative sum; its last likely token is drawn then.
    cumulative = jnp.cumsum(block_weights, axis=-1)
    threshold = jnp.minimum(threshold - before, cumulative[..., -1] * (1 - 1e-6))
    return (block * BLOCK + jnp.sum(cumulative <= threshold[..., None], axis=-1)).astype(jnp.int32)


def write_tokens(
    input_ids: Int[Array, "batch length"],
    positions: Int[Array, "batch slots"],
    weights: Float[Array, "batch slots"],
    tokens: Int[Array, "batch slots"],
) -> Int[Array, "batch length"]:
    """Return `input_ids` with `tokens` written at `positions` where the slot's weight is above 0.

    A position that occurs in several slots (drawn with replacement) gets the integer mean of their ids, as in ELECTRA's
    original code.
    """

    def one_row(ids, where, tokens):
        total = jnp.zeros_like(ids).at[where].add(tokens, mode="drop")
        count = jnp.zeros_like(ids).at[where].add(1, mode="drop")
        return jnp.where(count > 0, total // jnp.maximum(count, 1), ids)

    # Unused slots write past the end of the row; mode="drop" discards these writes.
    where = jnp.where(weights > 0, positions, input_ids.shape[1])
    return jax.vmap(one_row)(input_ids, where, tokens)
