"""Chunked attention: local, or by locality-sensitive hashing (LSH; Kitaev et al. 2020, section 2)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.attention import HIDDEN, on_each_device, split_heads
from jaxlm.models.layers.chunked_kernel import ChunkedInputs, Options, chunked_attention, fits
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dense import Dense
from jaxlm.models.layers.dropout import dropout, dropout_seeds, module_key
from jaxlm.models.layers.kernel_choice import Attention, choose_kernel
from jaxlm.models.layers.multi_head import HeadsDense
from jaxlm.parallel.rules import ACTIVATION_AXES

SELF_SCORE = -1e5
"""Score of a token's own key in LSH attention: it has weight only if no other key is visible."""


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(StackConfig):
    """Configuration of a stack with chunked attention.

    Attributes:
        buckets: Even factors of the number of buckets.
        hash_seed: Seed of the rotations where no "hashes" key is given.
    """

    _: dataclasses.KW_ONLY
    local_chunk_size: int
    lsh_chunk_size: int
    num_hashes: int
    buckets: tuple[int, ...]
    lsh_attention_dropout: float
    hash_seed: int


Buckets = Int[Array, "batch heads rounds length"]


class RowLayout(NamedTuple):
    """Documents and padding of the rows."""

    segments: Int[Array, "batch length"]
    """Number of each token's document, 0 at padding. Attention stays within a document."""
    num_live_chunks: Int[Array, " batch"] | None = None
    """Number of LSH chunks before the trailing padding, which then has no influence; None for all chunks."""


def attend_in_chunks(
    query: Float[Array, "batch heads n head_dim"],
    key: Float[Array, "batch heads n head_dim"],
    value: Float[Array, "batch heads n head_dim"],
    positions: Int[Array, "#batch #heads n"],
    segments: Int[Array, "batch #heads n"],  # noqa: F821
    num_chunks: int,
    *,
    previous: Int[Array, "batch chunks"] | None = None,
    self_score: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    attention: str = "xla",
) -> tuple[Float[Array, "batch heads n head_dim"], Float[Array, "batch heads n"]]:
    """Return causal attention of each chunk's queries to its own keys and those of the previous chunk.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        positions: Position of each vector in the row; a query attends to keys at its own position and before it.
        segments: Document of each vector; a query attends to keys of its own document.
        num_chunks: Number of chunks. A single chunk has no previous one.
        previous: Index of the chunk before each chunk; by default chunks are in order, and the last one is before the
            first.
        self_score: Score of a token's own key in place of q · k.
        dropout_rate: Dropout rate of the probabilities.
        dropout_key: Dropout key; None turns dropout off.
        attention: The `attention` field of the model.

    Returns:
        softmax(q kᵀ) v, and the logarithm of the softmax's denominator in float32.
    """
    if previous is None and _has_kernel(attention, query.shape, query.dtype.name, num_chunks):
        options = Options(query.shape[2] // num_chunks, self_score, 0.0 if dropout_key is None else dropout_rate)
        return fused(query, key, value, positions, segments, dropout_key, options)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], num_chunks, -1, *x.shape[3:])

    def keys(x: jax.Array) -> jax.Array:
        x = split(x)
        if num_chunks == 1:
            return x
        if previous is None:
            earlier = jnp.roll(x, 1, axis=2)
        else:
            earlier = jnp.take_along_axis(x, previous.reshape(-1, 1, num_chunks, *[1] * (x.ndim - 3)), axis=2)
        return jnp.concatenate([earlier, x], axis=3)

    scores = jnp.einsum("bhcqd,bhckd->bhcqk", split(query), keys(key), preferred_element_type=jnp.float32)
    here, there = split(positions)[..., :, None], keys(positions)[..., None, :]
    is_same_document = split(segments)[..., :, None] == keys(segments)[..., None, :]
    scores = jnp.where((here >= there) & is_same_document, scores, HIDDEN)
    if self_score is not None:
        scores = jnp.where(here == there, self_score, scores)
    total = jax.nn.logsumexp(scores, axis=-1)
    probabilities = dropout(jnp.exp(scores - total[..., None]), dropout_rate, dropout_key, row_axes=2)
    out = jnp.einsum("bhcqk,bhckd->bhcqd", probabilities.astype(value.dtype), keys(value))
    return out.reshape(query.shape), total.reshape(query.shape[:3])


