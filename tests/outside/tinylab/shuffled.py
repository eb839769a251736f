"""An objective with a corruption of its own: tokens have changed places, and the model puts them back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxlm.corruption.masking import write_at
from jaxlm.fields import field
from jaxlm.objectives.masked_lm import MaskedLM


@dataclasses.dataclass(frozen=True)
class Shuffled(MaskedLM):
    """Word order: the chosen tokens of a row are shuffled among their places, and each place predicts its own."""

    mask_share: float = field(0.0, range="[0, 0]")
    """No token becomes [MASK]."""
    random_share: float = field(0.0, range="[0, 0]")
    """No token becomes one from outside the row."""

    def corrupt(self, key, batch):
        key_choice, key_order = jax.random.split(key)
        example = super().corrupt(key_choice, batch)
        return example | {"input_ids": shuffle(key_order, *(
            example[name] for name in ("input_ids", "masked_positions", "masked_weights")
        ))}


def shuffle(key: jax.Array, ids: jax.Array, positions: jax.Array, weights: jax.Array) -> jax.Array:
    """Return rows whose tokens at the used slots have been permuted."""
    draws = jnp.where(weights > 0, jax.random.uniform(key, weights.shape), 2.0)  # unused slots stay last
    moved = jnp.take_along_axis(jnp.take_along_axis(ids, positions, 1), jnp.argsort(draws, 1), 1)
    return write_at(ids, positions, weights > 0, moved)
