"""DistilBERT against DistilBertForMaskedLM: logits, loss and gradients, both directions; its presets."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxlm.cli import main
from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.config.presets import load_preset
from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_of
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.layers.stack import unstack
from jaxlm.objectives.base import class_of, total_loss
from jaxlm.objectives.distillation import Distillation
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs.load import load_model
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.huggingface.support import VOCAB, TorchAdamW, batch, load_into, read_json, real, save_torch, torch_outputs
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
SIZES = {
    "gelu": dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=40),
    "relu": dict(dim=24, n_layers=3, n_heads=3, hidden_dim=40, max_position_embeddings=35, activation="relu"),
}
LENGTHS = [(33, False), (33, True)]  # each length compiles anew


def torch_distilbert(name: str) -> torch.nn.Module:
    """Return a model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(**SIZES[name], vocab_size=len(VOCAB))
    model = transformers.DistilBertForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, ids, mask):
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, mask=mask)))


def inputs_of(model, length: int, padded: bool) -> dict[str, np.ndarray]:
    made = batch(dataclasses.replace(model, type_vocab_size=1), length, padded, seed=length)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def difference(objective: MaskedLM, params, theirs: torch.nn.Module, length: int, padded: bool) -> float:
    inputs = inputs_of(objective.model, length, padded)
    expected = real(torch_outputs(theirs, inputs).logits.numpy(), inputs)
    assert np.abs(expected).max() > 0.1  # agreement on zeros would prove nothing
    return float(np.abs(real(logits(objective.model, params, *inputs.values()), inputs) - expected).max())


@pytest.mark.parametrize("name", first_fast(SIZES))
def test_imported_logits(name, tmp_path, vocab_file):
    theirs = torch_distilbert(name)
    imported = import_folder(save_torch(theirs, tmp_path / "hf", vocab_file))
    assert not imported.fresh
    assert class_of(imported.objective) is MaskedLM and type(imported.objective.model) is Distilbert
    for length, padded in LENGTHS:
        assert difference(imported.objective, imported.params, theirs, length, padded) < TOLERANCE
    # Exported again, every tensor is unchanged.
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", out))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_dropout_is_after_the_feed_forward_only(monkeypatch):
    """The output of attention enters the residual stream whole, unlike BERT's."""
    theirs, shapes, rates = torch_distilbert("gelu").train(), [], []
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, given, made: shapes.append(made.shape))
    ids = np.ones((1, 7), np.int32)
    theirs(torch.from_numpy(ids).long())
    monkeypatch.setattr("jaxlm.models.layers.stack.dropout", lambda x, rate, key: rates.append(rate) or x)
    for family, count in ((Distilbert, 1), (Bert, 2)):
        model = family(vocab_size=len(VOCAB), hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64)
        params = jax.eval_shape(model.init, jax.random.key(0))
        rates.clear()  # of the trace that made them
        run = functools.partial(model.hidden_states, inputs=Inputs(jnp.asarray(ids)))
        jax.eval_shape(lambda params, key, run=run: run(params, key=key), params, jax.random.key(0))
        assert len([rate for rate in rates if rate]) == count * model.num_layers
        if family is Distilbert:
            assert count * model.num_layers == len(shapes) - 1  # and that of the embeddings


def test_a_distilled_student_is_exported(tmp_path, tokenizer):
    model = Distilbert(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=33)
    objective = Distillation(model=model, teacher="gone").bind(tokenizer.vocabulary, 33)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard(), max_length=33)
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs) is transformers.DistilBertForMaskedLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for length, padded in LENGTHS:
        assert difference(objective, params, theirs.eval(), length, padded) < TOLERANCE
    imported = import_folder(out)
    assert imported.objective.model == objective.model
    jax.tree.map(np.testing.assert_array_equal, imported.params, params)
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert "token_type_ids" not in words("the cat", "it sat")
    assert words("the cat", "it sat")["input_ids"] == [
        2, *tokenizer.encode("the cat"), 3, *tokenizer.encode("it sat"), 3
    ]
    answers = fill_mask(PretrainedModel(objective, params, tokenizer), ["the [MASK] sat"], 3)[0][0]
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)("the [MASK] sat")
    np.testing.assert_allclose([p for _, p in answers], [entry["score"] for entry in library], atol=1e-5)


