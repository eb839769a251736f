"""Time of Mosaic kernels: recorded counts in proportion to the rows, and a charge for those that are not recorded."""

import dataclasses
import json
import types

import pytest

from jaxlm.analysis import kernels
from jaxlm.analysis.estimate import estimate
from jaxlm.analysis.hlo import Instruction, Module
from jaxlm.analysis.kernels import KERNEL_PEAK_SHARE, Count, computed_share, kernel_cost, kernel_flops, kernel_key

V5E = types.SimpleNamespace(device_kind="TPU v5 lite")
PEAK = 197e12


def kernel(name: str, scope: str = "", cost: str = "", batch: int = 4) -> Instruction:
    """Return a kernel with a mask, queries, keys and values, as jaxlm calls splash attention: positions are last."""
    operands = f"s8[1,4,4]{{2,1,0}}, bf16[{batch},12,64,512]{{3,2,1,0}}" + 2 * f", bf16[{batch},12,64,384]{{3,2,1,0}}"
    attributes = (
        f', custom_call_target="tpu_custom_call", operand_layout_constraints={{{operands}}}, '
        f'metadata={{op_name="{scope}"}}, backend_config={{"custom_call_config":{{"body":"x"{cost}}}}}'
    )
    return Instruction(name, f"bf16[{batch},12,64,512]{{3,2,1,0}}", "custom-call", "%m, %q, %k, %v", attributes)


PRODUCT = 2 * 4 * 12 * 512 * 384 * 64  # queries times keys, or weights times values


@pytest.mark.parametrize(("instruction", "flops"), [
    (kernel("splash_mha_fwd_residuals.1"), 2 * PRODUCT),
    (kernel("splash_mha_dkv.1"), 5 * PRODUCT),
    (kernel("splash_mha_fwd.1", "jit(f)/causal_attention/splash"), PRODUCT),
    (kernel("row_attention_forward.1", cost=',"cost_estimate":{"flops":"123","bytes_accessed":"9"}'), 123),
    (kernel("pallas_call.1", "jit(f)/something_else"), 0),
])
def test_flops_of_a_kernel(instruction, flops):
    assert kernel_flops(instruction) == flops


def test_a_kernel_without_a_count_is_charged_and_a_narrow_head_leaves_the_matrix_unit_half_idle():
    cost = kernel_cost(kernel("splash_mha_fwd.1"), [], V5E)
    assert cost.seconds == pytest.approx(2 * PRODUCT * (128 / 64) / (KERNEL_PEAK_SHARE * PEAK))
    assert cost.flops == 2 * PRODUCT and not cost.is_counted
    # Lengths of 512 and 384 are multiples of a tile; an operand in on-chip memory costs no bandwidth.
    operands = [
        Instruction("q", "bf16[4,12,64,512]{3,2,1,0:T(8,128)(2,1)}", "parameter", "0", ""),
        Instruction("k", "bf16[4,12,64,384]{3,2,1,0:T(8,128)(2,1)S(1)}", "parameter", "1", ""),
    ]
    size = 2 * 4 * 12 * 64 * (512 + 512)
    assert kernel_cost(kernel("other"), operands, V5E).seconds == pytest.approx(size / 819e9)


def test_a_recorded_kernel_takes_its_cycles_for_any_number_of_rows(monkeypatch, tmp_path):
    one = kernel("splash_mha_fwd.1")
    record = tmp_path / "kernels.json"
    record.write_text(json.dumps({"TPU v5 lite": {kernel_key(one): [4, 3_000_000, 7e9]}}))
    monkeypatch.setattr(kernels, "RECORD", record)
    kernels.recorded_counts.cache_clear()
    assert kernel_cost(one, [], V5E) == (pytest.approx(3e6 / 1.5e9), 7e9, True)
    assert kernel_cost(kernel("splash_mha_fwd.7.remat", batch=12), [], V5E) == (pytest.approx(9e6 / 1.5e9), 21e9, True)
    reshaped = dataclasses.replace(one, shape="f32[8]")
    others = [kernel("splash_mha_fwd.1", "causal"), kernel("splash_mha_dkv.1"), reshaped]
    assert not any(kernel_cost(other, [], V5E).is_counted for other in others)
    assert not kernel_cost(one, [], types.SimpleNamespace(device_kind="TPU v4")).is_counted
    found = estimate(Module("main", {"main": [one, dataclasses.replace(one, name="splash_mha_fwd.2"), others[1]]}), V5E)
    assert (found.kernels.counted, found.kernels.charged) == (1, 1)
    assert found.kernels.seconds == found.seconds == sum(item.seconds for item in found.operations.values())
    assert {name: item.executions for name, item in found.operations.items()} == {
        "kernel (custom-call)": 2, "kernel (custom-call) (charged)": 1
    }
    kernels.recorded_counts.cache_clear()


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
def test_the_share_of_blocks_that_splash_attention_computes(name, scope, text, share, monkeypatch):
    one = dataclasses.replace(
        kernel(name, scope), operands="%next, %q, %queries",
        attributes=kernel(name, scope).attributes.replace("s8[1,4,4]{2,1,0}, ", "s8[1,4,4]{2,1,0}, " * 2),
    )
    assert computed_share(one, mask(text)) == share
    count = Count(4, 3e6, 0.0, 6e6, 4e9)
    monkeypatch.setattr(kernels, "recorded_counts", lambda: {"TPU v5 lite": {kernel_key(one): count}})
    assert kernel_cost(one, mask(text), V5E) == (pytest.approx((3 + 6 * share) * 1e6 / 1.5e9), share * 4e9, True)


def test_the_record_has_the_kernels_of_the_main_presets():
    counts = kernels.recorded_counts()["TPU v5 lite"]
    assert len(counts) >= 12 and all(isinstance(count, Count) and count.rows > 0 for count in counts.values())
    for count in counts.values():
        flops, cycles = count.flops + count.conditional_flops, count.cycles + count.conditional_cycles
        assert 0.05 < flops / (cycles / 1.5e9) / PEAK < 1.01
