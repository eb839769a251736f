"""Plans for GPUs: FLOPs and bytes of library calls, links of hosts, and one sentence without the compiler.

`test_gpu_steps.py` compiles real steps.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxlm.analysis import gpu
from jaxlm.analysis.compilation import topology_devices
from jaxlm.analysis.costs import product_flops
from jaxlm.analysis.hlo import Collective, collectives, parse, traffic
from jaxlm.analysis.links import collective_timer
from jaxlm.analysis.step import Estimate
from jaxlm.errors import UserError
from jaxlm.parallel.peaks import GPUS, gpu_model, memory_bandwidth, peak_flops

# As XLA writes them for an H100 (jax 0.10.2), without the fields that are not read.
STEP = """
HloModule jit_step, is_scheduled=true

ENTRY %main.1 (x: bf16[4096,768], w: bf16[768,2304], g: f32[4096,2304]) -> bf16[4096,2304] {
  %x = bf16[4096,768]{1,0} parameter(0)
  %w = bf16[768,2304]{1,0} parameter(1)
  %g = f32[4096,2304]{1,0} parameter(2)
  %all-reduce-start = f32[4096,2304]{1,0} all-reduce-start(%g), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %custom-call.62 = (bf16[4096,2304]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %all-reduce-done = f32[4096,2304]{1,0} all-reduce-done(%all-reduce-start)
  %all-reduce-start.1 = f32[4096,2304]{1,0} all-reduce-start(%all-reduce-done), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %all-reduce-done.1 = f32[4096,2304]{1,0} all-reduce-done(%all-reduce-start.1)
  ROOT %get-tuple-element.1 = bf16[4096,2304]{1,0} get-tuple-element(%custom-call.62), index=0
}
"""  # noqa: E501
ATTENTION = """
ENTRY %main.1 (q: bf16[32,20,12,64], k: bf16[32,128,12,64]) -> bf16[32,12,20,64] {{
  %q = bf16[32,20,12,64]{{3,2,1,0}} parameter(0)
  %k = bf16[32,128,12,64]{{3,2,1,0}} parameter(1)
  %call = (bf16[32,12,20,64]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="{target}", operand_layout_constraints={{bf16[32,20,12,64]{{3,2,1,0}}, bf16[32,128,12,64]{{3,2,1,0}}, bf16[32,128,12,64]{{3,2,1,0}}}}, backend_config={{"cudnn_fmha_backend_config": {{"mask_type": "{mask}"}}}}
  ROOT %result = bf16[32,12,20,64]{{3,1,2,0}} get-tuple-element(%call), index=0
}}
"""  # noqa: E501


def devices(model: str, hosts: int, gpus: int = 8) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(device_kind=GPUS[model].kind, platform="gpu", process_index=host)
        for host in range(hosts) for _ in range(gpus)
    ]


def planned(text: str, device: SimpleNamespace) -> Estimate:
    module = parse(text)
    return gpu.roofline(module, gpu.operation_costs(module, device))


def test_a_product_takes_its_flops_at_a_share_of_the_peak():
    (device,) = devices("h100", 1, 1)
    found = planned(STEP, device)
    flops = 2 * 4096 * 768 * 2304
    assert found.executed_flops == flops
    assert found.bytes_accessed == 2 * (4096 * 768 + 768 * 2304 + 4096 * 2304)  # bfloat16, without the workspace
    assert found.seconds == pytest.approx(flops / (gpu.PRODUCT_SHARE * 989e12))
    # In float32 at half the peak, and twice the bytes.
    precise = planned(STEP.replace("bf16", "f32"), device)
    assert precise.seconds == pytest.approx(2 * found.seconds)
    (slow,) = devices("l4", 1, 1)
    assert planned(STEP, slow).seconds == pytest.approx(flops / (gpu.PRODUCT_SHARE * 121e12))


@pytest.mark.parametrize(("target", "mask", "products"), [
    ("__cudnn$fmhaSoftmax", "PADDING", 2), ("__cudnn$fmhaSoftmaxBackward", "PADDING", 5),
    ("__cudnn$fmhaScaleBiasSoftmax", "CAUSAL", 1), ("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 2.5),
])
def test_attention_is_two_products_and_five_in_its_gradient(target, mask, products):
    module = parse(ATTENTION.format(target=target, mask=mask))
    assert product_flops(module) == products * 2 * 32 * 12 * 20 * 128 * 64
    assert module.kernels() == {target: 1}


def test_a_collective_hides_behind_what_is_scheduled_between_its_start_and_its_end():
    (device,), module = devices("h100", 1, 1), parse(STEP)
    costs = gpu.operation_costs(module, device)
    totals = traffic(module, lambda collective: 1.0, gpu.hiding(costs))["all-reduce"]
    assert (totals.count, totals.asynchronous_count, totals.seconds) == (2, 1, 2.0)
    assert totals.asynchronous_seconds == costs["custom-call.62"].seconds


def test_groups_over_a_transposed_mesh_of_devices():
    axes = "replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=2], device_ids=([2,8]T(1,0)) {'axis_2'}"
    (found,) = {one.group for one in collectives(parse(STEP.replace("replica_groups={{0,1}}", axes)))}
    assert found == (0, 8)  # one GPU of each host
    (found,) = {one.group for one in collectives(parse(STEP.replace(
        "replica_groups={{0,1}}", axes.replace("{'axis_2'}", "{'axis_0'}"))))}
    assert found == tuple(range(8))


def test_convolutions_count_in_both_directions():
    text = """ENTRY %main.1 (x: f32[8,16,50]) -> f32[8,32,48] {
  %x = f32[8,16,50]{2,1,0} parameter(0)
  %k = f32[32,16,3]{2,1,0} parameter(1)
  %y = f32[8,32,48]{2,1,0} parameter(2)
  %call = RESULT custom-call(OPERANDS), window={size=3}, dim_labels=bf0_oi0->bf0, custom_call_target="__cudnn$convKIND"
  ROOT %result = f32[8,32,48]{2,1,0} get-tuple-element(%call), index=0
}
"""
    flops = 2 * 8 * 32 * 48 * 16 * 3
    for kind, operands, result in (("Forward", "%x, %k", "(f32[8,32,48]{2,1,0}, u8[0]{0})"),
                                   ("BackwardInput", "%y, %k", "(f32[8,16,50]{2,1,0}, u8[0]{0})"),
                                   ("BackwardFilter", "%x, %y", "(f32[32,16,3]{2,1,0}, u8[0]{0})")):
        one = text.replace("KIND", kind).replace("OPERANDS", operands).replace("RESULT", result)
        assert product_flops(parse(one)) == flops


def test_the_false_branch_of_a_conditional_counts():
    branches = "".join(f"%{name} (p: f32[8]) -> f32[8] {{\n  ROOT %p = f32[8]{{0}} parameter(0)\n}}\n\n"
                       for name in ("rare", "usual"))
    choice = "  %c = f32[8]{0} conditional(%x, %x, %x), true_computation=%rare, false_computation=%usual\n"
    runs = parse((branches + STEP).replace("  ROOT %get", f"{choice}  ROOT %get")).executions(fused=False)
    assert runs["usual"] == 1 and "rare" not in runs


@pytest.mark.parametrize(("hosts", "group", "bandwidth"), [
    (1, range(8), 450e9),  # NVLink
    (2, range(16), 400e9),  # eight adapters of 50 GB/s
    (2, (0, 8), 50e9),  # one GPU of each host
])
def test_rings_run_at_the_slower_of_nvlink_and_the_network(hosts, group, bandwidth):
    time, size = collective_timer(devices("h100", hosts)), 10**9
    once = size * (len(group) - 1) / len(group) / bandwidth
    assert time(Collective("all-reduce", size, 1, False, tuple(group))) == pytest.approx(2 * once)
    assert time(Collective("all-gather", size, 1, False, tuple(group))) == pytest.approx(once)


def test_a_network_that_is_not_known_counts_nothing():
    assert collective_timer(devices("l4", 2))(Collective("all-reduce", 10**9, 1, False)) == 0


def test_an_all_to_all_sends_what_leaves_the_host_over_its_own_share_of_the_network():
    time, size = collective_timer(devices("h100", 2)), 16 * 10**9
    assert time(Collective("all-to-all", size, 1, False)) == pytest.approx(8 * 10**9 / 50e9)
    assert time(Collective("all-to-all", size, 1, False, tuple(range(8)))) == pytest.approx(7 / 8 * size / 450e9)


def test_every_gpu_has_a_peak_and_facts():
    for name in GPUS:
        (device,) = devices(name, 1, 1)
        assert gpu_model(device) is GPUS[name] and peak_flops(device) > 1e14
        assert memory_bandwidth(device) == GPUS[name].memory_bandwidth


def test_memory_is_what_jax_reserves(monkeypatch):
    (device,) = devices("h100", 1, 1)
    for name in gpu.MEMORY_SHARES:
        monkeypatch.delenv(name, raising=False)
    assert gpu.memory_limit(device) == int(0.75 * 85028765696)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    assert gpu.memory_limit(device) == int(0.95 * 85028765696)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(UserError, match="has both XLA_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_MEM_FRACTION"):
        gpu.memory_share()
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "abc")
    with pytest.raises(UserError, match=r"^the environment variable XLA_CLIENT_MEM_FRACTION is 'abc'; set it to"):
        gpu.memory_limit(device)


def test_without_the_compiler_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("h100:8", "2xH100:8", "a100"):
        with pytest.raises(UserError, match=r"^plans for GPUs need XLA's CUDA compiler; in the clone, run"):
            topology_devices(name)
    for name in ("h100:0", "0xh100:8", "h100:8x2", "gh200:8", "v5e:0x2", "0xv5e:2x2"):
        with pytest.raises(UserError, match=f"^'{name}' is not a topology; write the generation and its chips"):
            topology_devices(name)


def test_jax_is_asked_about_the_gpu_that_is_planned_for():
    before = fused_attention_stablehlo.check_compute_capability
    (device,) = devices("a100", 1, 1)
    with gpu.as_if_attached(device):
        assert fused_attention_stablehlo.check_compute_capability("8.0")
        assert not fused_attention_stablehlo.check_compute_capability("9.0")
        assert fused_attention_stablehlo.is_cuda_compute_capability_equal("8.0")
    assert fused_attention_stablehlo.check_compute_capability is before