@pytest.mark.slow
def test_loss_and_gradients(tmp_path, vocab_file):
    theirs = torch_distilbert("gelu")
    imported = import_folder(save_torch(theirs, tmp_path / "hf", vocab_file))
    objective, inputs = imported.objective, inputs_of(imported.objective.model, 20, True)
    positions, weights = np.array([[1, 4, 9], [2, 6, 0], [0, 0, 0]]), np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    labels = np.random.default_rng(0).integers(5, len(VOCAB), positions.shape)
    example = {name: jnp.asarray(value, jnp.int32) for name, value in inputs.items()} | {
        "token_type_ids": jnp.zeros(inputs["input_ids"].shape, jnp.int32),
        "masked_positions": jnp.asarray(positions, jnp.int32), "masked_labels": jnp.asarray(labels, jnp.int32),
        "masked_weights": jnp.asarray(weights, jnp.float32),
    }

    @jax.jit
    @jax.value_and_grad
    def value_and_gradients(params):
        return total_loss(objective.loss(params, example, jax.random.key(0), False))

    loss, gradients = value_and_gradients(imported.params)
    wanted = np.full(inputs["input_ids"].shape, -100)
    for row, slot in zip(*np.nonzero(weights), strict=True):
        wanted[row, positions[row, slot]] = labels[row, slot]
    expected = theirs(**{k: torch.from_numpy(v) for k, v in inputs.items()}, labels=torch.from_numpy(wanted)).loss
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), abs=1e-5)
    layer = unstack(gradients["encoder"]["layers"])[1]
    other = theirs.distilbert.transformer.layer[1]
    words = theirs.distilbert.embeddings.word_embeddings
    for ours, weight in (
        (gradients["embeddings"]["word"]["embedding"][1:], words.weight.grad[1:]),
        (layer["attention"]["query"]["kernel"].T, other.attention.q_lin.weight.grad),
        (layer["mlp_norm"]["scale"], other.output_layer_norm.weight.grad),
        (gradients["mlm_head"]["bias"], theirs.vocab_projector.bias.grad),
    ):
        np.testing.assert_allclose(ours, weight.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow  # the suite has the loss and gradients of one step
def test_twenty_steps_of_distillation_as_in_pytorch():
    """Transformers' teacher and student with the three losses of the released script, without dropout."""
    length, count, steps = 32, 8, 20
    vocabulary = Vocabulary.stand_in(160)
    sizes = dict(hidden_size=32, num_heads=4, intermediate_size=64, max_positions=length, dropout=0.0,
                 attention_dropout=0.0, init_std=0.2)
    taught = MaskedLM(model=Bert(num_layers=4, **sizes), input_format="document").bind(vocabulary, length)
    teacher = PretrainedModel(taught, jax.jit(taught.init)(jax.random.key(7)))
    objective = Distillation(model=Distilbert(num_layers=2, **sizes), teacher="it")
    objective = objective.bind(vocabulary, length, Statistics(np.arange(160), 0.0))
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=5)
    constants = objective.load_constants(objective.vocabulary, lambda path: teacher)
    objective, mesh = objective.with_constants(constants), make_mesh(MeshConfig(), jax.devices()[:1])
    program = Program(objective, TrainConfig(steps=steps, batch_size=count, seed=3), optimizer, mesh)
    state = program.init_state(objective.merge_pretrained(program.init_params(0), None))
    (own,), (other,) = family_of(objective).models(objective), family_of(taught).models(taught)
    student = load_into(transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**own.config)), own.table,
                        state.params).train()
    master = load_into(transformers.BertForMaskedLM(transformers.BertConfig(**other.config)), other.table,
                       teacher.params).eval()
    adamw, ours, reference = TorchAdamW(student, own.table, state.params, optimizer, steps), [], []
    corrupt = jax.jit(objective.corrupt)
    for step in range(steps):
        draw = np.random.default_rng(step)
        real = np.arange(length - 2) < draw.integers(4, length - 1, count)[:, None]
        tokens = np.where(real, draw.integers(107, 160, real.shape), 0).astype(np.int32)
        given = TokenBatch(tokens, real.astype(np.int32))
        example = jax.device_get(corrupt(corruption_key(3, step), given))
        labels = np.full(example["input_ids"].shape, -100, np.int64)
        rows, slots = np.nonzero(example["masked_weights"])
        labels[rows, example["masked_positions"][rows, slots]] = example["masked_labels"][rows, slots]
        inputs = {name: torch.tensor(example[name]).long() for name in ("input_ids", "attention_mask")}
        is_real = inputs["attention_mask"] > 0
        answer = student(**inputs, labels=torch.tensor(labels), output_hidden_states=True)
        with torch.no_grad():
            wanted = master(**inputs, output_hidden_states=True)
        soft = torch.nn.functional.kl_div(
            (answer.logits[is_real] / 2).log_softmax(-1), (wanted.logits[is_real] / 2).softmax(-1),
            reduction="batchmean",
        ) * 4
        states = [output.hidden_states[-1][is_real] for output in (answer, wanted)]
        cosine = torch.nn.functional.cosine_embedding_loss(*states, torch.ones(len(states[0])))
        loss = 5 * soft + 2 * answer.loss + cosine
        adamw.step(loss)
        reference.append(loss.item())
        state, terms = program.train_step(state, given, constants)
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.3, "the student learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-3)


