"""DeBERTa v2 and v3 against Transformers' classes, in both directions; folders as published."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxlm.cli import main
from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.deberta import FAMILY, read_objective
from jaxlm.huggingface.family import Source
from jaxlm.models.base import Inputs
from jaxlm.models.deberta import Deberta, DebertaV3
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.huggingface.support import (
    VOCAB,
    TorchAdamW,
    batch,
    load_into,
    read_json,
    real,
    save_torch,
    torch_outputs,
)
from tests.params import first_fast, random_params
from tests.training.support import write_text

TOLERANCE = 1e-4
SHAPES = [(7, False), (7, True), (33, True), (40, False)]
# 8 buckets, so that distances from 5 to 39 are logarithmic.
SIZES = dict(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, max_positions=40, position_buckets=8)
CONFIG = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=40,
    position_buckets=8, relative_attention=True, position_biased_input=False, share_att_key=True,
    norm_rel_ebd="layer_norm", pos_att_type="p2c|c2p", max_relative_positions=-1, type_vocab_size=0,
)


def torch_deberta(architecture: str = "DebertaV2ForMaskedLM", **changes) -> torch.nn.Module:
    """Return a model with matrices of standard deviation 0.1: at the class's 0.02 a wrong bucket changes little."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**(CONFIG | {"vocab_size": len(VOCAB)} | changes))
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(parameter.dim() == 1).add_(torch.randn_like(parameter) * 0.1)
    return model


def inputs_of(model: Deberta, length: int, padded: bool) -> dict[str, np.ndarray]:
    inputs = batch(dataclasses.replace(model, type_vocab_size=1), length, padded, seed=length)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, ids, mask):
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, mask=mask)))


def check(objective: MaskedLM, params, theirs: torch.nn.Module, shapes=SHAPES) -> None:
    for length, padded in shapes:
        inputs = inputs_of(objective.model, length, padded)
        expected = real(torch_outputs(theirs, inputs).logits.numpy(), inputs)
        assert np.abs(expected).max() > 0.3  # agreement on zeros would prove nothing
        assert np.abs(real(logits(objective.model, params, *inputs.values()), inputs) - expected).max() < TOLERANCE


@pytest.mark.parametrize("legacy", first_fast([False, True]))
def test_imported_logits(legacy, tmp_path, vocab_file):
    theirs = torch_deberta(legacy=legacy)
    folder = save_torch(theirs, tmp_path / "hf", vocab_file)
    imported = import_folder(folder)
    assert imported.objective.model == Deberta(**SIZES, vocab_size=len(VOCAB)) and not imported.fresh
    assert imported.objective.input_format == "document"
    check(imported.objective, imported.params, theirs, SHAPES if legacy else SHAPES[2:3])
    # Exported again, every tensor is unchanged.
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    before = {name.replace("cls.predictions", "lm_predictions.lm_head").replace("transform.", ""): array
              for name, array in before.items()}
    assert before.keys() - {"lm_predictions.lm_head.decoder.bias"} == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in after)


def test_exported_logits(tmp_path, tokenizer):
    objective = MaskedLM(model=Deberta(**SIZES), input_format="document").bind_unchecked(tokenizer.vocabulary)
    objective = objective.bind(tokenizer.vocabulary, 40)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    model, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(model) is transformers.DebertaV2ForMaskedLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check(objective, params, model.eval(), SHAPES[2:3])
    v, ids = tokenizer.vocabulary, transformers.AutoTokenizer.from_pretrained(out)("the cat sat", "on")["input_ids"]
    assert ids == [v.cls, *tokenizer.encode("the cat sat"), v.sep, *tokenizer.encode("on"), v.sep]


def masked_objective() -> MaskedLM:
    model = Deberta(**SIZES, dropout=0.0, attention_dropout=0.0)
    return MaskedLM(model=model, input_format="document").bind(Vocabulary.stand_in(160), 40)


def counterpart(objective: MaskedLM, params) -> torch.nn.Module:
    (theirs,) = FAMILY.models(objective)
    model = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**theirs.config))
    return load_into(model, theirs.table, params).eval()


def their_loss(theirs: torch.nn.Module, example) -> torch.Tensor:
    labels = np.full(example["input_ids"].shape, -100)
    rows, slots = np.nonzero(example["masked_weights"])
    labels[rows, example["masked_positions"][rows, slots]] = example["masked_labels"][rows, slots]
    ids, mask = (torch.tensor(example[name]).long() for name in ("input_ids", "attention_mask"))
    return theirs(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)).loss


