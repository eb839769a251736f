"""Losses that several objectives share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def cross_entropy(
    logits: Float[Array, "*shape classes"], labels: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """-log softmax(logits)[label], float32, in nats."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def weighted_mean(values: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Σ w·x / Σ w, and 0 where nothing has weight."""
    total = jnp.sum(weights)
    return jnp.sum(values * weights) / jnp.maximum(total, 1.0)


def sums(
    values: Float[Array, "*shape"] | Bool[Array, "*shape"], weights: Float[Array, "*shape"]
) -> tuple[jax.Array, jax.Array]:
    """(Σ w·x, Σ w), the form that metrics have."""
    return jnp.sum(values * weights).astype(jnp.float32), jnp.sum(weights).astype(jnp.float32)


def binary_cross_entropy(
    logits: Float[Array, "*shape"], labels: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """-log sigmoid(logit) where the label is true, -log(1 - sigmoid(logit)) elsewhere; float32, in nats."""
    logits = logits.astype(jnp.float32)
    return jax.nn.softplus(jnp.where(labels, -logits, logits))
