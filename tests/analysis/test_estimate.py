"""Estimated step time: totals of modules written by hand, the cost of kernels, and compiled programs."""

import dataclasses
import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest

from jaxlm.analysis import compilation
from jaxlm.analysis.bundles import Count, Work
from jaxlm.analysis.estimate import KERNEL_PEAK_SHARE, computed_share, estimate, kernel_cost, kernel_flops
from jaxlm.analysis.hlo import Instruction, parse
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
    first, second = result.top
    assert first["name"] == "jit(f)/layer_#/sin"
    assert (first["executions"], first["share"]) == (5, pytest.approx(500 / cycles))
    assert (second["name"], second["executions"]) == ("(exponential)", 15)
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


def kernel(name: str, scope: str, cost: str = "", extra: str = "") -> Instruction:
    operands = "s8[1,4,4]{2,1,0}, bf16[4,12,512,64]{3,2,1,0}, bf16[4,12,384,64]{3,2,1,0}, bf16[4,12,384,64]{3,2,1,0}"
    attributes = (
        f', custom_call_target="tpu_custom_call", operand_layout_constraints={{{operands}}}, '
        f'frontend_attributes={{{extra}}}, metadata={{op_name="{scope}"}}, '
        f'backend_config={{"custom_call_config":{{"body":"x"{cost}}}}}'
    )
    return Instruction(name, "bf16[4,12,512,64]{3,2,1,0}", "custom-call", "%m, %q, %k, %v", attributes)


PRODUCT = 2 * 4 * 12 * 512 * 384 * 64  # queries times keys, or weights times values


@pytest.mark.parametrize(
    ("instruction", "flops"),
    [
        (kernel("splash_mha_fwd.1", "jit(f)/splash"), 2 * PRODUCT),
        (kernel("splash_mha_dkv.1", "jit(f)/splash"), 4 * PRODUCT),
        (kernel("splash_mha_dq.1", "jit(f)/splash"), 3 * PRODUCT),
        (kernel("splash_mha_dkv.1", "jit(f)/splash", extra='"use_fused_bwd_kernel\\": true'), 5 * PRODUCT),
        (kernel("splash_mha_fwd.1", "jit(f)/causal_attention/splash"), PRODUCT),
        (kernel("pallas_call.1", "jit(flash_attention)", ',"cost_estimate":{"flops":"123","bytes_accessed":"9"}'), 123),
        (kernel("pallas_call.1", "jit(f)/something_else"), 0),
    ],
)
def test_flops_of_a_kernel(instruction, flops):
    assert kernel_flops(instruction) == flops


@pytest.mark.parametrize("products", [2, 5])
def test_flops_where_the_positions_come_last(products):
    """As jaxlm calls splash attention: [batch, heads, head size, positions]."""
    name, fused = ("splash_mha_fwd.1", "false") if products == 2 else ("splash_mha_dkv.1", "true")
    extra = f'kernel_metadata={{"q_layout\\": 2, "use_fused_bwd_kernel\\": {fused}}}'
    one = kernel(name, "jit(f)/splash", extra=extra)
    turned = one.attributes
    for length in (512, 384):
        turned = turned.replace(f"[4,12,{length},64]", f"[4,12,64,{length}]")
    assert kernel_flops(dataclasses.replace(one, attributes=turned)) == products * PRODUCT


V5E_CHIP, PEAK = TPUS["TPU v5 lite"], 197e12


def test_a_kernel_without_a_count_is_charged_and_a_narrow_head_leaves_the_matrix_unit_half_idle():
    attention = kernel("splash_mha_fwd.1", "")
    cost = kernel_cost(attention, [], V5E_CHIP, PEAK)
    assert cost.seconds == pytest.approx(2 * PRODUCT * (128 / 64) / (KERNEL_PEAK_SHARE * PEAK))
    assert cost.flops == 2 * PRODUCT
    # Heads of 64 are padded to 128 columns in HBM; an operand in on-chip memory costs no bandwidth.
    operands = [
        Instruction("q", "bf16[4,12,512,64]{3,2,1,0:T(8,128)(2,1)}", "parameter", "0", ""),
        Instruction("k", "bf16[4,12,384,64]{3,2,1,0:T(8,128)(2,1)S(1)}", "parameter", "1", ""),
    ]
    size = 2 * 4 * 12 * 512 * (64 + 128)
    assert kernel_cost(kernel("other", ""), operands, V5E_CHIP, PEAK).seconds == pytest.approx(size / 819e9)


