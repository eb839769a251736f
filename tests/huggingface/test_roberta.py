"""RoBERTa against RobertaForMaskedLM, in both directions; its tokenizer's template; its presets."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxlm.cli import main
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models.base import Inputs
from jaxlm.models.roberta import Roberta
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.huggingface.support import batch, read_json, real, torch_outputs
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
LENGTHS = [(33, False), (33, True)]  # each length compiles anew
CONFIGS = {
    "gelu": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, layer_norm_eps=1e-5,
                 max_position_embeddings=42, type_vocab_size=1),
    "gelu_new": dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40,
                     hidden_act="gelu_new", layer_norm_eps=1e-7, max_position_embeddings=35, type_vocab_size=2),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = [" ".join(f"{a}{b}s the tree, {b}{a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    return train_tokenizer(texts, tmp_path_factory.mktemp("bpe"), kind="byte-bpe", vocab_size=420)


def torch_roberta(
    name: str, tokenizer: Tokenizer, architecture: str = "RobertaForMaskedLM", **changes
) -> torch.nn.Module:
    """Return a model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**(CONFIGS[name] | dict(vocab_size=len(tokenizer)) | changes))
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: torch.nn.Module, folder: Path, tokenizer: Tokenizer) -> Path:
    model.save_pretrained(folder)
    export(tokenizer, folder, Roberta.template, 40)
    return folder


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, ids, mask):
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, mask=mask)))


def difference(
    objective: MaskedLM, params, theirs: torch.nn.Module, length: int, padded: bool, is_left: bool = False
) -> float:
    inputs = batch(objective.model, length, padded, seed=length)
    if is_left:
        inputs = {name: array[:, ::-1].copy() for name, array in inputs.items()}
    pad = objective.vocabulary.pad  # Transformers derives positions from it; no token is padding
    ids = np.where(inputs["input_ids"] == pad, pad + 1, inputs["input_ids"])
    inputs = {"input_ids": np.where(inputs["attention_mask"], ids, pad), "attention_mask": inputs["attention_mask"]}
    expected = real(torch_outputs(theirs, inputs).logits.numpy(), inputs)
    assert np.abs(expected).max() > 0.1  # agreement on zeros would prove nothing
    return float(np.abs(real(logits(objective.model, params, *inputs.values()), inputs) - expected).max())


@pytest.mark.parametrize("name", first_fast(CONFIGS))
def test_imported_logits(name, tokenizer, tmp_path):
    theirs = torch_roberta(name, tokenizer)
    imported = import_folder(save(theirs, tmp_path / "hf", tokenizer))
    assert not imported.fresh
    assert type(imported.objective.model) is Roberta and imported.objective.input_format == "full-sentences"
    assert imported.objective.model.max_length == CONFIGS[name]["max_position_embeddings"] - 2
    for length, padded in LENGTHS:
        assert difference(imported.objective, imported.params, theirs, length, padded) < TOLERANCE
    assert difference(imported.objective, imported.params, theirs, 33, True, is_left=True) < TOLERANCE
    longest = imported.objective.model.max_length
    assert difference(imported.objective, imported.params, theirs, longest, False) < TOLERANCE
    # Exported again, every tensor is unchanged.
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", out))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow  # the suite has imported ones
@pytest.mark.parametrize("special", first_fast(["byte-bpe", "wordpiece"]))
def test_exported_logits(special, tokenizer, tmp_path, vocab_file):
    """With padding id 1, as published, and with 0; positions start after it."""
    own = tokenizer if special == "byte-bpe" else Tokenizer.load(vocab_file)
    model = Roberta(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=33, init_std=0.01)
    objective = MaskedLM(model=model, input_format="full-sentences", short_rate=0.0)
    if special == "wordpiece":
        objective = dataclasses.replace(objective, input_format="document")  # no end symbol
    objective = objective.bind(own.vocabulary, 33)
    assert objective.model.padding_id == own.vocabulary.pad == (special == "byte-bpe")
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, own, ModelCard(), max_length=21)
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs) is transformers.RobertaForMaskedLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.max_position_embeddings == 33 + own.vocabulary.pad + 1
    for length, padded in LENGTHS:
        assert difference(objective, params, theirs.eval(), length, padded) < TOLERANCE
    imported = import_folder(out)
    assert imported.objective.model == objective.model
    jax.tree.map(np.testing.assert_array_equal, imported.params, params)


