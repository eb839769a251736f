"""Cross-entropy over a large vocabulary without all its logits in memory.

The logits of a batch are [batch, length, vocab] in float32: 3.3 GB for 16 rows of GPT-2, and as much again for their
gradient. Here they exist for one chunk of positions at a time. The loss is a scalar, so the gradient with respect to a
chunk's hidden states and to the output matrix is known as soon as the chunk's softmax is. The forward pass computes it
there, and nothing is computed twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.corruption.replaced import sample_tokens
from jaxlm.models.base import TokenPredictor
from jaxlm.objectives.base import Term, Terms
from jaxlm.parallel.activations import constrain, num_batch_shards, num_vocabulary_shards
from jaxlm.types import Params

MASKED_LOGIT = -1e30
"""Logit of padded rows of the output matrix, which belong to no token: its exp is 0."""
LARGEST_EXPONENT = 75.0
"""Limit of logit − label's logit in the softmax: its exp times 250,000 tokens is still a float32."""
CHUNK_TOKENS = 4096
"""Number of positions in a chunk, over all rows of a device.

It keeps matrix units busy and amortizes the addition of every chunk to the gradient of the whole output matrix. The
batch is never split, because it is sharded over devices already.
"""
CHUNK_LOGITS = 9 << 27
"""Largest number of logits in a chunk on a device, which vocabularies of more than 294,912 tokens reach."""
UNROLL = 4
"""Number of chunks unrolled in a row, but 1 for larger vocabularies.

In unrolled code the compiler fuses the softmax into the products that read it, which it does not in a loop. Longer
losses are loops over this many chunks.
"""


ROW_MULTIPLE = 8
"""Multiple of the rows of the output matrix on a device.

For other sizes a GPU's compiler pads matrix, logits and gradient around each product.
"""


class TokenLosses(NamedTuple):
    """The minimized sum and its parts, through which no gradient flows.

    Attributes:
        total: Σ weight · (nll + z_loss · log²Z), float32 scalar.
        nll: -log p(label) in nats, float32 [batch, length].
        correct: 1 where the label has the largest logit, float32 [batch, length].
        drawn: a token sampled from softmax(logits / temperature), int32 [batch, length]; None if not requested.
    """

    total: Array
    nll: Array
    correct: Array
    drawn: Array | None = None

    def terms(self, name: str, weights: Float[Array, "batch length"], coefficient: float = 1.0) -> Terms:
        """Return the term `<name>_loss` and the metric `<name>_accuracy`."""
        loss = Term(self.total, jnp.sum(weights), coefficient)
        return {f"{name}_loss": loss, f"{name}_accuracy": Term.of(self.correct, weights)}


