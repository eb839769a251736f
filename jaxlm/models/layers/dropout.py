"""Dropout, and the keys that it draws from."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.parallel.activations import target_platform


def dropout(x: Float[Array, "*shape"], rate: float, key: jax.Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate` and scales the others by 1 / (1 - rate) (Srivastava et al. 2014);
    the identity without a key or with rate 0."""
    if key is None or rate <= 0.0:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)


def dropout_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Key of the dropout of one step. Accelerators draw its bits with their hardware generator ("rbg"), which is many
    times cheaper there but depends on the mesh; CPUs use threefry, which is the faster one there."""
    impl = "threefry2x32" if target_platform() == "cpu" else "rbg"
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=impl), step), 1)


def module_key(module: nn.Module, rate: float, deterministic: bool) -> jax.Array | None:
    """A dropout key of the module's own; None where nothing is to be dropped."""
    return None if deterministic or rate == 0.0 else module.make_rng("dropout")
