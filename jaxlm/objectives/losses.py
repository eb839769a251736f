"""Losses of single predictions, in float32 and in nats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*shape classes"], labels: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return -log softmax(logits)[label]."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
