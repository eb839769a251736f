"""Dropout: the law of what is dropped, whatever draws it, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlm.models.layers.placement import Devices, arrays_placed_by

from jaxlm.models.layers.dropout import dropout


@pytest.mark.parametrize("impl, platform", [("threefry2x32", "cpu"), ("threefry2x32", "gpu"), ("rbg", "tpu")])
def test_share_scale_and_independence(impl, platform):
    rate, shape = 0.1, (64, 33, 101)
    with arrays_placed_by(lambda x, _: x, Devices(platform, 1)):
        kept = [
            np.asarray(dropout(jnp.ones(shape), rate, jax.random.key(i, impl=impl))) for i in range(2)
        ]
    for sample in kept:
        assert set(np.unique(sample)) == {np.float32(0), np.float32(1 / (1 - round(rate * 65536) / 65536))}
        zeros = sample == 0
        # Five standard deviations, of the whole, and of each plane along each axis.
        assert abs(zeros.mean() - rate) < 5 * (rate * (1 - rate) / zeros.size) ** 0.5
        for axis in range(3):
            others = tuple(i for i in range(3) if i != axis)
            counted = zeros.size // shape[axis]
            assert np.all(abs(zeros.mean(others) - rate) < 5 * (rate * (1 - rate) / counted) ** 0.5)
        # Neighbours along each axis do not know of each other.
        for axis in range(3):
            x, y = np.moveaxis(zeros, axis, 0)[:-1], np.moveaxis(zeros, axis, 0)[1:]
            assert abs((x & y).mean() - rate**2) < 5 * (rate**2 / x.size) ** 0.5
    both = (kept[0] == 0) & (kept[1] == 0)
    assert abs(both.mean() - rate**2) < 5 * (rate**2 / both.size) ** 0.5


def test_gradient_flows_where_values_do():
    key, x = jax.random.key(0), jnp.linspace(-1.0, 1.0, 60).reshape(3, 20) + 0.001
    out, pull = jax.vjp(lambda x: dropout(x, 0.5, key), x)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], out / x, rtol=1e-6)


def test_no_key_or_no_rate_changes_nothing():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_rate_next_to_one_keeps_next_to_nothing(platform):
    with arrays_placed_by(lambda x, _: x, Devices(platform, 1)):
        out = np.asarray(dropout(jnp.ones((64, 64)), 0.999999, jax.random.key(0)))
    assert (out > 0).sum() < 5 and set(np.unique(out)) <= {0, 65536}
