"""Benchmarks: what is reported adds up, and the peer learns from the same batch by its own loss."""

import dataclasses
import importlib.util
import json
import types

import jax
import numpy as np
import pytest

from jaxlm.analysis.bench import bench_pretraining
from jaxlm.analysis.recipes import recipe_of
from jaxlm.analysis.step import open_stand_in
from jaxlm.analysis.timing import readable
from jaxlm.cli import main
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.config.presets import load_preset
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.peaks import measured_flops
from jaxlm.runs.folder import write_imported_run
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.optimizers import make_optimizer
from jaxlm.training.program import corruption_key

SIZES = dict(vocab_size=200, hidden_size=16, num_layers=1, num_heads=2)
OBJECTIVES = {
    "bert": MaskedLM(model=Bert(**SIZES, intermediate_size=32)),
    "bert_mlm": MaskedLM(model=Bert(**SIZES, intermediate_size=32), input_format="document"),
    "albert": MaskedLM(
        model=Albert(**SIZES, intermediate_size=32, embedding_size=8), input_format="sentence-order"
    ),
    "electra": ReplacedTokens(model=Electra(
        **SIZES, intermediate_size=32, embedding_size=16, generator_hidden_size=8, generator_num_layers=1,
        generator_num_heads=1, generator_intermediate_size=16,
    )),
    "gpt2": CausalLM(model=Gpt2(**SIZES, intermediate_size=32)),
    "t5": SpanCorruption(model=T5(**SIZES, head_dim=8, intermediate_size=32)),
    "t5_1_1": SpanCorruption(model=T5(
        **SIZES, head_dim=8, intermediate_size=32, activation="gated-gelu", tied_head=False, scaled_head=False
    )),
}
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def experiment_of(name: str) -> Experiment:
    return Experiment(
        objective=OBJECTIVES[name], data=TextData(length=64), train=TrainConfig(batch_size=4, steps=10),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    )


experiment = experiment_of("bert")


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text("from tests.analysis.test_bench import experiment\n")
    return str(path)


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        rates = iter([1e9, 3e9, 2e9, 1e9, 1e9])  # in a busy round the machine reaches less
        patch.setattr("jaxlm.analysis.bench.measured_flops", lambda device, dtype: next(rates))
        return bench_pretraining(open_stand_in(experiment), steps=2, report=lambda _: None)


@pytest.mark.slow
def test_figures_add_up(result):
    out = result
    assert out["peer_tokens_per_second"] is None and out["ratio"] is None
    assert out["optimizer"] == "adamw" and out["peer_optimizer"] is None
    assert out["steps_per_round"] == 2 and len(out["step_seconds_by_round"]) == out["rounds"]
    assert out["tokens_per_second"] == pytest.approx(4 * 64 / np.median(out["step_seconds_by_round"]))
    assert out["flops_per_step"] == 3 * 4 * OBJECTIVES["bert"].flops(64)
    peak = out["peak_flops_per_device"] * out["devices"]
    assert peak == pytest.approx(3e9)
    assert out["mfu"] == pytest.approx(out["flops_per_step"] / out["step_seconds"] / peak)
    assert out["peak_is_measured"] and out["corruption_seconds"] > 0


@pytest.mark.slow
def test_the_report_for_people_states_formula_and_peak(result):
    lines = dict(line.split(maxsplit=1) for line in readable(result).splitlines())
    assert lines["mfu_formula"].startswith("3 x forward FLOPs") and lines["peak_flops_per_device"] == "3e+09"
    assert lines["tokens_per_second"] == f"{result['tokens_per_second']:,.4g}"
    assert lines["vocabulary"] == "vocabulary of 200: the preset's own" and lines["parameters"] == "14,490"
    assert "peer_mfu" not in lines and "seconds" not in lines


@needs_torch
def test_json_is_one_object_and_the_peer_is_timed_beside_ours_even_where_its_compiler_fails(
    preset, capsys, monkeypatch
):
    import torch

    def broken(model):
        def call(**_):
            raise RuntimeError("no C++ compiler here")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr("jaxlm.analysis.bench.measured_flops", lambda device, dtype: 1e9)
    flags = ["--steps", "1", "--peer", "huggingface", "--json", "--optimizer.name", "lamb"]
    assert main(["bench", preset, *flags]) == 0
    captured = capsys.readouterr()
    out = json.loads(captured.out)
    assert "no C++ compiler here" in captured.err and "eager" in out["peer_note"]
    assert out["peer"] == "BertForPreTraining"
    assert "no lamb" in captured.err and (out["optimizer"], out["peer_optimizer"]) == ("adamw", "fused AdamW")
    theirs = np.array(out["peer_step_seconds_by_round"])
    assert out["peer_tokens_per_second"] == pytest.approx(4 * 64 / np.median(theirs))
    assert out["ratio"] == pytest.approx(np.median(theirs / np.array(out["step_seconds_by_round"])))


@needs_torch
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in OBJECTIVES
])
def test_every_peer_has_our_size_starts_at_our_loss_and_learns(name, monkeypatch):
    import torch

    from jaxlm.analysis.peer import TrainStep

    monkeypatch.setattr(torch, "compile", lambda model: model)
    experiment = experiment_of(name)
    session = open_stand_in(experiment)
    objective, batch = session.objective, session.synthetic_batch()
    example = jax.jit(objective.corrupt)(corruption_key(0, 0), batch)
    peer = TrainStep(experiment, objective, batch, report=lambda _: None)

    def loss() -> float:
        with torch.no_grad():
            return float(peer.recipe.loss(objective, peer.models, peer.inputs))

    params = jax.jit(objective.init)(jax.random.key(0))
    ours = float(jax.jit(lambda p, e: total_loss(objective.loss(p, e, jax.random.key(1), False)))(params, example))
    assert sum(p.numel() for p in peer.parameters) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert loss() == pytest.approx(ours, rel=0.15)  # both know nothing yet
    before = np.mean([loss() for _ in range(3)])
    peer.run(10)
    assert np.mean([loss() for _ in range(3)]) < before - 0.1


