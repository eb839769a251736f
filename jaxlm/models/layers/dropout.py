"""Dropout, and the keys that it draws from."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float


def dropout(x: Float[Array, "*shape"], rate: float, key: jax.Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate` and scales the others so that the mean stays (Srivastava et al.
    2014); the identity without a key or with rate 0."""
    if key is None or rate <= 0.0:
        return x
    keep = kept(random_bits(key, x.shape, rate), rate)
    return jnp.where(keep, x * keep_scale(rate), 0.0).astype(x.dtype)


def random_bits(key: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Random bits for dropout of `rate`, uint8 or uint16 (see `_resolution`)."""
    return checkpoint_name(jax.random.bits(key, shape, _resolution(rate)[0]), "dropout_bits")


def kept(bits: jax.Array, rate: float) -> jax.Array:
    """True where dropout of `rate` keeps an element that has these random bits."""
    return bits >= jnp.asarray(_resolution(rate)[1], bits.dtype)


def keep_scale(rate: float) -> float:
    """The factor of the elements that dropout keeps."""
    _, threshold, count = _resolution(rate)
    return count / (count - threshold)


def _resolution(rate: float) -> tuple[Any, int, int]:
    """(type of the random bits, threshold below which an element is dropped, number of their values).

    8 random bits an element where the rate is then met within 2 % (0.1 as 26/256), otherwise 16. 32 of them took a
    tenth of BERT's step on a TPU.
    """
    dtype = jnp.uint8 if abs(round(rate * 256) / 256 - rate) <= 0.02 * rate else jnp.uint16
    count = 2 ** jnp.iinfo(dtype).bits
    return dtype, min(round(rate * count), count - 1), count


def dropout_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Key of the dropout of one step. Its bits come from XLA's RngBitGenerator ("rbg"): the hardware's generator on
    accelerators, Philox on CPUs, everywhere several times cheaper than threefry. On accelerators they depend on the
    mesh."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="rbg"), step), 1)


def module_key(module: nn.Module, rate: float, deterministic: bool) -> jax.Array | None:
    """A dropout key of the module's own; None where nothing is to be dropped."""
    return None if deterministic or rate == 0.0 else module.make_rng("dropout")
