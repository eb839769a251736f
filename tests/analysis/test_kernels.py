"""Counts of compiled kernels whose work is known, their cache, and kernels that cannot be counted."""

import importlib.util
import json
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxlm.analysis import compilation, kernels
from jaxlm.analysis.bundles import Count, Work
from jaxlm.analysis.estimate import estimate
from jaxlm.analysis.hlo import Module, parse
from jaxlm.parallel.peaks import peak_flops

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
DEVICE = "TPU v5 lite"
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
def compiled():
    """The module of four kernels for v5e."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in compilation.ENVIRONMENT.items():
            patch.setenv(name, value)
        place = jax.sharding.SingleDeviceSharding(compilation.topology_devices("v5e:2x2")[0])
        shapes = [((SIZE, SIZE), jnp.bfloat16)] * 2 + [((1,), jnp.int32), ((32, 128), jnp.float32)]
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]

        def run(a, b, number, x):
            return product(a, b), loop(10)(number, x), loop(110)(number, x), loop(None)(number, x)

        yield parse(jax.jit(run).lower(*arrays).compile().as_text())


@pytest.fixture(scope="module")
def counts(compiled, tmp_path_factory):
    cache = tmp_path_factory.mktemp("counts")
    return kernels.count_kernels(compiled, "v5e:2x2", DEVICE, cache), cache


def count_of(name, compiled, counts) -> Count:
    kernel = next(one for body in compiled.computations.values() for one in body if one.name.startswith(name))
    return counts[0][kernels.kernel_digest(kernel)]


@needs_compiler
def test_a_matrix_product_multiplies_every_pair_once_and_is_about_as_fast_as_the_peak(compiled, counts):
    count = count_of("product", compiled, counts)
    flops = 2 * SIZE**3
    assert count.certain.rows * 2 * 128**2 == flops and count.conditional == Work(0, 0)
    device = SimpleNamespace(device_kind=DEVICE)
    alone = Module("main", {"main": [one for one in compiled.computations[compiled.entry] if "product" in one.name]})
    result = estimate(alone, device, counts[0])
    assert result.executed_flops == flops and (result.counted_kernels, result.charged_kernels) == (1, 0)
    assert 1.0 <= result.seconds / (flops / peak_flops(device)) < 1.25


@needs_compiler
def test_a_loop_inside_the_grid_takes_its_trip_count(compiled, counts):
    short, long = (count_of(f"loop_{trips}.", compiled, counts).certain.cycles for trips in (10, 110))
    once = (long - short) / (4 * 100)
    assert once == int(once) and 10 < once < 200  # bundles of the loop's body
    assert 10 * once * 4 < short < 10 * once * 4 + 1000


@needs_compiler
def test_a_kernel_whose_trip_count_is_an_argument_is_charged_by_its_flops(compiled, counts):
    with pytest.raises(KeyError):
        count_of("loop_None", compiled, counts)
    result = estimate(compiled, SimpleNamespace(device_kind=DEVICE), counts[0])
    assert (result.counted_kernels, result.charged_kernels) == (3, 1)


@needs_compiler
def test_counts_are_cached_by_chip(compiled, counts, monkeypatch):
    requests = []

    def run(*_, input, **__):
        requests.append(json.loads(input))
        raise subprocess.TimeoutExpired("compiler", 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert kernels.count_kernels(compiled, "v5e:2x2", DEVICE, counts[1]) == counts[0]
    assert [len(request["kernels"]) for request in requests] == [1]  # the one that could not be counted
    assert kernels.count_kernels(compiled, "v6e:2x2", "TPU v6 lite", counts[1]) == {}
    assert len(requests[1]["kernels"]) == 4


KERNEL = """\
HloModule m

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %k = f32[8,128]{1,0:T(8,128)} custom-call(%p), custom_call_target="tpu_custom_call", \
operand_layout_constraints={f32[8,128]{1,0}}, backend_config={"custom_call_config":{"body":"TUzv"}}
}
"""


@pytest.mark.parametrize("outcome", [
    OSError(), subprocess.CalledProcessError(1, "compiler"), subprocess.TimeoutExpired("compiler", 1), "", "no JSON",
])
def test_without_the_second_process_there_are_no_counts_and_the_kernel_is_charged(outcome, tmp_path, monkeypatch):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(stdout=outcome)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "1")
    module = parse(KERNEL)
    assert kernels.count_kernels(module, "v5e:2x2", DEVICE, tmp_path) == {}
    result = estimate(module, SimpleNamespace(device_kind=DEVICE), {})
    assert (result.counted_kernels, result.charged_kernels) == (0, 1)
    assert result.kernel_seconds == pytest.approx(2 * 8 * 128 * 4 / 819e9)


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    digest = kernels.kernel_digest(parse(KERNEL).computations["main"][1])
    answer = json.dumps({digest: [[7, 1], [2, 0]]})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"a warning\n{answer}\n"))
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "1")
    counts = kernels.count_kernels(parse(KERNEL), "v5e:2x2", DEVICE, tmp_path / "file" / "counts")
    assert counts == {digest: Count(Work(7, 1), Work(2, 0))}
