"""Counts of compiled kernels whose work is known, and kernels that cannot be counted."""

import dataclasses
import importlib.util
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxlm.analysis import kernels
from jaxlm.analysis.kernels import Count
from jaxlm.parallel.peaks import peak_flops
from tests.analysis.test_kernels import V5E, kernel
from tests.launch.test_tpu_pod import LAUNCH

sys.path.insert(0, str(LAUNCH / "tables"))
import count_kernels
from bundles import Work

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
SIZE, BLOCK = 1024, 512


def product_kernel(a_ref, b_ref, out_ref, sum_ref):
    @pl.when(pl.program_id(2) == 0)
    def start():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def finish():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def product(a, b):
    return pl.pallas_call(
        product_kernel, grid=(SIZE // BLOCK,) * 3, name="product",
        in_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
                  pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), a.dtype),
        scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(a, b)


def loop(trips: int | None):
    """A kernel over four blocks with a loop inside; None: the trip count is an argument."""
    def kernel(trips_ref, x_ref, out_ref):
        def body(_, total):
            return total + jnp.exp(x_ref[...] * total)

        out_ref[...] = jax.lax.fori_loop(0, trips or trips_ref[0], body, jnp.zeros(out_ref.shape, jnp.float32))

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return lambda number, x: pl.pallas_call(
        kernel, grid=(4,), in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), block], out_specs=block,
        out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32), name=f"loop_{trips}",
    )(number, x)


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """The counts of four kernels for v5e, by name. libtpu writes bundles only if it is not loaded yet."""
    folder = tmp_path_factory.mktemp("bundles")
    code = f"""
import pickle, sys, jax, jax.numpy as jnp
from tests.launch.test_count_kernels import SIZE, count_kernels, four_kernels
from jaxlm.analysis.compilation import prepare_environment, topology_devices
prepare_environment()
count_kernels.dump_bundles({str(folder)!r})
device = topology_devices("v5e:2x2")[0]
counts = count_kernels.count_kernels(four_kernels(), device, count_kernels.Path({str(folder)!r}), {{}})
pickle.dump(counts, open({str(folder / "counts")!r}, "wb"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=LAUNCH.parent)
    return pickle.loads((folder / "counts").read_bytes())


def four_kernels():
    """Return the jaxpr of four kernels."""
    shapes = [((SIZE, SIZE), jnp.bfloat16)] * 2 + [((1,), jnp.int32), ((32, 128), jnp.float32)]

    def run(a, b, number, x):
        return product(a, b), loop(10)(number, x), loop(110)(number, x), loop(None)(number, x)

    return jax.jit(run).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).jaxpr


def count_of(name, counts) -> Count:
    return next(count for key, count in counts.items() if key.startswith(name))


@pytest.mark.slow
@needs_compiler
def test_a_matrix_product_multiplies_every_pair_once_and_is_about_as_fast_as_the_peak(counts):
    count = count_of("product", counts)
    flops = 2 * SIZE**3
    assert count.flops == flops and count.rows == SIZE and count.conditional_cycles == 0
    assert 1.0 <= count.cycles / 1.5e9 / (flops / peak_flops(V5E)) < 1.25


@pytest.mark.slow
@needs_compiler
def test_a_loop_inside_the_grid_takes_its_trip_count(counts):
    short, long = (count_of(f"loop_{trips} ", counts).cycles for trips in (10, 110))
    once = (long - short) / (4 * 100)
    assert once == int(once) and 10 < once < 200  # bundles of the loop's body
    assert 10 * once * 4 < short < 10 * once * 4 + 1000


@pytest.mark.slow
@needs_compiler
def test_a_kernel_whose_trip_count_is_an_argument_has_no_count(counts):
    assert len(counts) == 3 and not any(key.startswith("loop_None") for key in counts)


def test_the_record_is_sorted_and_keeps_other_chips(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "RECORD", tmp_path / "kernels.json")
    monkeypatch.setattr(count_kernels, "RECORD", tmp_path / "kernels.json")
    kernels.recorded_counts.cache_clear()
    count_kernels.record("TPU v4", {"other": Count(1, 2.0, 3.0)})
    count_kernels.record("TPU v5 lite", {"z": Count(4, 5.4, 6.0, 7.0, 8.0), "a": Count(1, 1.0, 1.0)})
    assert json.loads((tmp_path / "kernels.json").read_text())["TPU v4"] == {"other": [1, 2, 3, 0, 0]}
    recorded = kernels.recorded_counts()["TPU v5 lite"]
    assert list(recorded) == ["a", "z"] and recorded["z"] == Count(4, 5, 6, 7, 8)
    kernels.recorded_counts.cache_clear()


def test_a_counted_kernel_takes_its_bundles_or_its_products_at_the_peak():
    other = dataclasses.replace(kernel("other"), shape="f32[8]")
    rows = 4 * 10**6  # on each of four matrix units as many rows as cycles
    by_bundles = count_kernels.on_device(Work(2 * 10**6, rows), Work(10**6, 0), other, V5E)
    assert by_bundles == Count(8, 2e6, 2 * rows * 128**2, 1e6, 0)
    by_products = count_kernels.on_device(Work(10**5, rows), Work(0, 0), other, V5E)
    assert by_products.cycles == pytest.approx(1e6, rel=3e-3)  # the data sheet's peak is rounded
    # Both cores of a v5p run half of the grid, with four matrix units each.
    v5p = SimpleNamespace(device_kind="TPU v5p")
    on_two_cores = count_kernels.on_device(Work(10**5, rows), Work(0, 0), other, v5p)
    assert on_two_cores.cycles == pytest.approx(1e6, rel=3e-3) and on_two_cores.flops == 2 * by_products.flops
    # Heads of 64 fill half of a matrix unit. A kernel that states its FLOPs has no more than those.
    narrow = count_kernels.on_device(Work(9, 0), Work(9, rows), kernel("splash_mha_fwd.1"), V5E)
    assert narrow.conditional_flops == 2 * rows * 128**2 / 2
    stated = kernel("other", cost=',"cost_estimate":{"flops":"7"}')
    assert count_kernels.on_device(Work(9, 9), Work(9, 9), stated, V5E).flops == 7
