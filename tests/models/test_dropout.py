"""Dropout: the generator against its authors' vectors and jax's, the law of what is dropped, gradients."""

from __future__ import annotations

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.dropout import dropout, threefry_2x32, threefry_bits
from jaxlm.models.placement import Devices, arrays_placed_by

PI = (0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344)
# The known answers that come with the authors' Random123 library: rounds, counter, key, result.
KNOWN = [
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (2**32 - 1,) * 2, (2**32 - 1,) * 2, (0xFD36D048, 0x2D17272C)),
    (13, *PI, (0xBA3E4725, 0xF27D669E)),
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
    (20, *PI, (0xC4923A9C, 0x483DF7A0)),
]


def words(pair):
    return jnp.uint32(pair[0]), jnp.uint32(pair[1])


@pytest.mark.parametrize("rounds, counter, key, known", KNOWN)
def test_threefry_gives_its_authors_answers(rounds, counter, key, known):
    assert tuple(int(x) for x in threefry_2x32(words(key), words(counter), rounds)) == known


def test_twenty_rounds_are_jaxs_generator():
    key, counters = jnp.array([7, 2**31 + 3], jnp.uint32), jnp.arange(10, dtype=jnp.uint32)
    ours = jnp.concatenate(threefry_2x32((key[0], key[1]), (counters[:5], counters[5:])))
    np.testing.assert_array_equal(ours, jax.extend.random.threefry_2x32(key, counters))


def test_every_element_has_its_own_bits():
    bits = np.asarray(threefry_bits(jax.random.key(3), (5, 6, 7, 8)))
    assert len(np.unique(bits)) == bits.size
    other = np.asarray(threefry_bits(jax.random.key(4), (5, 6, 7, 8)))
    assert not np.any(bits == other)


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
