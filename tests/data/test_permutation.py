"""The pseudo-random permutation of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data.permutation import permute


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 2**40))
def test_every_element_occurs_once(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


def test_positions_are_independent_of_each_other():
    whole = permute(np.arange(1000), 1000, 3, 4)
    for index in (0, 17, 999):
        assert permute(np.array([index]), 1000, 3, 4)[0] == whole[index]
    huge = permute(np.array([0, 1, 10**12 - 1]), 10**12, 5)
    assert len(set(huge)) == 3 and (huge >= 0).all() and (huge < 10**12).all()


@pytest.mark.parametrize("size", [2, 5, 12, 100, 1025, 1500])
def test_every_element_is_equally_likely_at_every_position(size):
    """Chi-square test of the table (position, range of elements) over many keys."""
    keys = 4000 if size < 1000 else 400
    ranges = min(size, 20 if size > 100 else 100)
    table = np.zeros((size, ranges))
    share = np.bincount(np.arange(size) * ranges // size, minlength=ranges) / size
    for key in range(keys):
        np.add.at(table, (np.arange(size), permute(np.arange(size), size, 11, key) * ranges // size), 1)
    statistic = ((table - keys * share) ** 2 / (keys * share)).sum()
    freedom = (size - 1) * (ranges - 1)
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_neighbours_are_unrelated():
    """Neither neighbouring positions nor neighbouring keys give related elements."""
    size = 20_000
    one, two = permute(np.arange(size), size, 0, 0), permute(np.arange(size), size, 0, 1)
    tolerance = 5 / np.sqrt(size)
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < tolerance
    assert abs(np.corrcoef(one, two)[0, 1]) < tolerance
    assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < tolerance
    assert (one == two).sum() < 10
    assert abs((np.abs(np.diff(one)) < size / 10).mean() - 0.19) < 0.02  # as for independent draws
