"""FLOPs and HBM traffic: modules written by hand, with their totals counted by hand, and the compiler's own FLOPs."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from jaxlm.analysis import compilation
from jaxlm.analysis.costs import hbm_bytes, placed_bytes, product_flops
from jaxlm.analysis.hlo import parse
from tests.params import first_fast

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")

LOOP = """\
HloModule m

%sliced (p.0: f32[12,64,128], p.1: s32[], p.2: f32[64,128]) -> f32[64,128] {
  %p.0 = f32[12,64,128]{2,1,0:T(8,128)} parameter(0)
  %p.1 = s32[] parameter(1)
  %p.2 = f32[64,128]{1,0:T(8,128)} parameter(2)
  %slice = f32[1,64,128]{2,1,0:T(8,128)} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={1,64,128}
  %layer = f32[64,128]{1,0:T(8,128)} bitcast(%slice)
  ROOT %product = f32[64,64]{1,0:T(8,128)} dot(%p.2, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%updated (q.0: f32[12,64,128], q.1: f32[64,128], q.2: s32[]) -> f32[12,64,128] {
  %q.0 = f32[12,64,128]{2,1,0:T(8,128)} parameter(0)
  %q.1 = f32[64,128]{1,0:T(8,128)} parameter(1)
  %q.2 = s32[] parameter(2)
  %update = f32[1,64,128]{2,1,0:T(8,128)} bitcast(%q.1)
  ROOT %stack = f32[12,64,128]{2,1,0:T(8,128)} dynamic-update-slice(%q.0, %update, %q.2)
}

%body (t: (s32[], f32[12,64,128], f32[64,128])) -> (s32[], f32[12,64,128], f32[64,128]) {
  %t = (s32[], f32[12,64,128]{2,1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%t), index=0
  %w = f32[12,64,128]{2,1,0:T(8,128)} get-tuple-element(%t), index=1
  %x = f32[64,128]{1,0:T(8,128)} get-tuple-element(%t), index=2
  %y = f32[64,64]{1,0:T(8,128)} fusion(%w, %i, %x), kind=kOutput, calls=%sliced
  %v = f32[12,64,128]{2,1,0:T(8,128)} fusion(%w, %x, %i), kind=kLoop, calls=%updated
  ROOT %out = (s32[], f32[12,64,128]{2,1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) tuple(%i, %v, %x)
}

%condition (c: (s32[], f32[12,64,128], f32[64,128])) -> pred[] {
  %c = (s32[], f32[12,64,128], f32[64,128]) parameter(0)
  ROOT %true = pred[]{:S(6)} constant(true)
}

ENTRY %main (a: f32[12,64,128], b: f32[64,128]) -> f32[12,64,128] {
  %a = f32[12,64,128]{2,1,0:T(8,128)} parameter(0)
  %b = f32[64,128]{1,0:T(8,128)} parameter(1)
  %zero = s32[]{:S(6)} constant(0)
  %start = (s32[], f32[12,64,128]{2,1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) tuple(%zero, %a, %b)
  %loop = (s32[], f32[12,64,128]{2,1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %r = f32[12,64,128]{2,1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""
ARRAY = 64 * 128 * 4


def test_loops_read_slices_and_write_updates_and_pass_arrays_on_for_nothing():
    # The product reads a layer of the stack and x; its 64 columns fill tiles of 128. The update reads and writes x.
    assert hbm_bytes(parse(LOOP)) == 12 * (2 * ARRAY + 64 * 128 * 4 + 2 * ARRAY)
    assert product_flops(parse(LOOP)) == 12 * 2 * 64 * 64 * 128
    used_whole = LOOP.replace("dot(%p.2, %layer)", "dot(%p.0, %layer)")
    assert hbm_bytes(parse(used_whole)) == hbm_bytes(parse(LOOP)) + 12 * (12 * ARRAY - ARRAY - ARRAY)


def test_a_buffer_that_a_fusion_makes_itself_is_written_whole():
    made = LOOP.replace("%stack = f32[12,64,128]{2,1,0:T(8,128)} dynamic-update-slice(%q.0,", (
        "%stack = f32[12,64,128]{2,1,0:T(8,128)} dynamic-update-slice(%zeros,"
    )).replace("%q.0 = f32[12,64,128]{2,1,0:T(8,128)} parameter(0)", (
        "%q.0 = f32[12,64,128]{2,1,0:T(8,128)} parameter(0)\n"
        "  %zeros = f32[12,64,128]{2,1,0:T(8,128)} broadcast(%q.2), dimensions={}"
    ))
    assert hbm_bytes(parse(made)) == hbm_bytes(parse(LOOP)) + 12 * (12 * ARRAY - ARRAY)


def entry_bytes(*instructions: str) -> float:
    lines = "".join(f"  {line}\n" for line in instructions)
    start = "  %p = f32[12,64,128]{2,1,0:T(8,128)} parameter(0)\n  %i = s32[]{:S(6)} constant(0)\n"
    return hbm_bytes(parse(f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n{start}{lines}}}\n"))


PLACED = "f32[12,64,128]{2,1,0:T(8,128)}"
ON_CHIP = "f32[12,64,128]{2,1,0:T(8,128)S(1)}"


@pytest.mark.parametrize(("instruction", "arrays"), [
    (f"%r = {PLACED} copy(%p)", 24),
    (f"%r = {ON_CHIP} copy(%p)", 12),
    (f"%r = ({ON_CHIP}, {PLACED}, u32[]{{:S(2)}}) copy-start(%p)", 12),
    (f"%r = (({PLACED}), f32[4,64,128]{{2,1,0:T(8,128)S(1)}}, s32[]{{:S(2)}}) slice-start(%p), slice={{[0:4]}}", 4),
    ("%r = f32[1,64,128]{2,1,0:T(8,128)} dynamic-slice(%p, %i)", 2),
    (f"%r = {PLACED} all-reduce(%p), channel_id=1", 0),
    (f'%r = {PLACED} custom-call(%p), custom_call_target="ConcatBitcast"', 0),
    (f'%r = {PLACED} custom-call(%p), custom_call_target="tpu_custom_call"', 24),
])
def test_traffic_of_an_instruction(instruction, arrays):
    assert entry_bytes(instruction) == arrays * ARRAY


def test_an_update_in_place_moves_the_update():
    update = "%u = f32[1,64,128]{2,1,0:T(8,128)S(1)} constant({...})"
    assert entry_bytes(update, f"%r = {PLACED} dynamic-update-slice(%p, %u, %i)") == ARRAY  # written; read on chip


def test_a_collective_that_is_fused_with_compute_leaves_the_traffic_of_the_compute():
    """As the TPU compiler writes a step of an asynchronous all-reduce: its arrays are passed on."""
    hlo = """\
HloModule m

%async_collective_fusion (g: f32[64,128], h: f32[64,128], x: f32[8,128]) -> (f32[8,128], f32[64,128], f32[64,128]) {
  %g = f32[64,128]{1,0} parameter(0)
  %h = f32[64,128]{1,0} parameter(1)
  %x = f32[8,128]{1,0} parameter(2)
  %all-reduce = f32[64,128]{1,0} all-reduce(%g), channel_id=1
  %square = f32[8,128]{1,0} multiply(%x, %x)
  ROOT %all = (f32[8,128]{1,0}, f32[64,128]{1,0}, f32[64,128]{1,0}) tuple(%square, %all-reduce, %h)
}

ENTRY %main (p: f32[64,128], q: f32[8,128]) -> f32[8,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %q = f32[8,128]{1,0} parameter(1)
  %step = (f32[8,128]{1,0}, f32[64,128]{1,0}, f32[64,128]{1,0}) fusion(%p, %p, %q), kind=kLoop, \
calls=%async_collective_fusion
  ROOT %r = f32[8,128]{1,0} get-tuple-element(%step), index=0
}
"""
    assert hbm_bytes(parse(hlo)) == 2 * 8 * 128 * 4


@pytest.mark.parametrize(("shape", "size"), [
    ("bf16[16,12,512,64]{3,2,1,0:T(8,128)(2,1)}", 16 * 12 * 512 * 128 * 2),
    ("bf16[16,12,512,64]{2,3,1,0:T(8,128)(2,1)}", 16 * 12 * 512 * 64 * 2),
    ("f32[3,5]{0,1:T(8,128)}", 128 * 8 * 4),
    ("(f32[100]{0:T(1024)}, /*index=1*/u32[]{:S(2)}, pred[7]{0})", 4096 + 7),
    ("bf16[16,12]{1,0:T(8,128)(2,1)S(1)}", 0),
])
def test_tiles_pad_arrays(shape, size):
    assert placed_bytes(shape) == size


def test_products_with_batch_dimensions_are_convolutions_that_multiply_few_pairs():
    """As the TPU compiler writes "bhqd,bhkd->bhqk": of 16 x 12 window positions one is no hole."""
    hlo = """\
HloModule m

ENTRY %main (q: bf16[2]) -> bf16[2] {
  %q = bf16[16,12,512,64]{3,2,1,0} parameter(0)
  %k = bf16[16,12,384,64]{3,2,1,0} parameter(1)
  ROOT %scores = bf16[16,12,512,384]{3,2,1,0} convolution(%q, %k), \
window={size=16x12 stride=15x11 lhs_dilate=16x12}, dim_labels=01bf_01oi->01bf
}
"""
    assert product_flops(parse(hlo)) == 2 * 16 * 12 * 512 * 384 * 64


@needs_compiler
@pytest.mark.parametrize(("function", "shapes"), first_fast([
    (lambda a, b: a @ b, [(512, 256), (256, 384)]),
    (lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b), [(16, 256, 12, 64), (16, 384, 12, 64)]),
    (lambda a, b: jax.lax.conv(a, b, (2, 2), "SAME"), [(8, 16, 63, 64), (32, 16, 3, 5)]),
    (lambda a, b: jax.lax.conv_general_dilated(
        a, b, (1,), "SAME", feature_group_count=64, dimension_numbers=("NWC", "WIO", "NWC")
    ), [(8, 128, 64), (7, 1, 64)]),
], 2))
def test_flops_are_the_compilers(function, shapes, monkeypatch):
    """Of programs without loops, kernels and elementwise operations."""
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    place = jax.sharding.SingleDeviceSharding(compilation.topology_devices("v5e:2x2")[0])
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    compiled = jax.jit(function).lower(*arrays).compile()
    assert product_flops(parse(compiled.as_text())) == compiled.cost_analysis()["flops"] > 0
