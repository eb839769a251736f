"""Replaced-token detection (ELECTRA, Clark et al. 2020, section 2): what a generator's guesses make of a text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxlm.random_bits import threefry_bits


def max_replacements(length: int, rate: float) -> int:
    """Slots for the tokens that a generator fills in rows of `length`: floor((rate + 0.005) · length), at least 1."""
    return max(1, int((rate + 0.005) * length))


def sample_tokens(
    key: jax.Array,
    logits: Float[Array, "batch slots vocab"],
    temperature: float = 1.0,
    first: int | UInt32[Array, ""] = 0,
) -> Int[Array, "batch slots"]:
    """One token a slot from softmax(logits / temperature), by the Gumbel trick; no gradient goes through it.

    first: where the slots stand among all of their rows, so that parts draw what the whole would.

    The same draw on any mesh and platform, whatever the kind of key: dropout's cheap generators would draw by the
    layout.
    """
    key = jax.random.wrap_key_data(jax.random.key_data(key).reshape(-1)[:2], impl="threefry2x32")
    # A number for each token of the vocabulary, with jax's own generator half the step of a small model; in (0, 1),
    # never 0 or 1, in steps that float32 can tell apart.
    bits = threefry_bits(key, logits.shape, first * logits.shape[-1]) >> 9
    uniform = bits.astype(jnp.float32) * 2.0**-23 + 2.0**-24
    noisy = jax.lax.stop_gradient(logits) / temperature - jnp.log(-jnp.log(uniform))
    # The largest, found by plain minima and maxima, which compilers vectorise as they do not argmax.
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = jnp.max(noisy, axis=-1, keepdims=True)
    return jnp.min(jnp.where(noisy == largest, tokens, logits.shape[-1] - 1), axis=-1)


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
