"""Cross-entropy over a large vocabulary without all its logits in memory.

The logits of a batch are [batch, length, vocab] in float32: 3.3 GB for 16 rows of GPT-2, and as much again for their
gradient. Here they exist for one chunk of positions at a time. Since the loss is one number, its gradient with respect
to a chunk's hidden states and to the output matrix is known as soon as the chunk's softmax is, so the forward pass
computes it there and nothing is computed twice.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.corruption.replaced import sample_tokens
from jaxlm.parallel.activations import constrain, num_batch_shards, num_vocabulary_shards

NEVER = -1e30
"""The logit of a row of the output matrix that no token has: its exp is 0."""
CHUNK_TOKENS = 2048
"""Positions in a chunk, over all rows that a device has: enough to keep matrix units busy, and to hide that every chunk
adds to the gradient of the whole output matrix. The batch is never cut, because it is sharded over devices already."""
WRITTEN_OUT = 4
"""Chunks that are written out one after another: the compiler then fuses the softmax into the products that read it,
which it does not in a loop. Longer losses are loops over so many chunks."""


class TokenLosses(NamedTuple):
    """The sum that is minimized, and its parts, through which no gradient flows.

    total: Σ weight · (nll + z_loss · log²Z), float32 scalar.
    nll: float32 [batch, length], -log p(label) in nats.
    correct: float32 [batch, length], 1 where the label has the largest logit.
    drawn: int32 [batch, length], a token from softmax(logits / temperature); None where none was asked for.
    """

    total: Array
    nll: Array
    correct: Array
    drawn: Array | None = None


def chunk_positions(batch: int, length: int) -> int:
    """Positions of every row in one chunk, on the mesh that this is traced for."""
    return min(length, max(1, CHUNK_TOKENS * num_batch_shards() // batch))


def chunked_cross_entropy(
    hidden: Float[Array, "batch length hidden"],
    table: Float[Array, "vocab hidden"],
    labels: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    *,
    chunk: int | None = None,
    bias: Float[Array, " vocab"] | None = None,
    z_loss: float = 0.0,
    uniform: Float[Array, "batch length"] | None = None,
    temperature: float = 1.0,
) -> TokenLosses:
    """Σ w · -log softmax(hidden · tableᵀ (+ bias))[label], with gradients for hidden, table and bias.

    hidden is in the compute type, table and bias are parameters in float32; products add up in float32.
    chunk: positions of each row at a time; by default `chunk_positions`. Weights get no gradient.
    z_loss: weight of log²Z, the squared logarithm of the softmax's normalizer, which keeps logits from drifting (T5X).
    uniform: also draws a token at each position, while its logits are there, by this number in [0, 1); `temperature` is
    for that alone.
    """
    batch, length, _ = hidden.shape
    chunk = _equal_chunks(length, chunk or chunk_positions(batch, length))
    split = functools.partial(_split, chunk=chunk)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]

    losses = _losses(split(hidden), table, bias, split(labels), split(weights), split(uniform), z_loss, temperature)
    return TokenLosses(losses.total, *jax.tree.map(lambda x: jax.lax.stop_gradient(join(x)), losses[1:]))


def _equal_chunks(length: int, most: int) -> int:
    """Size of chunks of equal size, at most `most`, that cover `length` positions."""
    return math.ceil(length / math.ceil(length / most))


def _split(x: jax.Array | None, chunk: int) -> jax.Array | None:
    """[batch, length, …] as [chunks, batch, chunk, …], filled up with zeros: positions without weight."""
    if x is None:
        return None
    batch, length = x.shape[:2]
    padding = -length % chunk
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)


def _output_matrix(table: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[rows, hidden] in the compute type, with rows of zeros at the end where the tensor axis does not divide the
    vocabulary; gathered here, once, not in every chunk."""
    extra = -table.shape[0] % num_vocabulary_shards()
    return constrain(jnp.pad(table.astype(dtype), ((0, extra), (0, 0))), "vocabulary", None)


