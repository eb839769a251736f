"""Disentangled attention of DeBERTa (He et al. 2020, section 3.1), and its table of relative positions."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.attention import attend, joint_segments, on_each_device, split_heads
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.disentangled_kernel import disentangled_attention
from jaxlm.models.layers.dropout import dropout_seeds
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.relative import by_key, has_kernel
from jaxlm.parallel.rules import ACTIVATION_AXES


class RelativeTable(nn.Module):
    """Table of relative positions that all layers of a DeBERTa share. Parameters: `embedding`, `norm`."""

    config: StackConfig
    buckets: int
    """Number of buckets of the distances to earlier tokens, and to later ones."""
    max_length: int
    """The last bucket begins at the distance `max_length` - 1."""

    @nn.compact
    def __call__(self, length: int) -> Float[Array, "distances hidden"]:
        """Return the normalized vectors of the distances length, …, -length."""
        c = self.config
        table = self.param("embedding", kernel_init(c), (2 * self.buckets, c.hidden_size), jnp.float32)
        # No two tokens have the distance `length`.
        distances = np.arange(length, -length - 1, -1).clip(1 - length, length - 1)
        rows = self.buckets + distance_buckets(distances, self.buckets, self.max_length)
        # float32, since the gradient of a row is summed over the distances of its bucket.
        normalized = Norm(c.norm, c.norm_eps, "float32", name="norm")(table)
        return normalized[rows.clip(0, 2 * self.buckets - 1)].astype(c.dtype)


def distance_buckets(distances: Int[np.ndarray, "*shape"], buckets: int, max_length: int) -> Int[np.ndarray, "*shape"]:
    """Return the bucket of each distance: the distance itself up to buckets / 2, then logarithmic."""
    half = buckets // 2
    size = np.maximum(np.abs(distances), half)
    share = np.log(size / half) / np.log(max(max_length - 1, half + 1) / half)
    return np.where(size > half, np.sign(distances) * (half + np.ceil(share * (half - 1))), distances).astype(np.int32)


def attend_disentangled(
    config: StackConfig, query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"], value: Float[Array, "batch keys heads head_dim"],
    distance_query: Float[Array, "distances heads head_dim"], distance_key: Float[Array, "distances heads head_dim"],
    positions: Int[Array, "batch queries"] | None, *, query_segments: Int[Array, "batch queries"] | None,
    key_segments: Int[Array, "batch keys"] | None, mask: Bool[Array, "#batch #heads #queries keys"] | None,
    dropout_key: jax.Array | None,
) -> Float[Array, "batch queries heads head_dim"]:
    """Return disentangled attention, by the TPU's kernel where there is one.

    Args:
        config: Configuration of the layer.
        query: Queries of tokens.
        key: Keys of tokens.
        value: Values of tokens.
        distance_query: Queries of the distances length, …, -length.
        distance_key: Keys of these distances.
        positions: Positions of the queries; None for one query at every position. Queries of one position are the
            same, or the kernel takes the first of them.
        query_segments: Segment of each query (see `attend`).
        key_segments: Segment of each key.
        mask: True where attention is allowed.
        dropout_key: Key of the probabilities' dropout.
    """
    length = key.shape[1]
    # With wider heads in longer rows the kernel does not fit into a v4's vector memory.
    if mask is None and length * config.head_dim < 2**17 and has_kernel(config, 2 * length, length):
        key_segments = jnp.ones(key.shape[:2], jnp.int32) if key_segments is None else key_segments
        # The kernel has a query at every position, of the segment of its key.
        own = None if query_segments is None else key_segments
        segments = jnp.stack(joint_segments(own, key_segments, length), axis=1)
        distances = distance_query[::-1], distance_key
        return fused(config, query, key, value, *distances, positions, segments, dropout_key)
    bias = disentangled_bias(query, key, distance_query, distance_key, positions, config.attention_scale)
    return attend(
        query, key, value, query_segments=query_segments, key_segments=key_segments, mask=mask, bias=bias,
        scale=config.attention_scale, dropout_rate=config.attention_dropout, dropout_key=dropout_key,
    )


def fused(config, query, key, value, distance_query, distance_key, positions, segments, dropout_key):
    """Return disentangled attention by the TPU's kernel, which has a query at every position."""
    batch, length, heads, _ = key.shape
    rate = 0.0 if dropout_key is None else config.attention_dropout
    scale = jnp.asarray(config.attention_scale, query.dtype)
    if positions is not None:
        # Products move the queries to their positions and the outputs back; a scatter would loop over the rows.
        is_at = positions[:, :, None] == jnp.arange(length)
        is_first = is_at & (jnp.cumsum(is_at, axis=1) == 1)
        query = jnp.einsum("bqp,bqhd->bphd", is_first.astype(query.dtype), query)

    def positions_last(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], -1).swapaxes(-1, -2)

    arrays = [positions_last(x) for x in (query * scale, key, value)]
    arrays += [positions_last(x[: 2 * length])[None] for x in (distance_query * scale, distance_key)]
    seeds = jnp.zeros((batch, heads), jnp.int32) if dropout_key is None else dropout_seeds(dropout_key, (batch, heads))
    rows, axis = ACTIVATION_AXES["batch"], split_heads(heads)[0]
    split, distances = PartitionSpec(rows, axis), PartitionSpec(None, axis)
    run = on_each_device(
        functools.partial(disentangled_attention, rate=rate),
        (split, split, split, distances, distances, PartitionSpec(rows), split), split,
    )
    y = run(*arrays, segments, seeds).swapaxes(1, 2).reshape(key.shape)
    return y if positions is None else jnp.einsum("bqp,bphd->bqhd", is_at.astype(y.dtype), y)


def disentangled_bias(
    query: Float[Array, "batch queries heads head_dim"], key: Float[Array, "batch keys heads head_dim"],
    distance_query: Float[Array, "distances heads head_dim"], distance_key: Float[Array, "distances heads head_dim"],
    positions: Int[Array, "batch queries"] | None, scale: float,
) -> Float[Array, "batch heads queries keys"]:
    """Return the attention scores of content to position and of position to content.

    For query i and key j they are scale · (q_i · k(r) + k_j · q(r)), with the vector r of the distance i - j in both
    products, as in the code. The paper has that of j - i in the second one.

    Arguments are those of `attend_disentangled`.
    """
    keys = key.shape[1]
    content = jnp.einsum("bqhd,phd->bhqp", query, distance_key[: 2 * keys])
    # From a key the distances have the other sign.
    position = jnp.einsum("bkhd,phd->bhkp", key, distance_query[::-1][: 2 * keys])
    position = by_key(position, None, keys).swapaxes(2, 3)
    if positions is not None:
        position = jnp.take_along_axis(position, positions[:, None, :, None], axis=2)
    return (by_key(content, positions, keys) + position) * jnp.asarray(scale, query.dtype)
