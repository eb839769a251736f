"""Dropout, whose masks are a hash of the element's place: the same on every device and mesh.

No random bits are stored or read. The mask is computed where it is used, and again in the backward pass. Two kinds of
attention number their probabilities in another way than scores in memory do, so that their masks are others: a band in
blocks, and the disentangled kernel for queries at some positions.
"""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

RESOLUTION = 2**16
"""Resolution of the dropout rate: 16 bits of each hash decide."""
_FIRST, _SECOND = (np.uint32(factor).view(np.int32) for factor in (0x7FEB352D, 0x846CA68B))
"""Factors of the hash: those of "lowbias32" (Wellons 2018), a 32-bit hash of two rounds."""


def dropout(
    x: Float[Array, "*shape"], rate: float, key: jax.Array | None, row_axes: int = 1
) -> Float[Array, "*shape"]:
    """Set each element to 0 with probability `rate` and scale the others to keep the mean (Srivastava et al. 2014).

    Without a key, or with rate 0, return `x`. The first `row_axes` axes have seeds of their own.
    """
    if key is None or rate <= 0.0:
        return x
    return _dropout(x, dropout_seeds(key, x.shape[:row_axes]), rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dropout(x: Float[Array, "..."], seeds: Int[Array, "..."], rate: float) -> Float[Array, "..."]:
    keep = keep_mask(seeds, x.shape[seeds.ndim :], rate)
    return jnp.where(keep, x * keep_scale(rate), 0.0).astype(x.dtype)


def _dropout_forward(x, seeds, rate):
    return _dropout(x, seeds, rate), seeds


def _dropout_backward(rate, seeds, gradient):
    return _dropout(gradient, jax.lax.optimization_barrier(seeds), rate), None  # the barrier: see `_attention_backward`


_dropout.defvjp(_dropout_forward, _dropout_backward)


def dropout_seeds(key: jax.Array, shape: tuple[int, ...]) -> Int[Array, "*shape"]:
    """Return the seeds of dropout, one per row, or one per row and head."""
    seeds = jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32), jnp.int32)
    # Kept by the policies "cheap" and "dots", so that only "full" draws them again.
    return checkpoint_name(seeds, "attention")


def keep_mask(seeds: Int[Array, "*rows"], shape: tuple[int, ...], rate: float) -> Bool[Array, "*rows_and_shape"]:
    """Return the mask of the elements that dropout keeps, of an array of `shape` for each seed."""
    places = jnp.zeros(shape, jnp.int32)
    for axis in range(len(shape)):
        places += jax.lax.broadcasted_iota(jnp.int32, shape, axis) * math.prod(shape[axis + 1 :])
    seeds = seeds.reshape(*seeds.shape, *[1] * len(shape))
    return kept(places + seeds, seeds, rate)


def kept(x: Int[Array, "..."], seed: Int[Array, "..."], rate: float) -> Bool[Array, "..."]:
    """Return the mask of elements that dropout keeps, from place + seed of each; also in Pallas kernels.

    The hash takes their sum in its first round, and another word of the seed in its second one, so that no two seeds
    have shifted copies of one mask.
    """
    x = _round(x, 16, _FIRST)
    x = _round(x, 15, _SECOND, _round(seed, 16, _SECOND))
    # The upper 16 bits decide; words are signed, so that the least one is -2³¹.
    return x >= (_threshold(rate) << 16) - 2**31


def _round(x: jax.Array, shift: int, factor: np.int32, word: jax.Array | int = 0) -> jax.Array:
    return (x ^ jax.lax.shift_right_logical(x, jnp.int32(shift)) ^ word) * factor


def keep_scale(rate: float) -> float:
    """Return the factor on the elements that dropout keeps."""
    return RESOLUTION / (RESOLUTION - _threshold(rate))


def _threshold(rate: float) -> int:
    """Return how many of the RESOLUTION values drop an element: never all."""
    return min(round(rate * RESOLUTION), RESOLUTION - 1)


def module_key(module: nn.Module, rate: float, deterministic: bool) -> jax.Array | None:
    """Return a dropout key of a module; None if nothing is dropped."""
    return None if deterministic or rate == 0.0 else module.make_rng("dropout")