def _offset(bias: jax.Array | None, vocab: int) -> jax.Array | None:
    """What is added to the logits, float32 [rows]: the bias, and NEVER in the rows beyond the vocabulary."""
    extra = -vocab % num_vocabulary_shards()
    if bias is None and not extra:
        return None
    return jnp.pad(jnp.zeros(vocab, jnp.float32) if bias is None else bias, (0, extra), constant_values=NEVER)


def _logits(hidden: jax.Array, matrix: jax.Array, offset: jax.Array | None) -> jax.Array:
    """[batch, chunk, rows]"""
    logits = jnp.einsum("blh,vh->blv", hidden, matrix, preferred_element_type=jnp.float32)
    return logits if offset is None else logits + offset


def _chunk_losses(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, uniform: jax.Array | None, z_loss: float,
    temperature: float,
) -> tuple[TokenLosses, jax.Array]:
    """(the chunk's losses, log Z)."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    largest = jnp.max(logits, axis=-1)
    normalizer = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    nll = normalizer - picked
    drawn = None if uniform is None else sample_tokens(uniform, logits, temperature)
    total = jnp.sum((nll + z_loss * normalizer**2) * weights)
    return TokenLosses(total, nll, (picked >= largest).astype(jnp.float32), drawn), normalizer


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _losses(hidden, table, bias, labels, weights, uniform, z_loss, temperature) -> TokenLosses:
    """Chunks in front: hidden [chunks, batch, chunk, hidden]; labels, weights, uniform [chunks, batch, chunk]."""
    matrix, offset = _output_matrix(table, hidden.dtype), _offset(bias, table.shape[0])

    def one(total: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        hidden, labels, weights, uniform = chunk
        losses, _ = _chunk_losses(_logits(hidden, matrix, offset), labels, weights, uniform, z_loss, temperature)
        return total + losses.total, losses[1:]

    total, parts = _over_chunks(one, jnp.float32(0), (hidden, labels, weights, uniform))
    return TokenLosses(total, *parts)


def _forward(hidden, table, bias, labels, weights, uniform, z_loss, temperature):
    matrix, offset = _output_matrix(table, hidden.dtype), _offset(bias, table.shape[0])

    def one(carry: Any, chunk: Any) -> tuple[Any, Any]:
        total, sums = carry
        hidden, labels, weights, uniform = chunk
        logits = _logits(hidden, matrix, offset)
        losses, normalizer = _chunk_losses(logits, labels, weights, uniform, z_loss, temperature)
        is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
        pull = 1.0 + 2.0 * z_loss * normalizer[..., None]
        d_logits = (jnp.exp(logits - normalizer[..., None]) * pull - is_label).astype(hidden.dtype)
        d_hidden, sums = _add_gradients(sums, hidden, matrix, d_logits, weights)
        return (total + losses.total, sums), (losses[1:], d_hidden)

    start = (jnp.float32(0), _no_gradients(matrix, bias))
    (total, sums), (parts, d_hidden) = _over_chunks(one, start, (hidden, labels, weights, uniform))
    return TokenLosses(total, *parts), (d_hidden, *_finish(sums, table.shape[0]))


def _whole(d_table: jax.Array) -> jax.Array:
    # The sum over the chunks stays on each device until the last: sharded otherwise, every chunk would end with an
    # exchange of a matrix of the vocabulary's size.
    return constrain(d_table, None, "vocabulary")


def _no_gradients(matrix: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Zeros for the gradients of the output matrix, transposed, and of the bias."""
    d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    return _whole(jnp.zeros(matrix.shape[::-1], jnp.float32)), d_bias