def _has_kernel(attention: str, shape: tuple[int, ...], dtype: str, num_chunks: int) -> bool:
    """Return whether `choose_kernel` finds a fused kernel for queries of this shape."""
    _, heads, n, head_dim = shape
    is_own = dtype == "bfloat16" and fits(n, n // num_chunks, head_dim)
    what = Attention(n, n, heads, head_dim, dtype, drops=True, causal=True, has_own_kernel=is_own)
    return choose_kernel(attention, what) == "own"


def fused(query, key, value, positions, segments, dropout_key, options):
    """Return attention by the TPU's kernel."""
    batch, heads = query.shape[:2]
    vectors = jnp.stack([jnp.broadcast_to(x, query.shape[:3]) for x in (positions, segments)], axis=2)
    seeds = jnp.zeros((batch, heads), jnp.int32) if dropout_key is None else dropout_seeds(dropout_key, (batch, heads))
    split = PartitionSpec(ACTIVATION_AXES["batch"], split_heads(heads)[0])
    run = on_each_device(functools.partial(chunked_attention, options=options), (split,), split)
    out, log_sums = run(ChunkedInputs(query, key, value, vectors, seeds))
    return out, log_sums[:, :, 0]


class LocalAttention(nn.Module):
    """Causal attention to a token's own chunk and the previous one."""

    config: ChunkedConfig
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length hidden"], rows: RowLayout, buckets: None = None
    ) -> tuple[Float[Array, "batch length hidden"], None]:
        c, length = self.config, x.shape[1]
        query, key, value = (project(c, name, x) for name in ("query", "key", "value"))
        out, _ = attend_in_chunks(
            query, key * jnp.asarray(c.attention_scale, key.dtype), value, jnp.arange(length)[None, None],
            rows.segments[:, None], max(1, length // c.local_chunk_size), dropout_rate=c.attention_dropout,
            dropout_key=module_key(self, c.attention_dropout, self.deterministic), attention=c.attention,
        )
        return merge(c, out), None


class LshAttention(nn.Module):
    """Causal LSH attention (Kitaev et al. 2020).

    Queries and keys share the projection `query`; keys are scaled to length 1. Each round of hashing sorts the tokens
    by bucket and cuts them into chunks; a token attends to its own chunk and the one before. The output is the mean of
    the rounds, weighted by the denominators of their softmax. Rows of a single chunk are not hashed. As in
    Transformers, and unlike equations 3 and 4 of the paper, keys of other buckets in these chunks count, and a key that
    several rounds find counts as often.
    """

    config: ChunkedConfig
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length hidden"], rows: RowLayout, buckets: Buckets | None
    ) -> tuple[Float[Array, "batch length hidden"], Buckets | None]:
        """Return the output and the buckets, which are computed unless they are given."""
        c, length = self.config, x.shape[1]
        shared, value = project(c, "query", x), project(c, "value", x)
        options = dict(
            self_score=SELF_SCORE, dropout_rate=c.lsh_attention_dropout,
            dropout_key=module_key(self, c.lsh_attention_dropout, self.deterministic), attention=c.attention,
        )
        segments = rows.segments[:, None]
        if length <= c.lsh_chunk_size:
            positions = jnp.arange(length)[None, None]
            out, _ = attend_in_chunks(shared, unit(shared), value, positions, segments, 1, **options)
            return merge(c, out), None
        if buckets is None:
            # Padding has its own bucket, after all others.
            buckets = hash_vectors(jax.lax.stop_gradient(shared), self._rotations(), c.buckets)
            buckets = jnp.where(segments[:, :, None] > 0, buckets, math.prod(c.buckets)).astype(jnp.int16)
        order = jnp.argsort(buckets, axis=-1, stable=True)
        inverse = jnp.argsort(order, axis=-1)

        def in_order(x: jax.Array) -> jax.Array:
            """Return the sorted vectors, one round after another: [batch, heads, rounds · length, head_dim]."""
            x = jnp.broadcast_to(x[:, :, None], (*order.shape, x.shape[-1]))
            return permute(x, order, inverse).reshape(*x.shape[:2], -1, x.shape[-1])

        shared, value = in_order(shared), in_order(value)
        positions = order.reshape(*order.shape[:2], -1)
        segments = jnp.take_along_axis(segments, positions, axis=2)
        num_chunks, previous = length // c.lsh_chunk_size, None
        if rows.num_live_chunks is not None:
            previous = previous_chunks(num_chunks, c.num_hashes, rows.num_live_chunks)
        out, total = attend_in_chunks(
            shared, unit(shared), value, positions, segments, num_chunks * c.num_hashes, previous=previous, **options
        )
        out = permute(out.reshape(*order.shape, -1), inverse, order)
        total = permute(total.reshape(*order.shape, 1), inverse, order)
        # The published form, exp(x - logsumexp(x)), instead of jax.nn.softmax: at SELF_SCORE the steps of float32 are
        # 0.008, so that the two differ.
        weights = jnp.exp(total - jax.nn.logsumexp(total, axis=2, keepdims=True)).astype(out.dtype)
        return merge(c, jnp.sum(out * weights, axis=2)), buckets

    def _rotations(self) -> Float[Array, "heads head_dim rounds half"]:
        """Return random rotations from the "hashes" key if there is one, else from `hash_seed`."""
        c = self.config
        shape = (c.num_heads, c.head_dim, c.num_hashes, sum(c.buckets) // 2)
        if self.has_rng("hashes"):
            return jax.random.normal(self.make_rng("hashes"), shape)
        return jnp.asarray(torch_normal(c.hash_seed, shape))


def project(config: ChunkedConfig, name: str, x: Float[Array, "batch length hidden"]) -> jax.Array:
    """Apply a dense layer without bias; return [batch, heads, length, head_dim]. For compact methods."""
    return HeadsDense(dataclasses.replace(config, use_bias=False), heads_first=True, name=name)(x)


def merge(config: ChunkedConfig, x: Float[Array, "batch heads length head_dim"]) -> Float[Array, "batch length hidden"]:
    """Apply the output projection, without bias. For compact methods."""
    x = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
    init = kernel_init(config, residual=True)
    return Dense(config.hidden_size, False, config.dtype, init, name="out")(x)


def unit(x: Float[Array, "*batch head_dim"]) -> Float[Array, "*batch head_dim"]:
    """Scale vectors to length 1."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6) / math.sqrt(x.shape[-1])
    return (wide * scale).astype(x.dtype)


def hash_vectors(
    x: Float[Array, "batch heads length head_dim"], rotations: Float[Array, "heads head_dim rounds half"],
    buckets: tuple[int, ...],
) -> Buckets:
    """Return the bucket of each vector in each round: the nearest of random directions and their opposites.

    See Andoni et al. 2015. With several factors in `buckets`, each has its own directions and gives one digit of the
    bucket's number.
    """
    rotated = jnp.einsum("bhnd,hdrk->bhrnk", x.astype(jnp.float32), rotations, precision="highest")
    result, first, factor = jnp.zeros(rotated.shape[:-1], jnp.int32), 0, 1
    for count in buckets:
        part = rotated[..., first : first + count // 2]
        nearest = jnp.argmax(jnp.concatenate([part, -part], axis=-1), axis=-1)
        result, first, factor = result + factor * nearest.astype(jnp.int32), first + count // 2, factor * count
    return result


def previous_chunks(
    num_chunks: int, rounds: int, num_live_chunks: Int[Array, " batch"]
) -> Int[Array, "batch all_chunks"]:
    """Return the chunk before each chunk of all rounds.

    Before the first chunk of a round comes the last live chunk of the round before.
    """
    index = jnp.arange(rounds * num_chunks)[None]
    last_live = (index - num_chunks + num_live_chunks[:, None] - 1) % (rounds * num_chunks)
    return jnp.where(index % num_chunks, index - 1, last_live)


@jax.custom_vjp
def permute(
    x: Float[Array, "*batch n width"], order: Int[Array, "*batch n"], inverse: Int[Array, "*batch n"]
) -> Float[Array, "*batch n width"]:
    """Return `x` in another order. Its gradient uses the inverse order; that of indexing would be a scatter."""
    return jnp.take_along_axis(x, order[..., None], axis=-2)


permute.defvjp(
    lambda x, order, inverse: (permute(x, order, inverse), (order, inverse)),
    lambda orders, gradient: (permute(gradient, *orders[::-1]), None, None),
)


def torch_normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the result of `torch.manual_seed(seed); torch.randn(shape)` on a CPU, for 16 numbers or more.

    With it, vectors of an exported model have the same buckets in Transformers, which seeds by `hash_seed`.
    """
    size = math.prod(shape)
    spare = 16 if size % 16 else 0
    bits = np.random.RandomState(seed).randint(0, 2**32, size + spare, dtype=np.uint32)
    uniform = ((bits & 0xFFFFFF) * np.float32(2**-24)).astype(np.float32).reshape(-1)

    def box_muller(x: np.ndarray) -> np.ndarray:  # in blocks of 8 pairs
        x = x.reshape(-1, 2, 8)
        radius, angle = np.sqrt(-2 * np.log(1 - x[:, 0])), np.float32(2 * np.pi) * x[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)

    result = np.empty(size, np.float32)
    result[: size - size % 16] = box_muller(uniform[: size - size % 16])
    if spare:  # PyTorch samples the last 16 numbers again
        result[-16:] = box_muller(uniform[size:])
    return result.reshape(shape)
