"""Corrupted triples of a knowledge graph: another entity in the place of the head or the tail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def replace_ends(
    key: jax.Array, triples: Int[Array, "batch 3"], head_share: Float[Array, " relations"], num_entities: int,
    count: int,
) -> tuple[Int[Array, "batch count"], Bool[Array, "batch count"]]:
    """Draw entities to replace one end of each triple (Bordes et al. 2013, equation 2).

    An entity never replaces itself, and all others are equally likely; the result may be a triple of the graph.

    `head_share` is the probability that the head is replaced, for each relation.

    Returns:
        The entities, and whether they replace the head.
    """
    key_end, key_entity = jax.random.split(key)
    shape = (triples.shape[0], count)
    is_head = jax.random.uniform(key_end, shape) < head_share[triples[:, 1]][:, None]
    old = jnp.where(is_head, triples[:, :1], triples[:, 2:])
    others = jax.random.randint(key_entity, shape, 0, num_entities - 1)
    return others + (others >= old), is_head
