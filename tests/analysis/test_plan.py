"""`jaxlm plan`: sizes against formulas, collectives against what each mesh needs, and one sentence for each mistake."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.analysis import compilation
from jaxlm.analysis import search as searching
from jaxlm.analysis.extrapolate import extrapolate, with_layers
from jaxlm.analysis.hlo import Traffic, parse
from jaxlm.analysis.plan import Plan, plan
from jaxlm.analysis.report import describe, table_row
from jaxlm.analysis.step import CompiledStep, Estimate, Kernels, Operation, open_stand_in
from jaxlm.cli import main
from jaxlm.config.experiment import Experiment, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.reformer import Reformer
from jaxlm.models.t5 import T5
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig
from jaxlm.runs.session import Session
from jaxlm.training.program import Program

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")

MODEL = Bert(vocab_size=1024, hidden_size=256, num_layers=1, num_heads=4, intermediate_size=512, max_positions=32,
                   dropout=0.0, attention_dropout=0.0, dtype="bfloat16", activation="relu")
EXPERIMENT = Experiment(
    objective=MaskedLM(model=MODEL, input_format="document"),
    data=TextData(length=32),
    train=TrainConfig(batch_size=64, steps=10),
)


def on(mesh: MeshConfig, **train) -> Session:
    train = dataclasses.replace(EXPERIMENT.train, **train)
    return open_stand_in(dataclasses.replace(EXPERIMENT, mesh=mesh, train=train))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # Nobody will run these programs. The setting was renamed between jax 0.10 and 0.12.
    names = {"jax_exec_time_optimization_effort": -1.0, "jax_optimization_level": "O1"}
    name = next(name for name in names if hasattr(jax.config, name))
    before = getattr(jax.config, name)
    jax.config.update(name, names[name])
    # As prepare_environment does; jax reads the setting once.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update(name, before)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def planned(*arguments, **options) -> dict[str, Any]:
    """Return the JSON object of a plan."""
    return plan(*arguments, **options).to_json()


def parameter_count() -> int:
    """Count by hand: embeddings, blocks, and the MLM head with its tied output."""
    h, f, v, p = 256, 512, 1024, 32
    block = 4 * (h * h + h) + (h * f + f) + (f * h + h) + 2 * 2 * h
    return (v + p + 2) * h + 2 * h + block + (h * h + h) + 2 * h + v


@needs_compiler
def test_data_parallel_holds_everything_and_reduces_gradients_only():
    result = planned(on(MeshConfig()), "v5e:2x2")
    n, held = parameter_count(), result["hbm_by_kind"]
    assert result["fits"] and result["devices"] == 4 and result["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert result["parameters"] == n
    assert held["parameters"] == 4 * n
    assert 8 * n <= held["optimizer_state"] <= 8 * n + 64  # two moments and a few counters
    assert held["batch"] == 2 * 64 * 30 * 4 // 4
    assert result["hbm_bytes_per_chip"] == sum(held.values())
    assert result["hbm_bytes_per_chip"] + result["headroom_bytes"] == result["hbm_limit_bytes"]
    assert 15 * 2**30 < result["hbm_limit_bytes"] <= 16 * 2**30
    # Gradients travel in bfloat16 at least and float32 at most; the word embedding's, from two places, perhaps twice.
    moved = {kind: item["bytes"] for kind, item in result["collectives"].items()}
    assert 2 * n <= moved.pop("all-reduce") <= 4 * (n + 1024 * 256) + 2**16
    assert sum(moved.values()) <= 64 * 30 * 4 * 4  # tokens of other rows, for pairs and masks, but no activations
    # Nothing runs above the peak.
    assert result["estimated_step_seconds"] > result["flops_per_step_per_chip"] / result["peak_flops_per_chip"]
    assert 0 < result["estimated_mfu"] < 1 and len(result["top_operations"]) == 10 and result["compile_seconds"] > 0


@pytest.mark.slow
@needs_compiler
def test_fsdp_splits_parameters_and_moves_them_instead_of_activations():
    result = planned(on(MeshConfig(data=1, fsdp=4), batch_size=1024), "v5e:2x2")
    n = parameter_count()
    assert 4 * n / 4 <= result["hbm_by_kind"]["parameters"] <= 4 * n / 4 + 4 * 4096  # vectors stay whole
    moved = {kind: item["bytes"] for kind, item in result["collectives"].items()}
    matrices = 2 * (4 * 256 * 256 + 2 * 256 * 512)  # of the layer
    assert sum(size for kind, size in moved.items() if kind != "all-reduce") >= matrices
    # The layer's activations are 1024 x 32 x 256 in bfloat16.
    activations = 1024 * 32 * 256 * 2
    assert sum(moved.values()) < activations


@pytest.mark.slow
@needs_compiler
def test_the_module_is_written_and_several_topologies_are_one_table(capsys, tmp_path, monkeypatch):
    preset = tmp_path / "small.py"
    preset.write_text("from tests.analysis.test_plan import EXPERIMENT as experiment\n")
    monkeypatch.setattr(compilation, "prepare_environment", lambda: None)  # the fixture has done it, and undoes it
    file = tmp_path / "step.hlo"
    assert main(["plan", str(preset), "--topology", "v5e:2x2", "--hlo", str(file)]) == 0
    printed = capsys.readouterr()
    assert "operation" in printed.out
    said = printed.err.splitlines()
    assert [line.split()[0] for line in said] == ["Tracing", "Attention:", "Compiling", "Counting"]
    assert said[0] == "Tracing the step for v5e:2x2, mesh data 4, fsdp 1, tensor 1 …"
    assert parse(file.read_text()).entry and "estimated_cycles" in file.read_text()
    assert main(["plan", str(preset), "--topology", "v5e:1x1,v5e:16x16", "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["topologies"]
    assert one["topology"] == "v5e:1x1" and one["estimated_step_seconds"] > 0 and one["asynchronous_share"] is None
    assert other["fits"] is None and "not divisible" in other["error"]
    assert main(["plan", str(preset), "--topology", "v5e:1x1,v5e:2x2", "--hlo", str(file)]) == 2


@pytest.mark.slow
@needs_compiler
def test_slices_divide_the_batch_and_reduce_gradients_over_their_network():
    result = planned(on(MeshConfig(data=2, fsdp=4)), "2xv5e:2x2")
    n, moved = parameter_count(), result["collectives"]
    assert result["devices"] == 8 and result["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
    # Each chip sends its quarter of the gradients of matrices, in bfloat16 at least.
    between = moved["all-reduce between slices"]
    assert 2 * n / 4 <= between["bytes"] <= 2 * 4 * n
    assert between["seconds"] == pytest.approx(between["bytes"] / 3.125e9)  # half of it twice
    assert result["predicted_step_seconds"] >= result["estimated_step_seconds"] + between["seconds"] / 2
    with pytest.raises(UserError, match=r"mesh\.data 1 is not divisible by the 2 slices"):
        plan(on(MeshConfig(data=1, fsdp=8)), "2xv5e:2x2")


@pytest.mark.slow
@needs_compiler
def test_few_layers_extrapolate_to_the_whole_step():
    model = dataclasses.replace(MODEL, num_layers=6)
    deep = dataclasses.replace(EXPERIMENT, objective=MaskedLM(model=model, input_format="document"))
    deep = open_stand_in(dataclasses.replace(deep, mesh=MeshConfig(data=1, fsdp=4)))
    whole, extrapolated = (planned(deep, "v5e:2x2", extrapolate=flag) for flag in (False, True))
    assert extrapolated["is_extrapolated"] and not whole["is_extrapolated"]
    for kind in ("parameters", "optimizer_state", "batch"):  # exactly linear
        assert extrapolated["hbm_by_kind"][kind] == whole["hbm_by_kind"][kind]
    for name in ("parameters", "flops_per_step"):
        assert extrapolated[name] == whole[name]
    for name in ("hbm_bytes_per_chip", "predicted_step_seconds", "executed_flops_per_chip", "bytes_accessed_per_chip"):
        assert extrapolated[name] == pytest.approx(whole[name], rel=0.03), name
    assert extrapolated["collectives"].keys() == whole["collectives"].keys()
    for kind, item in whole["collectives"].items():
        assert extrapolated["collectives"][kind]["bytes"] == pytest.approx(item["bytes"], rel=0.03), kind


def step(scale: float, collectives: dict[str, Traffic], other: int = 0) -> CompiledStep:
    """Return a compiled step of which every figure is `scale`."""
    operations = {"dot": Operation(scale, int(scale))}
    estimate = Estimate(scale, scale, scale, "cycles", Kernels(scale, 1, 0), operations)
    by_kind = {"parameters": int(scale), "other": other}
    return CompiledStep(by_kind, sum(by_kind.values()), estimate, collectives, 1)


def test_an_extrapolated_step_lies_on_the_line_and_hides_no_more_than_it_moves():
    few = {"all-gather": Traffic(2, 20, 2, 20, 10.0, 2.0)}
    more = {"all-gather": Traffic(4, 40, 4, 40, 12.0, 9.0), "all-reduce": Traffic(1, 8, 0, 0, 0.5, 0.0)}
    with pytest.raises(UserError, match=r"4 layers need less memory than 2, .* what 12 layers need"):
        extrapolate(step(30, few), step(20, more), (2, 4), 12)
    found = extrapolate(step(20, few, other=-3), step(30, more, other=-3), (2, 4), 12)
    assert found.hbm_by_kind == {"parameters": 70, "other": -3} and found.hbm_bytes == 67 and found.compile_seconds == 2
    assert found.estimate == Estimate(70, 70, 70, "cycles", Kernels(70, 1, 0), {"dot": Operation(70, 70)})
    gather, reduce = found.collectives["all-gather"], found.collectives["all-reduce"]
    assert gather[:4] == (12, 120, 12, 120)
    # 2 of 10 seconds overlap, then 9 of 12: 37 do on the line, and no less than none of the others.
    assert gather.asynchronous_seconds == gather.seconds == 37
    assert reduce == Traffic(5, 40, 0, 0, 2.5, 0.0)


def test_what_has_no_layers_to_leave_out_is_not_extrapolated():
    with pytest.raises(UserError, match=r"this Bert has num_layers 1\. Leave it out"):
        with_layers(open_stand_in(EXPERIMENT), 2)
    loop = dataclasses.replace(EXPERIMENT, objective=MaskedLM(model=Bert(loop_layers=True)))
    with pytest.raises(UserError, match=r"this Bert has num_layers 12 in a loop\. Leave it out"):
        with_layers(open_stand_in(loop), 2)
    t5 = dataclasses.replace(EXPERIMENT, objective=SpanCorruption(model=T5(num_layers=12, num_decoder_layers=8)))
    with pytest.raises(UserError, match=r"this T5 has num_layers 12, num_decoder_layers 8"):
        with_layers(open_stand_in(t5), 2)
    half = dataclasses.replace(EXPERIMENT, objective=SpanCorruption(model=T5(num_layers=6, num_decoder_layers=12)))
    model = with_layers(open_stand_in(half), 4).objective.model
    assert (model.num_layers, model.num_decoder_layers) == (2, 4)
    ernie = dataclasses.replace(EXPERIMENT, objective=EntityAutoencoder(model=Ernie(num_layers=12, num_text_layers=5)))
    with pytest.raises(UserError, match=r"needs 2 layers in every stack, which Ernie cannot have; leave it out"):
        with_layers(open_stand_in(ernie), 2)


@pytest.mark.parametrize(("rows", "expected"), [(4, [None, 2, 4]), (18, [None, 2, 6, 18]), (9, [None, 3, 9])])
def test_variants_of_a_reversible_model_end_with_microbatches(rows, expected):
    reformer = dataclasses.replace(EXPERIMENT, objective=CausalLM(model=Reformer()), data=TextData(length=256))
    reformer = with_value(reformer, "train.batch_size", 16 * rows)
    found = searching.variants(open_stand_in(reformer), MeshConfig(), 16)
    assert [flags.get("train.accumulate") for _, flags in found] == expected


def test_variants_end_with_both_microbatches_and_recomputation():
    found = list(searching.variants(open_stand_in(with_value(EXPERIMENT, "train.batch_size", 64)), MeshConfig(), 16))
    parts, remat = ([flags.get(name) for _, flags in found] for name in ("train.accumulate", "objective.model.remat"))
    assert (parts, remat) == ([None, 2, 4, None, 4], [None, None, None, "full", "full"])
    both = found[-1][0]
    assert (both.experiment.train.accumulate, both.objective.model.remat) == (4, "full")


@pytest.mark.slow  # test_report* have its sentences
@needs_compiler
def test_what_does_not_fit_says_by_how_much(capsys, tmp_path, monkeypatch):
    preset = tmp_path / "big.py"
    preset.write_text("from tests.analysis.test_plan import EXPERIMENT as experiment\n")
    monkeypatch.setattr(compilation, "prepare_environment", lambda: None)  # the fixture has done it, and undoes it
    # Weights, not activations, are too large: those the compiler tries for long to compute again.
    flags = ["--topology", "v5e:2x2", "--objective.model.vocab-size", "250000", "--objective.model.hidden-size", "8192",
             "--objective.model.loop-layers", "True"]
    assert main(["plan", str(preset), *flags, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["fits"] is False
    assert out["bytes_over"] == out["hbm_bytes_per_chip"] - out["hbm_limit_bytes"] > 0
    assert out["headroom_bytes"] == 0 and out["collectives"] == {}
    # At least the word embedding is held in float32, with its gradient and its two moments.
    assert out["hbm_bytes_per_chip"] > 4 * 4 * 250_000 * 8192


PLAN = Plan(
    topology="v5e:2x2", devices=4, device_kind="TPU v5 lite", mesh={"data": 4, "fsdp": 1, "tensor": 1}, batch_size=8,
    length=128, steps=1000, vocabulary="vocabulary of 512: the tokenizer's", parameters=1000, flops_per_step=4e12,
    peak_flops_per_chip=1e14, bandwidth_per_chip=1e12, hbm_limit_bytes=2**34, price=2.0, step=CompiledStep(
        {"optimizer_state": 4000}, 2**33, Estimate(
            0.025, 1.25e12, 2.0**30, "the TPU compiler's cycles", Kernels(0.005, 2, 1),
            {"jit(step)/dot_general": Operation(0.0125, 24)},
        ), {"all-reduce": Traffic(3, 4096, 2, 2048, 0.015, 0.0)}, 1.5,
    ),
)


def changed(**parts) -> Plan:
    """Return the plan with other parts of its step."""
    return dataclasses.replace(PLAN, step=PLAN.step._replace(**parts))


def test_reports_say_whether_it_fits_what_is_left_and_what_is_over():
    text = describe(PLAN)
    assert "vocabulary of 512: the tokenizer's" in text and "3.91 KiB  optimizer state" in text
    assert "It fits" in text and "8.00 GiB left" in text and "all-reduce" in text and "4.00 KiB" in text
    assert "25.00 ms a step, MFU 40.0%" in text and "(50.0% by the 1.25 TFLOPs" in text and "10.00 ms" in text
    assert "kernels take 5.00 ms of it: 2 counted by the compiler's schedule, 1 charged by their FLOPs at 50%" in text
    assert "50.0%     24  jit(step)/dot_general" in text and "50% of these bytes overlap" in text
    assert "4 TFLOPs a step by formula, 1 TFLOPs a chip" in text
    row = table_row(PLAN, "4 x 1 x 1")
    assert "40.00" in row and "25.0%" in row and "25.6 k" in row and row.endswith("compute")
    assert "Predicted: 40.00 ms a step, MFU 25.0%, bound by compute; collectives make 15.00 ms of it." in text
    assert "2.21 Gtokens a day; 1,000 steps take 0.7 minutes, 0.04 chip-hours, 0 USD." in text
    assert "     15.00  " in text
    assert "No estimate" not in text and "not known" not in text and "Measured" not in text
    free = {kind: item._replace(seconds=0.0) for kind, item in PLAN.step.collectives.items()}
    assert "of TPU v5 lite for all-reduce is not known" in describe(changed(collectives=free))
    assert "the clock of TPU v5 lite is not known" in describe(changed(estimate=None))
    uncounted = dataclasses.replace(PLAN, flops_per_step=0.0)
    assert "No formula counts its FLOPs" in describe(uncounted) and "MFU -, bound by" in describe(uncounted)
    assert uncounted.to_json()["predicted_mfu"] is None
    over = changed(hbm_bytes=2**34 + 12345, estimate=None, collectives={}, message="too much")
    assert "does not fit" in describe(over) and "12,345 bytes" in describe(over) and "too much" in describe(over)
    assert "NO" in table_row(over, "v5e:2x2")
    here = describe(dataclasses.replace(PLAN, topology=None, measured_step_seconds=0.05))
    assert here.startswith("Here: 4 x") and "Measured: 50.00 ms, MFU 20.0%; the prediction is 20% too short" in here


def test_json_has_the_documented_figures():
    found = PLAN.to_json()
    assert json.loads(json.dumps(found)) == found
    assert found["fits"] and found["hbm_bytes_per_chip"] == 2**33 and found["hbm_limit_bytes"] == 2**34
    assert found["estimated_step_seconds"] == 0.025 and found["estimated_mfu"] == pytest.approx(0.4)
    assert found["predicted_step_seconds"] == pytest.approx(0.04) and found["asynchronous_share"] == 0.5
    assert found["collectives"]["all-reduce"]["asynchronous_count"] == 2
    assert found["tokens_per_day"] == pytest.approx(86400 * 8 * 128 / 0.04)
    assert found["cost"] == pytest.approx(2 * found["chip_hours"]) == pytest.approx(2 * 4 * 1000 * 0.04 / 3600)
    assert found["top_operations"] == [dict(name="jit(step)/dot_general", seconds=0.0125, share=0.5, executions=24)]
    unknown = changed(estimate=None).to_json()
    assert unknown.keys() == found.keys() and unknown["estimated_mfu"] is unknown["days"] is unknown["cost"] is None


@needs_compiler
def test_a_topology_that_fails_is_a_row_of_the_table(capsys, tmp_path, monkeypatch):
    preset = tmp_path / "small.py"
    preset.write_text("from tests.analysis.test_plan import EXPERIMENT as experiment\n")
    monkeypatch.setattr(compilation, "prepare_environment", lambda: None)  # the fixture has done it, and undoes it

    def refuse():
        raise jax.errors.JaxRuntimeError(VMEM_OF_A_FUSION)

    monkeypatch.setattr(Program, "lower", lambda *_: SimpleNamespace(compile=lambda **_: refuse()))
    assert main(["plan", str(preset), "--topology", "v9:2x2,v4:2x2x1,v4:2x2x2"]) == 0
    unknown, *others = capsys.readouterr().out.splitlines()[3:6]
    assert unknown.split()[:2] == ["v9:2x2", "-"] and "no TPU topology" in unknown
    assert len(others) == 2 and all("VMEM is on-chip memory" in line for line in others)
    assert main(["plan", str(preset), "--topology", "v4:2x2x1"]) == 2
    assert "refuses this step for v4:2x2x1" in capsys.readouterr().err


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "v7x:2x2x1"])
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=1, fsdp=-1)])
def test_every_generation_compiles_a_step_with_its_kernels(topology, mesh):
    model = dataclasses.replace(MODEL, max_positions=128, num_layers=2)  # the last one needs no fused attention
    experiment = dataclasses.replace(
        EXPERIMENT, mesh=mesh, data=TextData(length=128),
        objective=dataclasses.replace(EXPERIMENT.objective, model=model),
    )
    result = planned(open_stand_in(experiment), topology)
    assert result["fits"] and (result["estimated_step_seconds"] is None) == topology.startswith("v7x")
    kernels = {"v2": 0, "v3": 0, "v7": None}.get(topology[:2], 2)  # forward and backward, which are not recorded
    assert (result["counted_kernels"], result["charged_kernels"]) == (None if kernels is None else 0, kernels)


@needs_compiler
def test_hbm_limits_differ_by_generation():
    limits = {name: compilation.hbm_limit(compilation.topology_devices(name)[0]) for name in ("v5e:2x2", "v5p:2x2x1")}
    assert limits["v5e:2x2"] < 16 * 2**30 < 90 * 2**30 < limits["v5p:2x2x1"] < 96 * 2**30


@needs_compiler
@pytest.mark.parametrize(("name", "devices"), [("v4:2x2x2", 8), ("v5e:16x16", 256), ("v6e:1x1", 1), ("V5P:2x2x1", 4)])
def test_topologies_have_one_device_a_chip(name, devices):
    assert len(compilation.topology_devices(name)) == devices


@needs_compiler
@pytest.mark.parametrize(("name", "topology"), [
    ("v5e-16", "v5e:4x4"), ("v5litepod-8", "v5e:2x4"), ("v5litepod:2x2", "v5e:2x2"), ("v6e-1", "v6e:1x1"),
    ("v2-8", "v2:2x2"), ("v3-32", "v3:4x4"), ("v4-8", "v4:2x2x1"), ("v4-32", "v4:2x2x4"), ("V5p-128", "v5p:4x4x4"),
    ("2xv5e-4", "2xv5e:2x2"),
])
def test_accelerator_types_of_google_cloud_name_topologies(name, topology):
    """v2 to v4 and v5p count TensorCores, two a chip; v5e and v6e count chips."""
    found, expected = (
        [(device.device_kind, str(device)) for device in compilation.topology_devices(wanted)]
        for wanted in (name, topology)
    )
    assert found == expected


@needs_compiler
@pytest.mark.parametrize(
    "name", ["v5e", "v5e:3x3", "v99:2x2", "16", "v5e:16x16x", "v100:8", "v99-16", "v5e-12", "v4-9", "v5p-12288"]
)
def test_a_topology_that_does_not_exist_is_the_users_mistake(name):
    with pytest.raises(UserError) as caught:
        plan(open_stand_in(EXPERIMENT), name)
    assert name in str(caught.value) and "v5e:16x16" in str(caught.value)


@needs_compiler
def test_a_mesh_or_a_batch_that_does_not_suit_the_devices_is_the_users_mistake():
    with pytest.raises(UserError, match="does not fit 4 devices"):
        plan(on(MeshConfig(data=3)), "v5e:2x2")
    with pytest.raises(UserError, match="not divisible by data x fsdp = 4"):
        plan(on(MeshConfig(), batch_size=6), "v5e:2x2")


def test_without_the_compiler_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "configs/bert_tiny.py", "--topology", "v5e:2x2"]) == 2
    assert "`pip install -e '.[tpu]'`" in capsys.readouterr().err


def test_a_plan_opens_no_accelerator():
    code = (
        "import os, jax; from jax._src import xla_bridge; from jaxlm.config.presets import load_preset; "
        "load_preset('configs/t5_tiny.py'); assert not xla_bridge.backends_are_initialized(); "
        "from jaxlm.analysis.compilation import prepare_environment; "
        "prepare_environment(); print(jax.config.jax_platforms, os.environ['JAX_PLATFORMS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["cpu", "cpu"], done.stderr


def test_the_vocabulary_is_that_of_the_objectives_model():
    for objective, size in ((EXPERIMENT.objective, 1024), (ReplacedTokens(model=Electra(vocab_size=777)), 777)):
        session = open_stand_in(Experiment(objective=objective, data=TextData(length=32)))
        assert session.objective.vocabulary.size == size


VMEM_OF_A_FUSION = (  # libtpu 0.0.42.1, v4, of an all-reduce fused with the optimizer
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 16.18M of "
    "16.00M vmem. Exceeded vmem capacity by 181.0K.\n\nProgram vmem requirement 16.18M:\n    scoped           16.18M\n"
    "\n  Largest program allocations in vmem:\n\n  1. Size: 16.00M\n     Shape: f32[4194304]{0}"
)
VMEM_OF_A_KERNEL = (  # libtpu 0.0.50.1, v4, with a limit of 1 MiB
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %biased_attention_backward.1 = (bf16[2,512,256]{2,1,0:T(8,128)(2,1)S(3)}, f32[2,512,512]"
    '{2,1,0:T(8,128)S(3)}) custom-call(%reshape.4, %reshape.5), custom_call_target="tpu_custom_call", '
    'metadata={op_name="jit(loss)/pallas_call" stack_frame_id=12}. Scoped allocation with size 5.75M and limit 1.00M '
    "exceeded scoped vmem limit by 4.75M. It should not be possible to run out of scoped vmem - \nSee "
    "https://openxla.org/xla/errors/error_1001 for more details."
)
SMEM = (  # libtpu 0.0.50.1, v4
    "RESOURCE_EXHAUSTED: Allocation (size=4194304) would exceed memory (size=1048576) :: #allocation3 [shape = "
    "'f32[1048576]{0:T(128)}', space=smem, size = 0x400000, scoped, tag = 'scratch operand'] :: _lambda_.1"
)
CONTINUATION_FUSION = (  # libtpu 0.0.50.1, v4
    "FAILED_PRECONDITION: Continuation fusion for AllReduce is enabled on platform pufferfish (variant: ), but it is "
    "not supported/recommended on platforms other than TPU v5e, and this might lead to many errors."
)


@pytest.mark.parametrize(("message", "sentence"), [
    (VMEM_OF_A_FUSION, "v4:2x2x1: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 16.18M "
     "of 16.00M vmem. Exceeded vmem capacity by 181.0K. VMEM is on-chip memory"),
    (VMEM_OF_A_KERNEL, "stack for %biased_attention_backward.1: Scoped allocation with size 5.75M and limit 1.00M "
     "exceeded scoped vmem limit by 4.75M. It should"),
    (VMEM_OF_A_KERNEL, "VMEM is on-chip memory for one operation at a time; this says nothing about HBM."),
    (SMEM, "SMEM is on-chip memory"), (CONTINUATION_FUSION, "v4:2x2x1: Continuation fusion for AllReduce is enabled"),
])
def test_a_refusal_is_told_apart_from_a_step_too_large_for_hbm(message, sentence):
    assert compilation._used_bytes(message) is None
    assert sentence in compilation.refusal("v4:2x2x1", message)
    is_about_kernels = "--objective.model.attention xla" in compilation.refusal("v4:2x2x1", message)
    assert is_about_kernels == ("mem" in sentence.lower())


@pytest.mark.parametrize(
    ("message", "used"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (2.50T) exceeds "
         "available HBM (15.75G).", int(2.5 * 2**40)),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
         "temporaries (8.00T) exceeds available HBM (30.75G). HLO module: jit_step.\nSee https://openxla.org", 2**43),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of "
         "15.75G hbm. Exceeded hbm capacity by 4.75G.", int(20.5 * 2**30)),
        ("INTERNAL: Used 2.00G of 1.00G", None),
        ("RESOURCE_EXHAUSTED: too many open files", None),
    ],
)
def test_the_compilers_messages_are_understood(message, used):
    assert compilation._used_bytes(message) == used


@pytest.mark.slow
def test_presets_for_the_published_sizes_have_their_parameter_counts():
    from jaxlm.config.presets import load_preset

    for name, count in (("mini", 11_267_900), ("small", 29_058_876), ("medium", 41_668_412), ("base", 110_106_428),
                        ("large", 336_226_108)):
        experiment = load_preset(f"configs/bert_{name}.py")
        experiment.validate()
        shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == count