@pytest.mark.slow  # test_xlm_roberta.py has one
def test_a_published_model_is_continued_by_masked_lm(tmp_path, vocab_file, capsys):
    """By the preset of another encoder, whose rows of two segments become rows of one."""
    source = save_torch(torch_distilbert("gelu"), tmp_path / "hf", vocab_file)
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {a} cat sat on the {b} mat." for a in VOCAB for b in "abc"))
    preset, run = str(Path(__file__).parents[2] / "configs" / "bert_tiny.py"), str(tmp_path / "run")
    flags = ["--init-from", str(source), "--run-dir", run, "--data.source", str(tmp_path / "text.txt"), "--data.length",
             "16", "--train.phases", "", "--train.batch-size", "4", "--train.tracker", "none"]
    assert main(["pretrain", preset, *flags, "--train.steps", "2", "--optimizer.warmup-steps", "0"]) == 0
    assert "randomly initialized" not in capsys.readouterr().out
    loaded = load_model(run)
    objective, params = loaded.objective, loaded.params
    assert objective.model == dataclasses.replace(
        import_folder(source).objective.model, dropout=0.0, attention_dropout=0.0, attention="auto"
    )
    assert main(["export", run, str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is transformers.DistilBertForMaskedLM
    assert difference(objective, params, theirs, 7, True) < TOLERANCE
    assert difference(objective, params, torch_distilbert("gelu"), 7, True) > 0.01, "it was trained"
    # Where the objective cannot train the family, one sentence says what can.
    distil = preset.replace("bert_tiny", "distilbert_tiny")
    assert main(["pretrain", distil, *flags[:2], "--run-dir", run + "2", *flags[4:], "--train.steps", "2"]) == 2
    assert "objective.teacher is empty" in (said := capsys.readouterr().err) and "configs/bert_tiny.py" in said


def test_sinusoids_are_positions_of_the_file(tmp_path, vocab_file):
    model = torch_distilbert("gelu")
    folder = save_torch(model, tmp_path / "hf", vocab_file)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"sinusoidal_pos_embds": True}))
    theirs, imported = type(model).from_pretrained(folder).eval(), import_folder(folder)
    assert difference(imported.objective, imported.params, theirs, 9, True) < TOLERANCE


@pytest.mark.parametrize("changes", [dict(norm_eps=1e-5), dict(type_vocab_size=2)])
def test_models_that_their_class_cannot_hold_are_refused(changes, tmp_path, tokenizer):
    model = Distilbert(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, **changes)
    objective = Distillation(model=model).bind(tokenizer.vocabulary, 33)
    with pytest.raises(UserError, match="epsilon"):
        export_folder(tmp_path / "out", objective, {}, tokenizer, ModelCard())


def test_published_recipe():
    """Command and defaults of the released script (distillation/README.md of transformers-research-projects)."""
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / "distilbert_base.py"))
    objective, o = experiment.objective, experiment.optimizer
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 66_985_530  # parameters of DistilBertForMaskedLM
    assert sum(leaf.size for name in ("embeddings", "encoder") for leaf in jax.tree.leaves(shapes[name])) == 66_362_880
    assert (objective.soft_weight, objective.mlm_weight, objective.cosine_weight) == (5.0, 2.0, 1.0)
    assert (objective.temperature, objective.rarity, objective.mask_rate) == (2.0, 0.7, 0.15)
    assert (o.learning_rate, o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm) == (5e-4, 0.9, 0.98, 1e-6, 0.0, 5.0)
    assert o.schedule == "linear" and o.warmup_steps == 0.05 * experiment.train.steps
