"""Corruption of the entities of a text (ERNIE, Zhang et al. 2019, section 3.4)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxlm.corruption.masking import in_slots, write_at

NONE = -1
"""Entity of a token at which no mention begins; also the first candidate, which is never a label."""
UNUSED = -2
"""Candidates that belong to no entity, at the end."""
_LAST = np.iinfo(np.int32).max  # sorts after every entity


class Entities(NamedTuple):
    """Corrupted entities of a batch, and those to predict, by their names in an example.

    Attributes:
        entities: the entities that the model reads, int32 [batch, length].
        entity_positions: positions with an entity before the corruption, in ascending order, int32 [batch, slots];
            unused slots hold 0.
        entity_labels: place of the original entity among the candidates, int32 [batch, slots].
        entity_weights: 1 for used slots, 0 for the others, float32 [batch, slots].
        candidates: NONE, then the entities of the whole batch before the corruption, each once and in ascending order,
            then UNUSED; int32 [1 + batch · slots].
    """

    entities: Array
    entity_positions: Array
    entity_labels: Array
    entity_weights: Array
    candidates: Array


def corrupt_entities(
    key: jax.Array, entities: Int[Array, "batch length"], *, slots: int, random_share: float = 0.05,
    drop_share: float = 0.15,
) -> Entities:
    """Replace some entities by others of the batch and drop others; all of them are to be predicted.

    Args:
        key: sampling key.
        entities: entity of the mention that begins at each token, NONE where there is none.
        slots: static number of entities per row. A row with more keeps the first ones; the others become NONE.
        random_share: probability that an entity becomes one of the candidates, each equally likely, itself included.
        drop_share: probability that an entity becomes NONE.
    """
    rows, length = entities.shape
    key_kind, key_random = jax.random.split(key)
    is_entity = entities >= 0
    is_entity &= jnp.cumsum(is_entity, axis=1) <= slots
    positions, is_used = in_slots(jnp.where(is_entity, jnp.arange(length), length), length, slots)
    original = jnp.where(is_used, jnp.take_along_axis(entities, positions, axis=1), _LAST)

    found = jnp.unique(original, size=rows * slots, fill_value=_LAST)
    count = jnp.sum(found < _LAST)
    candidates = jnp.concatenate([jnp.array([NONE]), jnp.where(found < _LAST, found, UNUSED)]).astype(jnp.int32)
    labels = jnp.where(is_used, 1 + jnp.searchsorted(found, original), 0).astype(jnp.int32)

    kind = jax.random.uniform(key_kind, positions.shape)
    drawn = candidates[jax.random.randint(key_random, positions.shape, 1, jnp.maximum(count, 1) + 1)]
    corrupted = jnp.select([kind < random_share, kind < random_share + drop_share], [drawn, NONE], original)
    read = write_at(jnp.full_like(entities, NONE), positions, is_used, corrupted)
    return Entities(read, positions, labels, is_used.astype(jnp.float32), candidates)
