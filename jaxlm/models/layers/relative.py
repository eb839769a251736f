"""Attention with relative positions and segments over a memory of earlier text.

Transformer-XL (Dai et al. 2019, section 3.3) and XLNet (Yang et al. 2019, sections 2.3 and 2.4).
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dropout import module_key


class Queries(NamedTuple):
    """Positions and masks of the queries of one stream."""

    positions: Int[Array, "batch queries"] | None
    """Positions in the row; None for one query at every position."""
    is_other: Bool[Array, "batch queries keys"]
    """Whether query and key are of different segments."""
    visible: Bool[Array, "batch queries keys"]
    """Whether the query attends to the key."""


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
    """Attention of one stream's queries over the memory and the content stream.

    Parameters: the kernels `query`, `key`, `value`, `position` and `out`; `content_bias`, `position_bias` and
    `segment_bias` [heads, head_dim]; `segment` [2, heads, head_dim], for keys of the same segment and of another one.
    """

    config: StackConfig
    deterministic: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch queries hidden"],
        source: Float[Array, "batch keys hidden"],
        distances: Float[Array, "2 distances hidden"],
        is_backward: Int[Array, " batch"],
        queries: Queries,
    ) -> Float[Array, "batch queries hidden"]:
        """Return the attention output.

        Args:
            x: Hidden states of the queries.
            source: The memory, then the content stream.
            distances: Result of `sinusoids`.
            is_backward: 1 in rows whose text is reversed.
            queries: Positions and masks of the queries.
        """
        c = self.config

        def dense(name: str, inputs: jax.Array, features: int = c.num_heads * c.head_dim) -> jax.Array:
            return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=kernel_init(c), name=name)(inputs)

        def heads(name: str, inputs: jax.Array) -> jax.Array:
            return dense(name, inputs).reshape(*inputs.shape[:-1], c.num_heads, c.head_dim)

        def vectors(name: str, *shape: int) -> jax.Array:
            shape = (*shape, c.num_heads, c.head_dim)
            return self.param(name, kernel_init(c), shape, jnp.float32).astype(c.dtype)

        query, key, value = heads("query", x), heads("key", source), heads("value", source)
        forward, backward = heads("position", distances)
        # The gradient of indexing with is_backward would be a scatter, which a TPU runs as a loop over the rows.
        position = jnp.where(is_backward[:, None, None, None] > 0, backward, forward)
        by_distance = jnp.einsum("bqnd,bpnd->bnqp", query + vectors("position_bias"), position)
        bias = by_key(by_distance, queries.positions, source.shape[1])
        by_segment = jnp.einsum("bqnd,snd->sbnq", query + vectors("segment_bias"), vectors("segment", 2))
        bias += jnp.where(queries.is_other[:, None], by_segment[1, ..., None], by_segment[0, ..., None])
        y = attend(
            query + vectors("content_bias"), key, value, mask=queries.visible[:, None], bias=bias * c.attention_scale,
            scale=c.attention_scale, dropout_rate=c.attention_dropout,
            dropout_key=module_key(self, c.attention_dropout, self.deterministic),
        )
        return dense("out", y.reshape(*x.shape[:-1], -1), c.hidden_size)
