"""Time of collectives: the ring formulas, by hand, over the published bandwidths."""

import itertools
from types import SimpleNamespace

import pytest

from jaxlm.analysis.hlo import Collective, Traffic, parse, traffic
from jaxlm.analysis.links import collective_timer, predict


def chips(kind: str, *sides: int, slices: int = 1) -> list[SimpleNamespace]:
    """Devices of slices whose first axis is the slowest."""
    places = itertools.product(range(slices), *map(range, sides))
    return [SimpleNamespace(device_kind=kind, slice_index=one, coords=coords) for one, *coords in places]


@pytest.mark.parametrize(("devices", "kind", "group", "expected"), [
    # A row of 4 of 16 chips is a line, whose links carry 50 GB/s in one direction.
    (chips("TPU v5 lite", 4, 4, 1), "all-gather", (0, 1, 2, 3), 1e9 * 3 / 4 / 50e9),
    (chips("TPU v5 lite", 4, 4, 1), "all-gather", (0, 4, 8, 12), 1e9 * 3 / 4 / 50e9),
    (chips("TPU v5 lite", 4, 4, 1), "all-reduce", (), 2e9 * 15 / 16 / 100e9),
    # A row of 16 is a ring; a pod's 256 chips have two, which are the published 51.2 TB/s a pod.
    (chips("TPU v5 lite", 16, 16, 1), "reduce-scatter", tuple(range(16)), 1e9 * 15 / 16 / 100e9),
    (chips("TPU v5 lite", 16, 16, 1), "all-reduce", (), 2e9 * 255 / 256 / (51.2e12 / 256)),
    (chips("TPU v5 lite", 16, 16, 1), "all-gather", (0, 1, 2, 3), 1e9 * 3 / 4 / 50e9),
    (chips("TPU v5p", 4, 4, 4), "all-gather", (), 1e9 * 63 / 64 / 600e9),
    (chips("TPU v5p", 4, 4, 4), "collective-permute", (0, 1), 1e9 / 100e9),
    (chips("TPU v6 lite", 4, 4, 1), "all-to-all", (0, 1, 2, 3), 1e9 / 100e9),
    # Half of the bytes cross the middle of an axis: 256 GB / 2 in each direction over 16 rows of two links.
    (chips("TPU v5 lite", 16, 16, 1), "all-to-all", (), 256e9 / 4 / (16 * 2 * 50e9)),
    (chips("TPU v5 lite", 2, 2, 1, slices=4), "all-reduce between slices", (), 1e9 * 2 * 3 / 4 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=4), "all-gather between slices", (), 3e9 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=4), "reduce-scatter between slices", (), 1e9 * 3 / 4 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=4), "all-to-all between slices", (), 1e9 * 3 / 4 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=4), "one-to-one between slices", (), 1e9 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=4), "all-gather", (), 1e9 * 3 / 4 / 100e9),
    # Undivided groups: of 8 chips in two slices each holds a quarter of the sum of its slice.
    (chips("TPU v5 lite", 2, 2, 1, slices=2), "all-reduce", tuple(range(8)), 2e9 * 3 / 4 / 100e9 + 0.25e9 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=2), "all-gather", tuple(range(8)), 1e9 * 3 / 4 / 100e9 + 0.125e9 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=2), "reduce-scatter", (0, 4), 0.5e9 / 3.125e9),
    (chips("TPU v5 lite", 2, 2, 1, slices=2), "collective-permute", (3, 4), 1e9 / 3.125e9),
    (chips("TPU7x", 2, 2, 1), "all-gather", (), 0.0),
])
def test_time_of_a_gigabyte(devices, kind, group, expected):
    assert collective_timer(devices)(Collective(kind, 10**9, 1, False, group)) == pytest.approx(expected)


@pytest.mark.parametrize(("groups", "first"), [
    ("replica_groups={{0,2},{1,3}}", (0, 2)),
    ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
    ("replica_groups=mesh['x'=2,'y'=4] {'x'}", (0, 4)),
    ("replica_groups=mesh['x'=2,'y'=4] {'y'}", (0, 1, 2, 3)),
    ("replica_groups={}", ()),
])
def test_first_group_of_each_notation(groups, first):
    hlo = f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n  %r = f32[8]{{0}} all-reduce(%a), {groups}\n}}\n"
    found = []
    traffic(parse(hlo), lambda one: found.append(one.group) or 0.0)
    assert found == [first]


@pytest.mark.parametrize(("pairs", "first"), [("{{0,1},{1,0}}", (0, 1)), ("{{0,0},{1,2},{2,1}}", (1, 2)),
                                              ("{{0,0}}", (0, 0))])
def test_a_permutation_moves_between_the_first_pair_of_different_devices(pairs, first):
    hlo = "HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {\n" \
          f"  %r = f32[8]{{0}} collective-permute(%a), channel_id=1, source_target_pairs={pairs}\n}}\n"
    found = []
    traffic(parse(hlo), lambda one: found.append(one.group) or 0.0)
    assert found == [first]


def test_what_overlaps_is_hidden_as_far_as_compute_lasts():
    totals = {"all-reduce": Traffic(seconds=3.0, asynchronous_seconds=2.0),
              "all-reduce between slices": Traffic(seconds=5.0, asynchronous_seconds=5.0)}
    assert predict(10.0, totals) == (11.0, 1.0, "compute")
    assert predict(4.0, totals) == (4.0 + 1.0 + 3.0, 4.0, "network between slices")