def chunk_positions(batch: int, length: int, vocab: int) -> int:
    """Return the number of positions of every row per chunk, on the mesh of the current trace."""
    own = -(-vocab // num_vocabulary_shards())
    return min(length, max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // own) * num_batch_shards() // batch))


def _unroll(vocab: int) -> int:
    return UNROLL if CHUNK_TOKENS * -(-vocab // num_vocabulary_shards()) <= CHUNK_LOGITS else 1


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
    """Return Σ w · -log softmax(hidden · tableᵀ + bias)[label], with gradients for hidden, table and bias.

    Products accumulate in float32. The weights get no gradient.

    Args:
        hidden: features in the compute type.
        table: output matrix, a float32 parameter.
        labels: target ids.
        weights: weight of each position.
        chunk: positions of each row at a time; `chunk_positions` by default.
        bias: output bias, a float32 parameter.
        z_loss: weight of log²Z, the squared log-normalizer of the softmax, which keeps logits from drifting (T5X).
        uniform: numbers in [0, 1); if given, a token is sampled at each position by inverting the distribution.
        temperature: softmax temperature of that sample only.
    """
    batch, length, _ = hidden.shape
    chunk = _equal_chunks(length, chunk or chunk_positions(batch, length, table.shape[0]))
    split = functools.partial(_split, chunk=chunk)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]

    losses = _losses(split(hidden), table, bias, split(labels), split(weights), split(uniform), z_loss, temperature)
    return TokenLosses(losses.total, *jax.tree.map(lambda x: jax.lax.stop_gradient(join(x)), losses[1:]))


def token_losses(
    model: TokenPredictor, params: Params, hidden: Float[Array, "batch length width"],
    labels: Int[Array, "batch length"], weights: Float[Array, "batch length"], **options: Any,
) -> TokenLosses:
    """Return the losses of a model's predictions from hidden states; the options are of `chunked_cross_entropy`."""
    table, bias = model.output_matrix(params)
    return chunked_cross_entropy(model.token_features(params, hidden), table, labels, weights, bias=bias, **options)


def _equal_chunks(length: int, largest: int) -> int:
    """Return the size of equal chunks, at most `largest`, that cover `length` positions."""
    return math.ceil(length / math.ceil(length / largest))


def _split(x: jax.Array | None, chunk: int) -> jax.Array | None:
    """Reshape [batch, length, …] to [chunks, batch, chunk, …], padded with zeros: positions without weight."""
    if x is None:
        return None
    batch, length = x.shape[:2]
    padding = -length % chunk
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)


def _is_small(hidden: jax.Array, weights: jax.Array) -> bool:
    """Return whether copies of the output matrix would take longer than what they save."""
    return weights.size // num_batch_shards() <= 2 * hidden.shape[-1]


def _extra_rows(vocab: int, is_small: bool) -> int:
    """Return the number of rows that pad the output matrix to equal parts for the devices of the tensor axis."""
    return -vocab % ((1 if is_small else ROW_MULTIPLE) * num_vocabulary_shards())


def _output_matrix(table: jax.Array, dtype: jnp.dtype, is_small: bool) -> jax.Array:
    """Return the padded output matrix in the compute type.

    It is gathered here once instead of in every chunk.
    """
    rows = ((0, _extra_rows(table.shape[0], is_small)), (0, 0))
    return constrain(jnp.pad(table.astype(dtype), rows), "vocabulary", None)


def _offset(bias: jax.Array | None, vocab: int, is_small: bool) -> jax.Array | None:
    """Return the addend of the logits, float32 [rows]: the bias, and MASKED_LOGIT in rows beyond the vocabulary."""
    extra = _extra_rows(vocab, is_small)
    if bias is None and not extra:
        return None
    return jnp.pad(jnp.zeros(vocab, jnp.float32) if bias is None else bias, (0, extra), constant_values=MASKED_LOGIT)


def _logits(hidden: jax.Array, matrix: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Return logits, float32 [batch, chunk, rows]."""
    logits = jnp.einsum("blh,vh->blv", hidden, matrix, preferred_element_type=jnp.float32)
    return logits if offset is None else logits + offset


def _label_logits(hidden: jax.Array, matrix: jax.Array, offset: jax.Array | None, labels: jax.Array) -> jax.Array:
    """Return the logits of the labels without computing the others, float32 [batch, chunk]."""
    logits = jnp.einsum("blh,blh->bl", hidden, matrix[labels], preferred_element_type=jnp.float32)
    return logits if offset is None else logits + offset[labels]


def _largest_logits(hidden: jax.Array, matrix: jax.Array, offset: jax.Array | None, _: jax.Array) -> jax.Array:
    """Return the largest logits, float32 [batch, chunk], from logits of their own, which are never in memory."""
    return jnp.max(_logits(jax.lax.optimization_barrier(hidden), matrix, offset), axis=-1)


Shift = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array], jax.Array]
"""Function of hidden states, output matrix, offset and labels: the shift of the exponents, float32 [batch, chunk]."""


def _log_normalizer(logits: jax.Array, largest: jax.Array, shift: jax.Array | None) -> jax.Array:
    """Return log Σ exp(logits), float32 [batch, chunk].

    The usual shift of the exponents, the largest logit, is known only after all logits. With the labels' logits as
    `shift`, which are known before, a TPU sums the exponentials while it computes the logits (GPT-2's loss: 17.0 →
    12.2 ms). Where a label is less likely than exp(-75), the result is too small; `_exactly` computes it again.
    """
    if shift is None:
        return largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    exponentials = jnp.exp(jnp.minimum(logits - shift[..., None], LARGEST_EXPONENT))
    return jnp.maximum(shift + jnp.log(jnp.sum(exponentials, axis=-1)), largest)


def _chunk_losses(
    chunk: Any, matrix: jax.Array, offset: jax.Array | None, shift_of: Shift | None, z_loss: float, temperature: float
) -> tuple[TokenLosses, jax.Array, jax.Array]:
    """Return the losses of a chunk, its logits and log Z.

    The shift has its own rounding; the label's logit of the loss is `picked`, so that no loss is negative.
    """
    hidden, labels, weights, uniform = chunk
    logits = _logits(hidden, matrix, offset)
    shift = None if shift_of is None else shift_of(hidden, matrix, offset, labels)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    largest = jnp.max(logits, axis=-1)
    normalizer = _log_normalizer(logits, largest, shift)
    nll = normalizer - picked
    drawn = None if uniform is None else sample_tokens(uniform, logits, temperature)
    total = jnp.sum((nll + z_loss * normalizer**2) * weights)
    return TokenLosses(total, nll, (picked >= largest).astype(jnp.float32), drawn), logits, normalizer


def _exactly(
    run: Callable[[Shift | None], tuple[TokenLosses, Any]], hidden: jax.Array, weights: jax.Array
) -> tuple[TokenLosses, Any]:
    """Return the result of `run`, which gets the shift of the exponents; None for the largest logit.

    With the labels' logits it runs a second time where a loss is too large for them. For few tokens the largest logit
    is cheaper than the copies of the table's gradient that the condition costs, and with a sharded vocabulary the rows
    of the labels would be gathered from other devices.
    """
    if _is_small(hidden, weights) or num_vocabulary_shards() > 1:
        # The TPU compiler may make the table's gradient after the backward pass, from logits that it keeps in HBM. With
        # a barrier it does not: two layers of T5-1.1-base on v5e:2x2 take 13 % less HBM then, and 0.6 % more time.
        return run(None)
    # The barrier keeps the compiler from moving the last products into a branch, with the logits that they read.
    found = jax.lax.optimization_barrier(run(_label_logits))
    is_far = jnp.any((found[0].nll > LARGEST_EXPONENT) & (weights != 0.0))
    return jax.lax.cond(is_far, lambda: run(_largest_logits, 1), lambda: found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _losses(*arguments) -> TokenLosses:
    """Compute all losses, with chunks as first axis: hidden [chunks, batch, chunk, hidden] and so on."""
    return _forward(*arguments, with_gradients=False)[0]


def _forward(hidden, table, bias, labels, weights, uniform, z_loss, temperature, with_gradients=True):
    """Compute the losses and, as residuals, the gradients of hidden, table and bias."""
    is_small = _is_small(hidden, weights)
    matrix, offset = _output_matrix(table, hidden.dtype, is_small), _offset(bias, table.shape[0], is_small)

    def run(shift_of: Shift | None, unroll: int = _unroll(table.shape[0])) -> tuple[TokenLosses, Any]:
        def chunk_step(carry: Any, chunk: Any) -> tuple[Any, Any]:
            total, sums = carry
            hidden, labels, weights, _ = chunk
            losses, logits, normalizer = _chunk_losses(chunk, matrix, offset, shift_of, z_loss, temperature)
            if not with_gradients:
                return (total + losses.total, None), (losses[1:], None)
            is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
            normalizer_gradient = 1.0 + 2.0 * z_loss * normalizer[..., None]
            d_logits = (jnp.exp(logits - normalizer[..., None]) * normalizer_gradient - is_label).astype(hidden.dtype)
            d_hidden, sums = _add_gradients(sums, hidden, matrix, d_logits, weights)
            return (total + losses.total, sums), (losses[1:], d_hidden)

        start = jnp.float32(0), _no_gradients(matrix, bias) if with_gradients else None
        chunks = (hidden, labels, weights, uniform)
        (total, sums), (parts, d_hidden) = jax.lax.scan(chunk_step, start, chunks, unroll=unroll)
        return TokenLosses(total, *parts), (d_hidden, sums)

    losses, (d_hidden, sums) = _exactly(run, hidden, weights)
    return losses, (d_hidden, *_table_gradients(sums, table.shape[0])) if with_gradients else None


def _shard_vocab(d_table: jax.Array) -> jax.Array:
    """Constrain the gradient of the transposed output matrix to be sharded over the vocabulary only."""
    # The sum over the chunks stays on each device until the last one: any other sharding would end every chunk with a
    # collective over a matrix of the vocabulary's size.
    return constrain(d_table, None, "vocabulary")


def _no_gradients(matrix: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Return zero gradients of the transposed output matrix and of the bias."""
    d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    return _shard_vocab(jnp.zeros(matrix.shape[::-1], jnp.float32)), d_bias


def _add_gradients(sums: Any, hidden: jax.Array, matrix: jax.Array, d_logits: jax.Array, weights: jax.Array) -> Any:
    """Return the gradient of a chunk's hidden states, and the sums of `_no_gradients` with this chunk added."""
    d_table, d_bias = sums
    # Weights multiply the [positions, hidden] arrays, which are smaller than the logits.
    d_hidden = jnp.einsum("blv,vh->blh", d_logits, matrix) * weights[..., None].astype(hidden.dtype)
    hidden = hidden * weights[..., None].astype(hidden.dtype)
    if d_bias is not None:
        chunk_bias = jnp.einsum("bl,blv->v", weights, d_logits, preferred_element_type=jnp.float32)
        d_bias = d_bias + chunk_bias[: d_bias.size]
    # [hidden, vocab] reads the long array in memory order: the other order takes twice as long on CPUs.
    d_table = d_table + _shard_vocab(jnp.einsum("blh,blv->hv", hidden, d_logits, preferred_element_type=jnp.float32))
    return d_hidden, (d_table, d_bias)


def _table_gradients(sums: Any, vocab: int) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradients of the table and the bias."""
    d_table, d_bias = sums
    # The barrier keeps the transposition out of the product: XLA's CPU compiler fails on the fusion in bfloat16.
    return jax.lax.optimization_barrier(_shard_vocab(d_table))[:, :vocab].T, d_bias


def _backward(_, __, gradients, cotangents):
    d_hidden, d_table, d_bias = gradients
    scale = cotangents.total
    # The cotangent, 1 / (number of targets), scales float32 sums once.
    return (
        (d_hidden * scale).astype(d_hidden.dtype), d_table * scale, None if d_bias is None else d_bias * scale,
        None, None, None,
    )


_losses.defvjp(_forward, _backward)


SoftmaxHead = tuple[Float[Array, "batch length _"], Float[Array, "vocab _"], Float[Array, " vocab"] | None]
"""Features, output matrix and bias of a vocabulary softmax, of a width of its own."""


def chunked_divergence(
    student: SoftmaxHead, teacher: SoftmaxHead, weights: Float[Array, "batch length"], temperature: float, *,
    chunk: int | None = None,
) -> Float[Array, ""]:
    """Return T² Σ w · KL(softmax(teacher / T) ‖ softmax(student / T)) (Hinton et al. 2015, section 2).

    Only the student's head gets gradients. Both heads have the same vocabulary. The factor T² keeps the scale of the
    gradients independent of the temperature.
    """
    batch, length, _ = student[0].shape
    chunk = _equal_chunks(length, chunk or chunk_positions(batch, length, student[1].shape[0]))
    (student_hidden, *student_output), (teacher_hidden, *teacher_output) = student, teacher
    return _divergence(
        _split(student_hidden, chunk), *student_output, _split(teacher_hidden, chunk), *teacher_output,
        _split(weights, chunk), temperature,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _divergence(*arguments) -> jax.Array:
    return _divergence_forward(*arguments)[0]


def _divergence_forward(hidden, table, bias, teacher_hidden, teacher_table, teacher_bias, weights, temperature):
    is_small = _is_small(hidden, weights)
    matrix, offset = _output_matrix(table, hidden.dtype, is_small), _offset(bias, table.shape[0], is_small)
    teacher_matrix = _output_matrix(teacher_table, teacher_hidden.dtype, is_small)
    teacher_offset = _offset(teacher_bias, teacher_table.shape[0], is_small)

    def chunk_step(carry: Any, chunk: Any) -> tuple[Any, jax.Array]:
        total, sums = carry
        hidden, teacher_hidden, weights = chunk
        log_probs = jax.nn.log_softmax(_logits(hidden, matrix, offset) / temperature)
        targets = jax.nn.log_softmax(_logits(teacher_hidden, teacher_matrix, teacher_offset) / temperature)
        total += temperature**2 * jnp.sum(weights * jnp.sum(jnp.exp(targets) * (targets - log_probs), axis=-1))
        d_logits = (temperature * (jnp.exp(log_probs) - jnp.exp(targets))).astype(hidden.dtype)
        d_hidden, sums = _add_gradients(sums, hidden, matrix, d_logits, weights)
        return (total, sums), d_hidden

    start = (jnp.float32(0), _no_gradients(matrix, bias))
    chunks = (hidden, teacher_hidden, weights)
    (total, sums), d_hidden = jax.lax.scan(chunk_step, start, chunks, unroll=_unroll(table.shape[0]))
    return total, (d_hidden, *_table_gradients(sums, table.shape[0]))


def _divergence_backward(_, gradients, cotangent):
    d_hidden, d_table, d_bias = gradients
    d_bias = None if d_bias is None else d_bias * cotangent
    return (d_hidden * cotangent).astype(d_hidden.dtype), d_table * cotangent, d_bias, *(None,) * 4


_divergence.defvjp(_divergence_forward, _divergence_backward)
