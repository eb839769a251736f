"""Dropout: its rate for every source of bits, its gradient, and the keys of a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.layers.dropout import dropout
from jaxlm.training.program import dropout_key


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_share_scale_and_independence(impl):
    rate, shape = 0.1, (64, 33, 101)
    kept = [np.asarray(dropout(jnp.ones(shape), rate, jax.random.key(i, impl=impl))) for i in range(2)]
    scale = kept[0].max()
    # With few random bits per element the rate is exact to 1/512; the scale fits the actual rate.
    share = 1 - 1 / float(scale)
    assert abs(share - rate) <= 1 / 512
    for sample in kept:
        assert set(np.unique(sample)) == {np.float32(0), scale}
        zeros = sample == 0
        # Five standard deviations, of the whole, and of each plane along each axis.
        assert abs(zeros.mean() - share) < 5 * (share * (1 - share) / zeros.size) ** 0.5
        for axis in range(3):
            others = tuple(i for i in range(3) if i != axis)
            counted = zeros.size // shape[axis]
            assert np.all(abs(zeros.mean(others) - share) < 5 * (share * (1 - share) / counted) ** 0.5)
        # Neighbours along each axis are independent.
        for axis in range(3):
            x, y = np.moveaxis(zeros, axis, 0)[:-1], np.moveaxis(zeros, axis, 0)[1:]
            assert abs((x & y).mean() - share**2) < 5 * (share**2 / x.size) ** 0.5
    both = (kept[0] == 0) & (kept[1] == 0)
    assert abs(both.mean() - share**2) < 5 * (share**2 / both.size) ** 0.5


def test_gradient_flows_where_values_do():
    key, x = jax.random.key(0), jnp.linspace(-1.0, 1.0, 60).reshape(3, 20) + 0.001
    out, pull = jax.vjp(lambda x: dropout(x, 0.5, key), x)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], out / x, rtol=1e-6)
    assert 0 < np.count_nonzero(out) < 60


def test_without_key_or_rate_it_is_the_identity():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


def test_a_rate_near_one_keeps_almost_nothing():
    out = np.asarray(dropout(jnp.ones((64, 64)), 0.999999, jax.random.key(0)))
    # 8 random bits per element cannot represent less than 1 in 256.
    assert (out > 0).mean() < 2 / 256 and len(np.unique(out)) <= 2


def test_each_step_and_seed_has_its_own_key():
    keys = [dropout_key(seed, step) for seed in (0, 1) for step in (0, 1, 2)]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == 6
