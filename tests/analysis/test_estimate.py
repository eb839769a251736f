"""Estimated step time: totals of modules written by hand, the cost of kernels, and compiled programs."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest

from jaxlm.analysis import compilation
from jaxlm.analysis.estimate import estimate
from jaxlm.analysis.hlo import parse
from jaxlm.parallel.peaks import PEAKS, TPUS, peak_flops, tpu_generation
from tests.analysis.test_hlo import NESTED

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
V5E = types.SimpleNamespace(device_kind="TPU v5 lite")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_cycles_times_executions_over_the_clock_and_fused_computations_once():
    result = estimate(parse(NESTED), V5E)
    cycles = 5 * 100 + 15 * 7  # neither the fused sine's 1,000 nor the copy's unknown cycles
    assert result.seconds == pytest.approx(cycles / 1.5e9)
    assert result.operations == {
        "jit(f)/layer_#/sin": (pytest.approx(500 / 1.5e9), 5), "(exponential)": (pytest.approx(105 / 1.5e9), 15)
    }
    assert result.kernels == (0, 0, 0)
    # A copy, then 15 exponentials and 5 fusions of a counter and 8 numbers, and 20 comparisons of two counters.
    assert result.bytes_accessed == 2 * 32 + (15 + 5) * (4 + 32 + 32) + 20 * (4 + 4 + 1)


def test_chips_whose_clock_is_unknown_have_no_estimate():
    assert estimate(parse(NESTED), types.SimpleNamespace(device_kind="cpu")) is None


@pytest.mark.parametrize(("name", "mxus"), [
    ("TPU v2", 1), ("TPU v3", 2), ("TPU v4", 8), ("TPU v5 lite", 4), ("TPU v5p", 8), ("TPU v6", 4),
])
def test_clocks_agree_with_the_published_peaks(name, mxus):
    """Peak = 2 FLOPs x matrix units x width squared x clock, to 0.3 %: data sheets round."""
    assert 2 * mxus * TPUS[name].mxu_width**2 * TPUS[name].clock == pytest.approx(dict(PEAKS)[name], rel=3e-3)


def compiled_estimate(function, *shapes, topology="v5e:2x2"):
    device = compilation.topology_devices(topology)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    compiled = jax.jit(function).lower(*arrays).compile()
    return device, estimate(parse(compiled.as_text()), device)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v4:2x2x1", "v5p:2x2x1"])
def test_calibration_of_a_large_matrix_product(topology):
    """configs/RESULTS.md has the figures; a new compiler that moves them needs new ones there."""
    device, result = compiled_estimate(lambda a, b: a @ b, (8192, 8192), (8192, 8192), topology=topology)
    ratio = result.seconds / (2 * 8192**3 / peak_flops(device))
    assert 1.0 < ratio < 1.2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "arguments", "arrays", "low", "high"),
    [
        (jnp.copy, 1, 2, 2.2, 2.7),
        (lambda a: a + 1, 1, 2, 2.2, 2.7),
        (lambda: jnp.zeros((8192, 8192), jnp.bfloat16), 0, 1, 5.0, 8.0),
        (lambda a, b: jax.nn.gelu(a) * b + 1, 2, 3, 1.8, 2.3),
    ],
    ids=["copy", "add", "zero-fill", "fused"],
)
def test_calibration_against_bandwidth(function, arguments, arrays, low, high):
    """The compiler is pessimistic about programs that only move memory: time over bytes / bandwidth."""
    if not arguments:
        device = compilation.topology_devices("v5e:2x2")[0]
        place = jax.sharding.SingleDeviceSharding(device)
        compiled = jax.jit(function, out_shardings=place).lower().compile()
        result = estimate(parse(compiled.as_text()), device)
    else:
        device, result = compiled_estimate(function, *[(8192, 8192)] * arguments)
    ratio = result.seconds / (arrays * 8192**2 * 2 / tpu_generation(device).hbm_bandwidth)
    assert low < ratio < high


@needs_compiler
def test_a_compiled_loop_takes_its_trip_count_times_as_long():
    def loop(trips):
        return lambda a, b: jax.lax.scan(lambda x, _: (x @ b, None), a, None, length=trips)[0]

    short, long = (compiled_estimate(loop(trips), (2048, 2048), (2048, 2048))[1].seconds for trips in (10, 30))
    assert long / short == pytest.approx(3, rel=0.1)
    assert long > 30 * 2 * 2048**3 / 197e12
