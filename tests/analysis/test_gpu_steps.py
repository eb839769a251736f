"""Train steps of the presets compiled for GPUs: each compiles, with the attention kernels that it should have.

With the extra [gpu] and no GPU: JAX_PLATFORMS=cpu python -m pytest -m slow tests/analysis/test_gpu_steps.py. Scores in
memory are no kernel.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.analysis import compilation
from jaxlm.analysis.extrapolate import with_layers
from jaxlm.analysis.plan import Plan, plan
from jaxlm.analysis.step import open_stand_in
from jaxlm.cli import main
from jaxlm.config.presets import load_preset, preset_files
from jaxlm.objectives.base import Constants, Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra [gpu]"),
]

PLAIN, BIASED = "Softmax", "ScaleBiasSoftmax"
# Kernels of all layers backward; T5 has biases but in cross attention, and packed rows are a bias.
TINY = {
    name: kernels for names, kernels in (
        ("albert bert contrastive distilbert roberta simcse spanbert tinybert xlm_roberta", {PLAIN: 2}),
        ("clm_then_mlm eurobert", {PLAIN: 4}),
        ("gpt1 gpt2 gpt3 llama masked_diffusion mmbert modernbert", {BIASED: 4}),
        ("electra", {PLAIN: 6}), ("ernie", {PLAIN: 3}), ("t5", {BIASED: 2}), ("ul2", {BIASED: 4, PLAIN: 2}),
        ("deberta_v3 elmo reformer transe word2vec xlnet", {}),
    ) for name in names.split()
}
# Of two layers; ModernBERT, whose layers differ, of four.
BASE = {
    "bert_base": {PLAIN: 2}, "roberta_base": {PLAIN: 2}, "electra_base": {PLAIN: 4}, "gpt2": {BIASED: 2},
    "t5_1_1_base": {BIASED: 4, PLAIN: 2}, "xlnet_base": {}, "modernbert_base": {BIASED: 4},
}


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Do as `prepare_environment`, and undo it."""
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compilation, "prepare_environment", lambda: None)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def planned(preset: str, topology: str, layers: int | None = None, **changes: Any) -> Plan:
    """Return the plan of a preset whose model has these fields, as far as it has them."""
    experiment = load_preset(preset)
    objective = experiment.objective
    changes = {name: value for name, value in changes.items() if hasattr(objective.model, name)}
    objective = dataclasses.replace(objective, model=dataclasses.replace(objective.model, **changes))
    if hasattr(objective, "teacher"):
        objective = dataclasses.replace(objective, teacher="a run of bert_mini")
    train = dataclasses.replace(experiment.train, batch_size=min(experiment.train.batch_size, 8))
    experiment = dataclasses.replace(experiment, objective=objective, train=train)
    session = open_stand_in(experiment, constants_of=constants)
    return plan(session if layers is None else with_layers(session, layers), topology)


def constants(objective: Objective, vocabulary: Vocabulary) -> Constants:
    """Return the shapes of an objective's constants: those of a teacher are a BERT-Mini's."""
    def teacher(_: str) -> PretrainedModel:
        own = load_preset("bert_mini").objective.bind(vocabulary, 128)
        return PretrainedModel(own, jax.eval_shape(own.init, jax.random.key(0)))

    return objective.constant_shapes(vocabulary, teacher)


def attention(found: Plan) -> dict[str, int]:
    """Return how often a step calls each kernel of cuDNN's attention backward; forward as often, and in a teacher."""
    calls = {name.removeprefix("__cudnn$fmha"): n for name, n in found.step.kernels.items() if "fmha" in name}
    backward = {name.removesuffix("Backward"): n for name, n in calls.items() if name.endswith("Backward")}
    forward = {name: n for name, n in calls.items() if not name.endswith("Backward")}
    assert forward.keys() == backward.keys() and all(forward[name] >= n for name, n in backward.items())
    return backward


@pytest.mark.parametrize("name", sorted(name for name in preset_files() if name.endswith("_tiny")))
def test_a_tiny_step_compiles(name):
    found = planned(name, "h100", dtype="bfloat16", attention_dropout=0.0)
    assert attention(found) == TINY[name.removesuffix("_tiny")]
    assert found.fits and 0 < found.mfu(found.seconds) < 1 and found.to_json()["estimated_step_seconds"] is None


@pytest.mark.parametrize("topology", ["a100", "h100"])
@pytest.mark.parametrize("name", BASE)
def test_a_base_step_of_few_layers_has_the_expected_kernels(name, topology):
    depth = load_preset(name).objective.model.plan_depths[0]
    found = planned(name, topology, depth, dtype="bfloat16", attention_dropout=0.0)
    assert attention(found) == BASE[name] and found.fits


def test_a_bias_is_split_as_the_queries_are():
    """Left to itself the compiler gives each GPU the biases of some heads, as their table is split."""
    found = planned("t5_3b", "h100:8", 2, dtype="bfloat16", attention_dropout=0.0, loop_layers=False)
    assert found.mesh["fsdp"] == 8 and attention(found) == BASE["t5_1_1_base"]


@pytest.mark.parametrize(("name", "changes"), [
    ("bert_base", {"dtype": "bfloat16", "attention_dropout": 0.1}), ("gpt2", {"dtype": "float32"}),
    ("t5_1_1_base", {"dtype": "bfloat16", "attention": "xla"}),
])
def test_scores_stay_in_memory_with_dropout_in_float32_or_if_asked(name, changes):
    assert attention(planned(name, "h100", 2, **{"attention_dropout": 0.0} | changes)) == {}


def test_a_search_takes_more_microbatches_where_a_step_does_not_fit(capsys, tmp_path, monkeypatch):
    preset = tmp_path / "small.py"
    preset.write_text("from tests.analysis.test_plan import EXPERIMENT as experiment\n")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.003")
    assert main(["plan", str(preset), "--topology", "h100:8", "--search", "--train.batch-size", "16384", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tried = [(one["mesh"]["fsdp"], one["changes"].get("train.accumulate", 1), one["fits"]) for one in found["plans"]]
    assert tried == [(fsdp, parts, parts == 2) for fsdp in (1, 4, 8) for parts in (1, 2)]
    whole, parts = found["plans"][:2]
    assert parts["hbm_bytes_per_chip"] < 0.75 * whole["hbm_bytes_per_chip"]
    assert found["fastest"] == min((one for one in found["plans"] if one["fits"]),
                                   key=lambda one: one["predicted_step_seconds"])