def test_tokenizer_and_masks(tokenizer, tmp_path):
    """`<s> A </s>`, `<s> A </s></s> B </s>` as in RobertaTokenizer, and the predictions of the fill-mask pipeline."""
    objective = MaskedLM(
        model=Roberta(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=40),
        input_format="full-sentences",
    ).bind(tokenizer.vocabulary, 40)
    params = random_params(objective, 2)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    first, second = "aks the tree,", "옛날에 🙂 ka"
    a, b = tokenizer.encode(first), tokenizer.encode(second)
    assert theirs(first)["input_ids"] == [0, *a, 2]
    assert theirs(first, second)["input_ids"] == [0, *a, 2, 2, *b, 2]
    assert "token_type_ids" not in theirs(first, second)
    # The same vocabulary and merges in Transformers' own class.
    model = read_json(out / "tokenizer.json")["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    class_of_theirs = transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges)
    for texts in (first, second), (f"  {second}", f"\n{first}  "):
        found, wanted = (each(*texts, return_offsets_mapping=True) for each in (theirs, class_of_theirs))
        assert found["input_ids"] == wanted["input_ids"] and found["offset_mapping"] == wanted["offset_mapping"]
    assert Tokenizer.load(out).vocabulary.separators == 2
    assert (theirs.pad_token_id, theirs.mask_token, theirs.model_max_length) == (1, "<mask>", 40)
    answers = [fill_mask(PretrainedModel(objective, params, tokenizer), [text], 3)[0]
               for text in ("aks the [MASK], ka", "aks the<mask>, ka")]
    assert answers[0] == answers[1]
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)("aks the<mask>, ka")
    np.testing.assert_allclose([p for _, p in answers[0][0]], [entry["score"] for entry in library], atol=1e-5)
    assert [piece for piece, _ in answers[0][0]] == tokenizer.pieces([entry["token"] for entry in library])


def test_bare_model_and_its_pooler(tokenizer, tmp_path):
    theirs = torch_roberta("gelu", tokenizer, "RobertaModel")
    folder = save(theirs, tmp_path / "hf", tokenizer)
    assert "pooler.dense.weight" in load_file(folder / "model.safetensors")
    imported = import_folder(folder)
    assert imported.fresh == ("mlm_head",) and "pooler" not in imported.params


def test_separate_output_matrix_is_refused(tokenizer, tmp_path):
    folder = save(torch_roberta("gelu", tokenizer), tmp_path / "hf", tokenizer)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.decoder.weight"] = tensors["roberta.embeddings.word_embeddings.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"weight that differs from .*weight; this model ties them"):
        import_folder(folder)


def test_another_padding_token_is_refused(tokenizer, tmp_path):
    """Positions start after its id, so a wrong one would shift them all."""
    folder = save(torch_roberta("gelu", tokenizer), tmp_path / "hf", tokenizer)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    with pytest.raises(UserError, match="differ in the id"):
        import_folder(folder)


@pytest.mark.slow  # RoBERTa's own fields are tested above
def test_a_run_is_trained_exported_and_imported(tokenizer, tmp_path, capsys):
    """The commands, from text to logits in Transformers."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {a}{b} tree was {b}{a} and old." for a in "abcdefgh" for b in "klmnopqrst"))
    tokenizer.save(tmp_path / "tokenizer")
    run, out = tmp_path / "run", tmp_path / "out"
    preset = str(Path(__file__).parents[2] / "configs" / "roberta_tiny.py")
    assert main([
        "pretrain", preset, "--run-dir", str(run), "--data.source", str(text), "--data.tokenizer",
        str(tmp_path / "tokenizer"), "--data.length", "32", "--train.steps", "2", "--train.phases", "1x16,1",
        "--train.batch-size", "4", "--train.tracker", "none", "--objective.model.hidden-size", "32",
    ]) == 0
    assert main(["export", str(run), str(out)]) == 0
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
    assert transformers.AutoTokenizer.from_pretrained(out).model_max_length == 32
    imported = import_folder(out)
    assert difference(imported.objective, imported.params, theirs, 19, True) < TOLERANCE
    assert main(["fill-mask", str(run), "The [MASK] tree"]) == 0


# Liu et al. 2019, section 5 and table 9; counts of RobertaForMaskedLM.
@pytest.mark.parametrize(
    ("size", "parameters", "learning_rate", "warmup"),
    first_fast([("base", 124_697_433, 6e-4, 24_000), ("large", 355_412_057, 4e-4, 30_000)]),
)
def test_published_recipes(size, parameters, learning_rate, warmup):
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / f"roberta_{size}.py"))
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    o, t, objective = experiment.optimizer, experiment.train, experiment.objective
    assert (o.name, o.learning_rate, o.warmup_steps, o.schedule) == ("adamw", learning_rate, warmup, "linear")
    assert (o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm) == (0.9, 0.98, 1e-6, 0.01, 0.0)
    assert (t.steps, t.batch_size, experiment.data.length) == (500_000, 8192, 512)
    assert (objective.mask_rate, objective.mask_share, objective.random_share) == (0.15, 0.8, 0.1)
    assert (objective.input_format, objective.short_rate) == ("full-sentences", 0.0)
