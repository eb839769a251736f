"""Cross-entropy over a long vocabulary without all its logits in memory.

The logits of a batch are [batch, length, vocab] in float32: 3.3 GB for 16 rows of GPT-2, and as much again for their
gradient. Here they live for one chunk of positions at a time. Since the loss is one number, its gradient with respect
to a chunk's hidden states and to the output matrix is known as soon as the chunk's softmax is, so the forward pass
takes it there and nothing is computed twice.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.corruption.replaced import sample_tokens
from jaxlm.models.layers.placement import devices, place

VOCABULARY_MULTIPLE = 128
"""Logits are computed for a multiple of this many tokens: matrix units stumble over GPT-2's 50,257, and mesh axes do
not divide it."""
NEVER = -1e30
"""The logit of a row that no token has: its exp is 0."""
CHUNK_TOKENS = 2048
"""Positions in a chunk, over all rows that a device has: enough to keep matrix units busy and to hide that every chunk
adds to the gradient of the whole output matrix. The batch is never cut, since it is split over devices already."""
CACHE_BYTES = 16 * 2**20
"""On a CPU, logits that stay in its cache: twice as fast as all at once for 32 x 128 positions and 8,192 tokens."""


class TokenLosses(NamedTuple):
    """The sum that is minimised, and its parts, through which no gradient flows.

    total: Σ weight · (nll + z_loss · log²Z), float32 scalar.
    nll: float32 [batch, length], -log p(label) in nats.
    correct: float32 [batch, length], 1 where the label has the largest logit.
    drawn: int32 [batch, length], a token from softmax(logits / temperature); None where none was asked for.
    """

    total: Array
    nll: Array
    correct: Array
    drawn: Array | None = None


def chunk_positions(batch: int, length: int, vocab: int, hidden: int) -> int:
    """Positions of every row per chunk, on the devices that this is traced for (see models.placement)."""
    platform, shards = devices()
    # On a CPU the logits should still be a few times larger than the matrix that every chunk reads and adds to.
    tokens = max(CACHE_BYTES // (4 * vocab), 4 * hidden) if platform == "cpu" else CHUNK_TOKENS
    return min(length, max(1, tokens * shards // batch))


def chunked_cross_entropy(
    hidden: Float[Array, "batch length hidden"],
    table: Float[Array, "vocab hidden"],
    labels: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    *,
    chunk: int | None = None,
    bias: Float[Array, " vocab"] | None = None,
    z_loss: float = 0.0,
    draw_key: jax.Array | None = None,
    temperature: float = 1.0,
) -> TokenLosses:
    """Σ w · -log softmax(hidden · tableᵀ (+ bias))[label], with gradients for hidden, table and bias.

    hidden is in the compute type, table and bias are parameters in float32; products add up in float32.
    chunk: positions at a time; by default what `chunk_positions` says. Weights get no gradient.
    z_loss: weight of log²Z, the squared logarithm of the softmax's normaliser, which keeps logits from drifting.
    draw_key: also draws a token at each position, while its logits are there; `temperature` is for that alone.
    """
    batch, length, width = hidden.shape
    if chunk is None:
        chunk = chunk_positions(batch, length, table.shape[0], width)
    # Chunks of equal size, at most `chunk`; the last is filled up with positions without weight.
    pieces = math.ceil(length / chunk)
    chunk = math.ceil(length / pieces)
    padding = pieces * chunk - length

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x
        return jnp.moveaxis(x.reshape(batch, pieces, chunk, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, pieces * chunk)[:, :length]

    words = None if draw_key is None else jax.random.key_data(draw_key).reshape(-1)[:2]
    losses = _losses(split(hidden), table, bias, split(labels), split(weights), words, z_loss, temperature)
    return TokenLosses(losses.total, *jax.tree.map(lambda x: jax.lax.stop_gradient(join(x)), losses[1:]))


def _output_matrix(table: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[rows, hidden] in the compute type, with rows of zeros at the end; gathered here, once, not in every chunk."""
    extra = -table.shape[0] % VOCABULARY_MULTIPLE
    return place(jnp.pad(table.astype(dtype), ((0, extra), (0, 0))), "vocabulary", None)


def _offset(bias: jax.Array | None, vocab: int) -> jax.Array | None:
    """What is added to the logits, float32 [rows]: the bias, and NEVER in the rows beyond the vocabulary."""
    extra = -vocab % VOCABULARY_MULTIPLE
    if bias is None and not extra:
        return None
    return jnp.pad(jnp.zeros(vocab, jnp.float32) if bias is None else bias, (0, extra), constant_values=NEVER)


