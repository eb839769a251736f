"""Attention with relative positions, segments and a memory of earlier text.

Transformer-XL (Dai et al. 2019, section 3.3) and XLNet (Yang et al. 2019, sections 2.3 and 2.4).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.attention import attend, on_each_device, split_heads
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dense import Dense, add_bias, broadcast
from jaxlm.models.layers.dropout import dropout_seeds, module_key
from jaxlm.models.layers.kernel_choice import Attention, choose_kernel
from jaxlm.models.layers.relative_kernel import fits, relative_attention
from jaxlm.models.layers.tiles import TILE
from jaxlm.parallel.rules import ACTIVATION_AXES


class Queries(NamedTuple):
    """Queries of one stream."""

    positions: Int[Array, "batch queries"] | None
    """Positions in the text; None for one query at every position, which also attends to itself."""
    segments: Int[Array, "batch queries"]
    """Segment of each query."""
    limits: Int[Array, "batch queries"]
    """First rank that a query does not attend to."""


class Keys(NamedTuple):
    """Keys of both streams: the memory, then the text."""

    segments: Int[Array, "batch keys"]
    """Segment of each key."""
    ranks: Int[Array, "batch keys"]
    """Rank of each key; the queries whose limit is higher attend to it."""


def sinusoids(length: int, memory: int, width: int) -> Float[np.ndarray, "2 distances width"]:
    """Return [sin, cos] of the distances memory + length, …, 1 - length, and of their negatives for reversed text."""
    distance = np.arange(memory + length, -length, -1.0)
    angle = np.stack([distance, -distance])[..., None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)


def by_key(
    scores: Float[Array, "batch heads queries distances"], positions: Int[Array, "batch queries"] | None, keys: int
) -> Float[Array, "batch heads queries keys"]:
    """Select the scores of the keys from those of all distances: at position i they begin in column length - i."""
    batch, heads, queries, distances = scores.shape
    if positions is None:
        # Shift row i by i places to the right, by reading rows one column shorter (Dai et al. 2019, appendix B).
        flat = scores.reshape(batch, heads, distances, queries)[:, :, 1:]
        return flat.reshape(batch, heads, queries, distances - 1)[..., :keys]
    # Shift row i by first[i] places to the left, bit by bit: each pass shifts the rows that have at least `step` left.
    # A slice per row, each at its own index, would be a gather, which a TPU runs as a loop over the rows.
    first, most = distances - keys - positions, distances - keys
    while most:
        step = (most + 1) // 2
        moves = first >= step
        scores = jnp.where(moves[:, None, :, None], scores[..., step:], scores[..., :-step])
        first, most = first - step * moves, most - step
    return scores


class RelativeAttention(nn.Module):
    """Attention of the queries of both streams over the memory and the content stream.

    Parameters: the kernels `query`, `key`, `value`, `position` and `out`; `content_bias`, `position_bias` and
    `segment_bias` [heads, head_dim]; `segment` [2, heads, head_dim], for keys of the same segment and of another one.
    """

    config: StackConfig
    deterministic: bool = True

    def setup(self) -> None:
        c = self.config

        def dense(features: int) -> Dense:
            return Dense(features, False, c.dtype, kernel_init(c))

        def vectors(name: str, *shape: int) -> jax.Array:
            return self.param(name, kernel_init(c), (*shape, c.num_heads, c.head_dim), jnp.float32)

        width = c.num_heads * c.head_dim
        self.query, self.key, self.value, self.position = (dense(width) for _ in range(4))
        self.out = dense(c.hidden_size)
        self.position_bias, self.segment_bias = vectors("position_bias"), vectors("segment_bias")
        self.segment, self.content_bias = vectors("segment", 2), vectors("content_bias")

    def shared(
        self, source: Float[Array, "batch keys hidden"], distances: Float[Array, "2 distances hidden"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return keys, values and vectors of distances for all streams.

        `source` is the memory, then the content stream; `distances` come from `sinusoids`.
        """
        return tuple(self._heads(x) for x in (self.key(source), self.value(source), self.position(distances)))

    def __call__(
        self,
        x: Float[Array, "batch queries hidden"],
        shared: tuple[jax.Array, jax.Array, jax.Array],
        is_backward: Int[Array, " batch"],
        queries: Queries,
        keys: Keys,
    ) -> Float[Array, "batch queries hidden"]:
        """Return the attention output.

        `x` has the hidden states of the queries, `shared` the result of `shared`; `is_backward` is 1 in rows whose text
        is reversed.
        """
        c = self.config
        query = self._heads(self.query(x))
        key, value, distance = shared
        distance_query = add_bias(query, self.position_bias)
        segment_query, segment = add_bias(query, self.segment_bias), self.segment.astype(c.dtype)
        segment_scores = jnp.einsum("bqnd,snd->sbnq", segment_query, segment)
        y = (fused if has_kernel(c, distance.shape[1], key.shape[1]) else in_memory)(
            c, add_bias(query, self.content_bias), distance_query, key, value, distance, segment_scores,
            is_backward, queries, keys, module_key(self, c.attention_dropout, self.deterministic),
        )
        return self.out(y.reshape(*x.shape[:-1], -1))

    def _heads(self, x: Float[Array, "*shape width"]) -> Float[Array, "*shape heads head_dim"]:
        return x.reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)