def text_batch(count: int, length: int, seed: int) -> TokenBatch:
    """Return rows of repeated words, some of them short."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(np.arange(110, 160), (count, length), p=np.arange(1, 51) / 1275)
    real = np.arange(length) < rng.integers(4, length + 1, (count, 1))
    return TokenBatch(np.where(real, tokens, 0).astype(np.int32), real.astype(np.int32))


@pytest.mark.slow
def test_loss_and_gradients_as_in_pytorch():
    objective = masked_objective()
    params = random_params(objective, 3)
    example = jax.jit(objective.corrupt)(jax.random.key(0), text_batch(6, objective.row_format(40).length, 0))
    loss = lambda params, example: total_loss(objective.loss(params, example, jax.random.key(0), False))  # noqa: E731
    found, gradients = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, example))
    theirs = counterpart(objective, params)
    expected = their_loss(theirs, jax.device_get(example))
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    (model,) = FAMILY.models(objective)
    by_name = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    ours = dict(model.table.to_transformers(gradients))
    assert ours.keys() == by_name.keys()
    scale = max(float(np.abs(gradient).max()) for gradient in by_name.values())
    for name, gradient in by_name.items():
        assert np.abs(gradient).max() > (1e-4 if "key_proj.bias" not in name else 0) * scale, name
        np.testing.assert_allclose(ours[name], gradient, atol=2e-5 * scale, err_msg=name)


@pytest.mark.slow
def test_twenty_steps_as_in_pytorch():
    objective, steps = masked_objective(), 20
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=5)
    train = TrainConfig(steps=steps, batch_size=8, seed=3)
    program = Program(objective, train, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = program.init_state(random_params(objective, 3))
    theirs = counterpart(objective, state.params).train()
    (model,) = FAMILY.models(objective)
    adamw = TorchAdamW(theirs, model.table, state.params, optimizer, steps)
    ours, reference, corrupt = [], [], jax.jit(objective.corrupt)
    for step in range(steps):
        given = text_batch(8, objective.row_format(40).length, step)
        loss = their_loss(theirs, jax.device_get(corrupt(corruption_key(3, step), given)))
        adamw.step(loss)
        reference.append(loss.item())
        state, terms = program.train_step(state, given, ())
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.3, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, atol=2e-4)


PAIR = DebertaV3(**SIZES, generator_num_layers=1)


def pair_objective(vocabulary: Vocabulary, **changes) -> ReplacedTokens:
    return ReplacedTokens(model=dataclasses.replace(PAIR, **changes), two_segments=False).bind(vocabulary, 40)


@functools.partial(jax.jit, static_argnums=0)
def suspicion(model: DebertaV3, params, ids, mask):
    """Return the discriminator's logits and its hidden states."""
    hidden = model.hidden_states(params, Inputs(ids, mask=mask))
    return call(model.replaced_head, params["rtd_head"], hidden)[..., 0], hidden


def their_suspicion(weights: dict[str, np.ndarray], hidden: torch.Tensor) -> torch.Tensor:
    """The head of microsoft/DeBERTa's replaced-token detection, by its published names."""
    w = {name: torch.tensor(weights[f"mask_predictions.{name}"]) for name in (
        "LayerNorm.weight", "LayerNorm.bias", "dense.weight", "dense.bias", "classifier.weight", "classifier.bias")}
    x = torch.nn.functional.layer_norm(
        hidden + hidden[:, :1], hidden.shape[-1:], w["LayerNorm.weight"], w["LayerNorm.bias"], 1e-7)
    x = torch.nn.functional.gelu(x @ w["dense.weight"].T + w["dense.bias"])
    return (x @ w["classifier.weight"].T + w["classifier.bias"])[..., 0]


def check_discriminator(model: DebertaV3, params, theirs: torch.nn.Module, weights) -> None:
    inputs = inputs_of(model.discriminator, 33, True)
    found, hidden = suspicion(model, params, *inputs.values())
    expected = torch_outputs(theirs, inputs).last_hidden_state
    assert np.abs(real(hidden, inputs) - real(expected.numpy(), inputs)).max() < TOLERANCE
    logits = real(their_suspicion(weights, expected).numpy(), inputs)
    assert np.ptp(logits) > 0.1 and np.abs(real(found, inputs) - logits).max() < TOLERANCE