def test_a_counted_kernel_takes_its_bundles_or_its_products_at_the_peak():
    other = dataclasses.replace(kernel("other", ""), shape="f32[8]")
    rows = 4 * 10**6  # on each of four matrix units as many rows as cycles
    by_bundles = kernel_cost(other, [], V5E_CHIP, PEAK, Count(Work(2 * 10**6, rows), Work(10**6, 0)))
    assert by_bundles.seconds == pytest.approx(3e6 / 1.5e9)
    assert by_bundles.flops == 2 * rows * 128**2
    by_products = kernel_cost(other, [], V5E_CHIP, PEAK, Count(Work(10**5, rows), Work(0, 0)))
    assert by_products.seconds == pytest.approx(1e6 / 1.5e9, rel=3e-3)  # the data sheet's peak is rounded
    # Both cores of a v5p run half of the grid, with four matrix units each.
    on_two_cores = kernel_cost(other, [], TPUS["TPU v5p"], 459e12, Count(Work(10**5, rows), Work(0, 0)))
    assert on_two_cores.seconds == pytest.approx(1e6 / 1.75e9, rel=3e-3)
    assert on_two_cores.flops == 2 * by_products.flops
    by_bytes = kernel_cost(kernel("other", ""), [], V5E_CHIP, PEAK, Count(Work(10, 0), Work(0, 0)))
    assert by_bytes.seconds == pytest.approx(2 * 4 * 12 * 512 * 64 / 819e9)


def mask(text: str) -> list[Instruction]:
    """The mask that splash attention takes as its second operand, as a copy."""
    return [
        Instruction("made", "s8[1,4,4]{2,1,0}", text.partition("(")[0], text.partition("(")[2].rstrip(")"), ""),
        Instruction("start", "(s8[1,4,4]{2,1,0}, s8[1,4,4]{2,1,0}, u32[])", "copy-start", "%made", ""),
        Instruction("q", "s8[1,4,4]{2,1,0}", "copy-done", "%start", ""),
    ]


@pytest.mark.parametrize(("name", "scope", "text", "share"), [
    ("splash_mha_fwd.1", "full_attention", "constant({ { {1, 0, 0, 0}, {2, 1, 0, 0} } })", 3 / 8),
    ("splash_mha_fwd.1", "causal_attention", "constant({...})", 10 / 16),
    ("splash_mha_fwd.1", "full_attention", "constant({...})", 1),
    ("splash_mha_fwd.1", "causal_attention", "get-tuple-element(%loop)", 10 / 16),
    ("other_kernel.1", "causal_attention", "constant({ { {1, 0, 0, 0}, {2, 1, 0, 0} } })", 1),
])
def test_the_share_of_blocks_that_splash_attention_computes(name, scope, text, share):
    one = dataclasses.replace(
        kernel(name, scope), operands="%next, %q, %queries",
        attributes=kernel(name, scope).attributes.replace("s8[1,4,4]{2,1,0}, ", "s8[1,4,4]{2,1,0}, " * 2),
    )
    assert computed_share(one, mask(text)) == share
    cost = kernel_cost(one, mask(text), V5E_CHIP, PEAK, Count(Work(3 * 10**6, 0), Work(6 * 10**6, 4 * 10**6)))
    assert cost.seconds == pytest.approx((3 + 6 * share) * 1e6 / 1.5e9)
    # Heads of 64 fill half of a matrix unit. A kernel that states its FLOPs has no more than those.
    assert cost.flops == share * 2 * 4e6 * 128**2 / 2
    stated = dataclasses.replace(one, attributes=one.attributes + '{"cost_estimate":{"flops":"7"}}')
    assert kernel_cost(stated, mask(text), V5E_CHIP, PEAK, Count(Work(9, 9), Work(9, 9))).flops == 7


def compiled_estimate(function, *shapes, topology="v5e:2x2"):
    device = compilation.topology_devices(topology)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    compiled = jax.jit(function).lower(*arrays).compile()
    return device, estimate(parse(compiled.as_text()), device)


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