def _logits(hidden: jax.Array, matrix: jax.Array, offset: jax.Array | None) -> jax.Array:
    """[batch, chunk, rows]"""
    logits = jnp.einsum("blh,vh->blv", hidden, matrix, preferred_element_type=jnp.float32)
    return logits if offset is None else logits + offset


def _chunk_losses(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, first: jax.Array, words: jax.Array | None,
    z_loss: float, temperature: float,
) -> tuple[TokenLosses, jax.Array]:
    """(the chunk's part of everything, log Z); first: the place of its first position in the whole."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    largest = jnp.max(logits, axis=-1)
    normaliser = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    nll = normaliser - picked
    drawn = None
    if words is not None:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        drawn = sample_tokens(key, logits, temperature, first)
    total = jnp.sum((nll + z_loss * normaliser**2) * weights)
    return TokenLosses(total, nll, (picked >= largest).astype(jnp.float32), drawn), normaliser


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _losses(hidden, table, bias, labels, weights, words, z_loss, temperature) -> TokenLosses:
    """Chunks in front: hidden [chunks, batch, chunk, hidden], labels and weights [chunks, batch, chunk]. words: the
    draw's threefry key, uint32 [2], or None."""
    matrix, offset = _output_matrix(table, hidden.dtype), _offset(bias, table.shape[0])

    def one(total: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        hidden, labels, weights, first = chunk
        losses, _ = _chunk_losses(_logits(hidden, matrix, offset), labels, weights, first, words, z_loss, temperature)
        return total + losses.total, losses[1:]

    total, parts = _over_chunks(one, jnp.float32(0), (hidden, labels, weights, _first_positions(labels)))
    return TokenLosses(total, *parts)


def _forward(hidden, table, bias, labels, weights, words, z_loss, temperature):
    vocab = table.shape[0]
    matrix, offset = _output_matrix(table, hidden.dtype), _offset(bias, vocab)

    def whole(d_table: jax.Array) -> jax.Array:
        # The sum over the chunks stays on each device until the last: placed otherwise, every chunk would end with an
        # exchange of a matrix of the vocabulary's size.
        return place(d_table, None, "vocabulary")

    def one(carry: Any, chunk: Any) -> tuple[Any, Any]:
        total, d_table, d_bias = carry
        hidden, labels, weights, first = chunk
        logits = _logits(hidden, matrix, offset)
        losses, normaliser = _chunk_losses(logits, labels, weights, first, words, z_loss, temperature)
        is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
        pull = 1.0 + 2.0 * z_loss * normaliser[..., None]
        d_logits = (jnp.exp(logits - normaliser[..., None]) * pull - is_label).astype(hidden.dtype)
        # Positions get their weights in the short arrays on both sides of the long one.
        d_hidden = jnp.einsum("blv,vh->blh", d_logits, matrix) * weights[..., None].astype(hidden.dtype)
        hidden = hidden * weights[..., None].astype(hidden.dtype)
        if bias is not None:
            d_bias = d_bias + jnp.einsum("bl,blv->v", weights, d_logits, preferred_element_type=jnp.float32)[:vocab]
        # [hidden, vocab]: the long array is read as it lies, which XLA's CPU would otherwise transpose in memory.
        slope = jnp.einsum("blh,blv->hv", hidden, d_logits, preferred_element_type=jnp.float32)
        d_table = d_table + whole(slope)
        return (total + losses.total, d_table, d_bias), (losses[1:], d_hidden)

    d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    start = (jnp.float32(0), whole(jnp.zeros(matrix.shape[::-1], jnp.float32)), d_bias)
    chunks = (hidden, labels, weights, _first_positions(labels))
    (total, d_table, d_bias), (parts, d_hidden) = _over_chunks(one, start, chunks)
    return TokenLosses(total, *parts), (d_hidden, whole(d_table)[:, :vocab].T, d_bias)


def _backward(_, __, gradients, cotangents):
    d_hidden, d_table, d_bias = gradients
    scale = cotangents.total
    # The cotangent is 1 / (number of targets): it is applied to float32 sums, once.
    return (
        (d_hidden * scale).astype(d_hidden.dtype), d_table * scale, None if d_bias is None else d_bias * scale,
        None, None, None,
    )


_losses.defvjp(_forward, _backward)


def _first_positions(labels: jax.Array) -> jax.Array:
    chunks, _, chunk = labels.shape
    return jnp.arange(chunks, dtype=jnp.uint32) * chunk


def _over_chunks(step: Any, carry: Any, chunks: Any) -> tuple[Any, Any]:
    if jax.tree.leaves(chunks)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, chunks)
    carry, out = step(carry, jax.tree.map(lambda x: x[0], chunks))
    return carry, jax.tree.map(lambda x: x[None], out)