def has_kernel(config: StackConfig, distances: int, keys: int) -> bool:
    """Return whether `choose_kernel` finds a fused kernel for these sizes."""
    is_own = fits(distances - keys, keys, config.head_dim, config.dtype)
    what = Attention(keys, keys, config.num_heads, config.head_dim, config.dtype, has_own_kernel=is_own)
    return choose_kernel(config.attention, what) == "own"


def in_memory(
    config, query, distance_query, key, value, distance, segment_scores, is_backward, queries, keys, dropout_key
):
    """Return attention with the scores in memory."""
    forward, backward = (broadcast(x, (len(is_backward), *x.shape), x.dtype) for x in distance)
    # The gradient of indexing with is_backward would be a scatter, which a TPU runs as a loop over the rows.
    distance = jnp.where(is_backward[:, None, None, None] > 0, backward, forward)
    by_distance = jnp.einsum("bqnd,bpnd->bnqp", distance_query, distance)
    bias = by_key(by_distance, queries.positions, key.shape[1])
    is_other = keys.segments[:, None, :] != queries.segments[:, :, None]
    same, other = (broadcast(x[..., None], bias.shape, bias.dtype) for x in segment_scores)
    bias += jnp.where(is_other[:, None], other, same)
    visible = keys.ranks[:, None, :] < queries.limits[:, :, None]
    if queries.positions is None:
        visible |= jnp.eye(query.shape[1], key.shape[1], key.shape[1] - query.shape[1], dtype=bool)
    return attend(
        query, key, value, mask=visible[:, None], bias=bias * config.attention_scale, scale=config.attention_scale,
        dropout_rate=config.attention_dropout, dropout_key=dropout_key,
    )


def fused(
    config, query, distance_query, key, value, distance, segment_scores, is_backward, queries, keys, dropout_key
):
    """Return attention by the TPU's kernel."""
    batch, count, heads, _ = query.shape
    rate, room = 0.0 if dropout_key is None else config.attention_dropout, -count % TILE
    scale = jnp.asarray(config.attention_scale, query.dtype)

    def positions_last(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, room)])

    arrays = [padded(positions_last(x * scale)) for x in (query, distance_query)]
    arrays += [positions_last(x) for x in (key, value, distance)]
    arrays += [padded(jnp.moveaxis(segment_scores * scale, 0, 2).astype(jnp.float32))]
    # The kernel does not read the positions of the content stream.
    positions = queries.segments if queries.positions is None else queries.positions
    vectors = [padded(jnp.stack([positions, queries.segments, queries.limits], axis=1)), jnp.stack(keys, axis=1)]
    seeds = jnp.zeros((batch, heads), jnp.int32) if dropout_key is None else dropout_seeds(dropout_key, (batch, heads))
    rows, axis = ACTIVATION_AXES["batch"], split_heads(heads)[0]
    split = PartitionSpec(rows, axis)
    run = on_each_device(
        functools.partial(relative_attention, rate=rate, is_content=queries.positions is None),
        (split, split, split, split, PartitionSpec(None, axis), split, *[PartitionSpec(rows)] * 3, split), split,
    )
    y = run(*arrays, *vectors, is_backward, seeds)
    return y[..., :count].swapaxes(1, 2).reshape(query.shape)