def _add_gradients(sums: Any, hidden: jax.Array, matrix: jax.Array, d_logits: jax.Array, weights: jax.Array) -> Any:
    """(a chunk's gradient of its hidden states, the sums of `_no_gradients` with those of this chunk)."""
    d_table, d_bias = sums
    # Weights multiply the [positions, hidden] arrays, not the logits.
    d_hidden = jnp.einsum("blv,vh->blh", d_logits, matrix) * weights[..., None].astype(hidden.dtype)
    hidden = hidden * weights[..., None].astype(hidden.dtype)
    if d_bias is not None:
        more = jnp.einsum("bl,blv->v", weights, d_logits, preferred_element_type=jnp.float32)
        d_bias = d_bias + more[: d_bias.size]
    # [hidden, vocab], so that the long array is read as it lies: the other order takes twice as long on CPUs.
    d_table = d_table + _whole(jnp.einsum("blh,blv->hv", hidden, d_logits, preferred_element_type=jnp.float32))
    return d_hidden, (d_table, d_bias)


def _finish(sums: Any, vocab: int) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of the table and the bias."""
    d_table, d_bias = sums
    # The barrier keeps the transposition out of the product, which XLA's CPU compiler cannot do in bfloat16.
    return jax.lax.optimization_barrier(_whole(d_table))[:, :vocab].T, d_bias


def _backward(_, __, gradients, cotangents):
    d_hidden, d_table, d_bias = gradients
    scale = cotangents.total
    # The cotangent is 1 / (number of targets): it is applied to float32 sums, once.
    return (
        (d_hidden * scale).astype(d_hidden.dtype), d_table * scale, None if d_bias is None else d_bias * scale,
        None, None, None,
    )


_losses.defvjp(_forward, _backward)


Head = tuple[Float[Array, "batch length hidden"], Float[Array, "vocab hidden"], Float[Array, " vocab"]]
"""Features, output matrix and bias, whose product are the logits."""


def chunked_divergence(
    student: Head, teacher: Head, weights: Float[Array, "batch length"], temperature: float, *, chunk: int | None = None
) -> Float[Array, ""]:
    """T² Σ w · KL(softmax(teacher / T) ‖ softmax(student / T)) (Hinton et al. 2015, section 2), with gradients for the
    student's head. The vocabularies are the same; the factor keeps gradients of one size at all temperatures."""
    batch, length, _ = student[0].shape
    chunk = _equal_chunks(length, chunk or chunk_positions(batch, length))
    (ours, *own), (theirs, *other) = student, teacher
    return _divergence(_split(ours, chunk), *own, _split(theirs, chunk), *other, _split(weights, chunk), temperature)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _divergence(*arguments) -> jax.Array:
    return _divergence_forward(*arguments)[0]


def _divergence_forward(hidden, table, bias, theirs, their_table, their_bias, weights, temperature):
    matrix, offset = _output_matrix(table, hidden.dtype), _offset(bias, table.shape[0])
    their_matrix = _output_matrix(their_table, theirs.dtype)
    their_offset = _offset(their_bias, their_table.shape[0])

    def one(carry: Any, chunk: Any) -> tuple[Any, jax.Array]:
        total, sums = carry
        hidden, theirs, weights = chunk
        found = jax.nn.log_softmax(_logits(hidden, matrix, offset) / temperature)
        goal = jax.nn.log_softmax(_logits(theirs, their_matrix, their_offset) / temperature)
        total += temperature**2 * jnp.sum(weights * jnp.sum(jnp.exp(goal) * (goal - found), axis=-1))
        d_logits = (temperature * (jnp.exp(found) - jnp.exp(goal))).astype(hidden.dtype)
        d_hidden, sums = _add_gradients(sums, hidden, matrix, d_logits, weights)
        return (total, sums), d_hidden

    start = (jnp.float32(0), _no_gradients(matrix, bias))
    (total, sums), d_hidden = _over_chunks(one, start, (hidden, theirs, weights))
    return total, (d_hidden, *_finish(sums, table.shape[0]))


def _divergence_backward(_, gradients, cotangent):
    d_hidden, d_table, d_bias = gradients
    return (d_hidden * cotangent).astype(d_hidden.dtype), d_table * cotangent, d_bias * cotangent, *(None,) * 4


_divergence.defvjp(_divergence_forward, _divergence_backward)


def _over_chunks(step: Any, carry: Any, chunks: Any) -> tuple[Any, Any]:
    return jax.lax.scan(step, carry, chunks, unroll=WRITTEN_OUT)
