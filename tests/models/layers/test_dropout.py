"""Dropout: the law of its masks, its gradient, and the keys of a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jaxlm.models.layers.dropout import dropout, dropout_seeds, keep_mask, keep_scale
from jaxlm.training.program import dropout_key


def deviations(count: np.ndarray, of: int, share: float) -> np.ndarray:
    """Return numbers of successes in standard deviations from their mean."""
    return (count - of * share) / (of * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_law_of_masks(rate):
    """Rate, elements along each axis, neighbours, and pairs of seeds: of rows, layers, steps and seeds of runs."""
    count, shape = 48, (96, 128)
    keys = [dropout_key(seed, step) for seed in (0, 1) for step in (0, 1, 2)]
    keys = [jax.random.fold_in(key, layer) for key in keys for layer in (0, 1)]
    seeds = jnp.concatenate([dropout_seeds(key, (count // len(keys),)) for key in keys])
    dropped = ~np.asarray(keep_mask(seeds, shape, rate))
    share = 1 - 1 / keep_scale(rate)
    assert abs(share - rate) <= 2**-17
    assert abs(deviations(dropped.sum(), dropped.size, share)) < 4
    for axis in range(3):
        others = tuple(i for i in range(3) if i != axis)
        z = deviations(dropped.sum(others), dropped.size // dropped.shape[axis], share)
        assert np.abs(z).max() < 5 and chi2.sf((z**2).sum(), z.size) > 1e-4
    flat = dropped.reshape(count, -1)
    for lag in (1, 2, 3, 64, 127, 128, 129, 256, 1024):
        assert abs(deviations((flat[:, lag:] & flat[:, :-lag]).sum(), flat[:, lag:].size, share**2)) < 4.5
    centered = (flat - share) / (share * (1 - share)) ** 0.5
    # Pairs at all shifts of one against the other, so that no mask is a shifted copy of another.
    spectra = np.fft.rfft(centered)
    for i in range(1, count):
        correlation = np.fft.irfft(spectra[:i] * spectra[i].conj(), flat.shape[1]) / flat.shape[1] ** 0.5
        assert np.abs(correlation).max() < 6.5


@pytest.mark.slow  # the_law_of_masks_has_rates
def test_bits_of_the_hash_are_uniform():
    """χ² of 64 classes of the share that is dropped, over seeds that are consecutive numbers."""
    seeds, classes = jnp.arange(-32, 32, dtype=jnp.int32), 64
    dropped = jax.jit(lambda i: jnp.sum(~keep_mask(seeds, (64, 128), i / classes)), static_argnums=0)
    counts = np.diff([int(dropped(i)) for i in range(classes)])
    expected = 64 * 64 * 128 / classes
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), classes - 1) > 1e-4


def test_gradient_flows_where_values_do():
    key, x = jax.random.key(0), jnp.linspace(-1.0, 1.0, 60).reshape(3, 20) + 0.001
    out, pull = jax.vjp(jax.jit(lambda x: dropout(x, 0.5, key)), x)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], out / x, rtol=1e-6)
    assert 0 < np.count_nonzero(out) < 60


def test_without_key_or_rate_it_is_the_identity():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


def test_a_rate_near_one_keeps_almost_nothing():
    out = np.asarray(dropout(jnp.ones((64, 64)), 0.999999, jax.random.key(0)))
    # 16 random bits per element cannot represent less than 1 in 65,536.
    assert (out > 0).mean() < 2 / 4096 and len(np.unique(out)) <= 2


def test_each_step_and_seed_has_its_own_key():
    keys = [dropout_key(seed, step) for seed in (0, 1) for step in (0, 1, 2)]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == 6