@pytest.mark.slow
def test_a_pair_is_exported_as_published(tmp_path, tokenizer):
    objective = pair_objective(tokenizer.vocabulary)
    params = random_params(objective, 4)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    weights = load_file(out / "model.safetensors")
    words = [params[name]["embeddings"]["word"]["embedding"] for name in ("generator", "discriminator")]
    np.testing.assert_array_equal(weights["deberta.embeddings.word_embeddings.weight"], words[0] + words[1])
    theirs, report = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all(name.startswith("mask_predictions.") for name in report["unexpected_keys"])
    check_discriminator(objective.model, params, theirs.eval(), weights)
    generator, report = transformers.AutoModelForMaskedLM.from_pretrained(out / "generator", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # Without the decoder, which the class lacks, the generator is theirs.
    plain = dataclasses.replace(objective.model.generator, mask_decoder=False)
    check(MaskedLM(model=plain, input_format="document"), params["generator"], generator.eval(), SHAPES[2:3])

    back = import_folder(out)
    assert back.objective.model == objective.model and not back.fresh
    assert (back.objective.mask_share, back.objective.two_segments) == (1.0, False)
    own, mine = (params["discriminator"]["embeddings"].pop("word")["embedding"] for params in (back.params, params))
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    np.testing.assert_allclose(own, mine, atol=1e-6)  # rounded in the sum and in the difference


def published(folder: Path, words: int = 300) -> tuple[transformers.DebertaV2Model, dict[str, np.ndarray]]:
    """Write a discriminator with the files and names of microsoft/deberta-v3-*: both heads, spm.model, no class."""
    folder.mkdir()
    text = write_text(folder.parent / "text.txt", documents=40)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spm"), vocab_size=60, hard_vocab_limit=False, pad_id=0, bos_id=1,
        eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", minloglevel=2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))
    theirs = torch_deberta("DebertaV2Model", vocab_size=words)
    weights = {f"deberta.{name}": value.numpy() for name, value in theirs.state_dict().items()}
    rng, h = np.random.default_rng(0), CONFIG["hidden_size"]
    shapes = {"dense.weight": (h, h), "dense.bias": (h,), "LayerNorm.weight": (h,), "LayerNorm.bias": (h,)}
    heads = {"mask_predictions": shapes | {"classifier.weight": (1, h), "classifier.bias": (1,)},
             "lm_predictions.lm_head": shapes | {"bias": (words,)}}
    weights |= {f"{head}.{name}": rng.normal(0, 0.3, shape).astype(np.float32)
                for head, tensors in heads.items() for name, shape in tensors.items()}
    save_file(weights, folder / "model.safetensors")
    config = CONFIG | {"vocab_size": words, "model_type": "deberta-v2", "hidden_act": "gelu", "layer_norm_eps": 1e-7}
    (folder / "config.json").write_text(json.dumps(config))
    return theirs, weights


@pytest.mark.slow
def test_a_published_discriminator(tmp_path):
    theirs, weights = published(tmp_path / "hf")
    imported = import_folder(tmp_path / "hf")
    model, params = imported.objective.model, imported.params
    assert imported.fresh == tuple(
        f"generator/{name}" for name in ("embeddings/norm", "encoder", "mlm_head", "position", "relative"))
    assert model.generator_num_layers == 1 and model.vocab_size == 300
    assert imported.tokenizer.vocabulary.mask == len(imported.tokenizer) - 1
    assert not params["discriminator"]["embeddings"]["word"]["embedding"].any()
    check_discriminator(model, params, theirs, weights)
    out = export_folder(tmp_path / "out", imported.objective, params, imported.tokenizer, ModelCard())
    after = load_file(out / "model.safetensors")
    assert after.keys() == {name for name in weights if not name.startswith("lm_predictions.")}
    assert all(np.array_equal(weights[name], after[name]) for name in after)


@pytest.mark.slow
def test_a_published_discriminator_continues(tmp_path, capsys):
    published(tmp_path / "hf")
    flags = ["--data.source", str(tmp_path / "text.txt"), "--data.length", "40", "--data.held-out", "0.1",
             "--train.steps", "2", "--train.phases", "", "--train.batch-size", "4", "--train.tracker", "none"]
    run = tmp_path / "run"
    assert main(["pretrain", "configs/deberta_v3_tiny.py", "--init-from", str(tmp_path / "hf"), "--run-dir", str(run),
                 *flags]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert read_json(tmp_path / "out" / "config.json")["vocab_size"] == 300
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    name = "deberta.encoder.layer.0.attention.self.query_proj.weight"
    assert 0 < np.abs(before[name] - after[name]).max() < 0.1


@pytest.mark.parametrize(("changes", "message"), [
    ({"relative_attention": None}, "relative_attention is False"), ({"position_biased_input": True}, "position_biased"),
    ({"conv_kernel_size": 3}, "conv_kernel_size is 3"), ({"share_att_key": False}, "share_att_key is False"),
    ({"pos_att_type": "c2p"}, "pos_att_type is 'c2p'"), ({"max_relative_positions": 128}, "max_relative_positions is"),
    ({"position_buckets": None}, "position_buckets is -1"), ({"embedding_size": 16}, "embedding_size is 16"),
])
def test_other_configurations_are_refused(changes, message, tmp_path):
    source = Source(tmp_path, CONFIG | changes, ())
    with pytest.raises(UserError, match=message):
        read_objective(source)


def test_networks_of_different_widths_are_refused(tmp_path, tokenizer):
    objective = pair_objective(tokenizer.vocabulary)
    out = export_folder(tmp_path / "out", objective, random_params(objective, 4), tokenizer, ModelCard())
    file = out / "generator" / "config.json"
    file.write_text(json.dumps(read_json(file) | {"intermediate_size": 12}))
    with pytest.raises(UserError, match="more than num_hidden_layers"):
        import_folder(out)