@needs_torch
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_peers_optimizer_is_ours(name):
    """Three updates of a matrix and of a vector: the same numbers."""
    import torch

    from jaxlm.analysis import peer as bench_peer

    config = OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=0.0)
    draw = np.random.default_rng(0)
    sizes = {"kernel": (130, 140), "bias": (140,)}  # Adafactor factors what is at least 128 wide
    params = {"wi": {leaf: (0.1 * draw.standard_normal(size)).astype(np.float32) for leaf, size in sizes.items()}}
    tensors = {leaf: torch.nn.Parameter(torch.tensor(value)) for leaf, value in params["wi"].items()}
    theirs, _ = bench_peer.make_optimizer(config, list(tensors.values()))
    ours = make_optimizer(config, 10)
    state, update = ours.init(params), jax.jit(ours.update)
    for _ in range(3):
        gradients = {leaf: draw.standard_normal(size).astype(np.float32) for leaf, size in sizes.items()}
        updates, state = update({"wi": gradients}, state, params)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
        for leaf, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients[leaf])
        theirs.step()
    for leaf, tensor in tensors.items():
        np.testing.assert_allclose(tensor.detach().numpy(), params["wi"][leaf], atol=2e-6)


@pytest.mark.slow
@needs_torch
def test_the_note_names_both_optimizers_and_the_pieces_of_the_batch(monkeypatch):
    import torch

    from jaxlm.analysis.peer import TrainStep

    monkeypatch.setattr(torch, "compile", lambda model: model)
    plain = experiment_of("t5")
    experiment = dataclasses.replace(
        plain, optimizer=OptimizerConfig(name="adafactor"), train=TrainConfig(batch_size=4, accumulate=2)
    )
    session = open_stand_in(experiment)
    objective, batch = session.objective, session.synthetic_batch()
    note = TrainStep(experiment, objective, batch, report=lambda _: None).describe()["note"]
    assert "Transformers' Adafactor (jaxlm: adafactor)" in note and "in one piece where jaxlm takes 2" in note
    note = TrainStep(plain, objective, batch, report=lambda _: None).describe()["note"]
    assert "fused AdamW (jaxlm: adamw)" in note and "piece" not in note


@pytest.mark.slow
def test_a_run_folder_is_measured_with_the_runs_own_vocabulary(preset, result, tmp_path, capsys):
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(395))]) + "\n")
    tokenizer = Tokenizer.load(words)
    params = {"none": jax.numpy.zeros(1)}
    write_imported_run(tmp_path / "run", experiment, params, tokenizer, {"imported_from": "nowhere"})
    assert main(["bench", str(tmp_path / "run"), "--steps", "1", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["vocabulary"] == "vocabulary of 400: the tokenizer's"
    # 200 more rows of the embedding (16 wide) and of the output's bias.
    assert out["parameters"] == result["parameters"] + 200 * 17
    # An import keeps its spare rows when it is trained, so they are measured too.
    vocabulary = open_stand_in(experiment, str(tmp_path / "run")).objective.vocabulary
    assert vocabulary.rows(600) == 600 and tokenizer.vocabulary.rows(600) == 400


def test_named_data_are_measured_with_the_vocabulary_of_pretraining(preset, tmp_path):
    """Its size is the one that the text allows; other flags leave a preset's published size."""
    (tmp_path / "x.txt").write_text("\n\n".join(f"C(=O)N{i}c1ccccc1" for i in range(200)))
    own = load_preset(preset)
    data = dataclasses.replace(own.data, source=str(tmp_path / "x.txt"), cache_dir=str(tmp_path / "cache"))
    named, lines = dataclasses.replace(own, data=data), []
    session = open_stand_in(named, preset, report=lines.append)
    assert session.tokenizer == data.prepare_tokenizer(lines.append) and 458 < len(session.tokenizer) < data.vocab_size
    longer = dataclasses.replace(own, data=dataclasses.replace(own.data, length=32), train=TrainConfig(batch_size=2))
    assert open_stand_in(longer, preset, report=pytest.fail).tokenizer is None


def test_a_synthetic_batch_is_full_rows_of_text():
    batch = open_stand_in(experiment).synthetic_batch()
    assert batch.tokens.shape == batch.segment_ids.shape == (4, 61)
    assert batch.tokens.min() >= 107 and batch.tokens.max() < 200
    assert (batch.segment_ids == np.arange(1, 5)[:, None]).all()  # a document a row


def test_missing_torch_and_bad_steps_are_the_users_mistakes(preset, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    assert main(["bench", preset, "--peer", "huggingface"]) == 2
    assert "needs torch" in capsys.readouterr().err
    assert main(["bench", preset, "--steps", "0"]) == 2


def test_an_objective_without_a_counterpart_is_refused():
    with pytest.raises(UserError, match="no counterpart"):
        recipe_of(types.SimpleNamespace(model=None))


def test_a_measured_peak_is_that_of_a_matrix_product():
    assert measured_flops(jax.devices()[0], "float32", size=64, tries=2) > 1e6
