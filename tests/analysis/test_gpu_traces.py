"""Every tiny preset is traced as on an H100, on any machine: jax's checks and batching rules of cuDNN's attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxlm.analysis.step import batch_shapes, open_stand_in
from jaxlm.config.presets import load_preset
from jaxlm.models.base import Writer
from jaxlm.models.layers import kernel_choice
from jaxlm.parallel.mesh import make_mesh

PRESETS = sorted({path.stem for path in Path(__file__).parents[2].glob("configs/*_tiny.py")}
                 - {"distilbert_tiny", "tinybert_tiny"})  # they need a teacher


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(kernel_choice, "target_platform", lambda: "gpu")
    monkeypatch.setattr(kernel_choice, "target_kind", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False, raising=False)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "gpt2_tiny" else pytest.mark.slow)
    for name in PRESETS
])
def test_every_tiny_preset(name):
    """Initialization, train step, evaluation and generation in bfloat16, without dropout of probabilities.

    In float32 nothing is fused, which the tests of CPUs trace.
    """
    experiment = load_preset(name)
    objective = experiment.objective
    fields = {item.name for item in dataclasses.fields(objective.model)}
    changes = dict(dtype="bfloat16", attention_dropout=0.0, num_layers=2)
    if name.startswith(("modernbert", "mmbert", "gpt3", "albert", "ernie", "reformer")):  # layers of several kinds
        del changes["num_layers"]
    model = dataclasses.replace(objective.model, **{key: value for key, value in changes.items() if key in fields})
    experiment = dataclasses.replace(
        experiment, objective=dataclasses.replace(objective, model=model),
        train=dataclasses.replace(experiment.train, phases="", steps=10, accumulate=1),
    )
    session = open_stand_in(experiment, report=lambda text: None)
    program = session.program(make_mesh(experiment.mesh, jax.devices()[:1]))
    batch = batch_shapes(session)
    with kernel_choice.recorded_choices() as kernels:
        program.train_step.trace(program.shapes, batch, program.constants)
        program.eval_step.trace(program.shapes.params, batch, jnp.int32(0), program.constants, program.shapes.memory)
    if "attention" in fields and not name.startswith(("xlnet", "reformer", "deberta", "kagnet")):
        assert "by cudnn" in kernels()
    if isinstance(model, Writer):
        prompts = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2, 4), bool)
        jax.eval_shape(lambda params, *rest: model.prefill(params, *rest, 3)[0], program.shapes.params, *prompts)


@pytest.mark.slow
def test_packed_rows():
    """Masked LM over isolated documents, which GPT's presets have by default."""
    experiment = load_preset("bert_tiny")
    objective = experiment.objective
    model = dataclasses.replace(objective.model, dtype="bfloat16", attention_dropout=0.0, num_layers=2)
    objective = dataclasses.replace(objective, model=model, input_format="packed")
    session = open_stand_in(dataclasses.replace(experiment, objective=objective), report=lambda text: None)
    program = session.program(make_mesh(experiment.mesh, jax.devices()[:1]))
    with kernel_choice.recorded_choices() as kernels:
        program.train_step.trace(program.shapes, batch_shapes(session), program.constants)
    assert "by cudnn" in kernels()
