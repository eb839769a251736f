"""ELECTRA against ElectraForPreTraining and ElectraForMaskedLM, in both directions."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.electra import default_generator
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models import electra
from jaxlm.models.base import Inputs
from jaxlm.models.electra import Electra
from jaxlm.models.layers.stack import call
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from tests.huggingface.support import VOCAB, batch, read_json, real, save_torch, torch_outputs
from tests.params import first_fast

TOLERANCE = 1e-4
SHAPES = [(33, False), (33, True)]  # each length compiles anew
# Widths with and without projections, in either network; epsilons, activations, heads and segment types that differ.
CONFIGS = {
    "both project": dict(
        embedding_size=20, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, generator_hidden_size=12,
        generator_num_layers=3, generator_num_heads=2, generator_intermediate_size=24, max_positions=40,
    ),
    "only the generator projects": dict(
        embedding_size=24, hidden_size=24, num_layers=3, num_heads=3, intermediate_size=40, generator_hidden_size=16,
        generator_num_layers=1, generator_num_heads=1, generator_intermediate_size=48, max_positions=33,
        type_vocab_size=5, activation="gelu_new", norm_eps=1e-5,
    ),
    "only the discriminator projects": dict(
        embedding_size=16, hidden_size=28, num_layers=1, num_heads=2, intermediate_size=30, generator_hidden_size=16,
        generator_num_layers=2, generator_num_heads=4, generator_intermediate_size=32, max_positions=64,
        activation="relu", share_embeddings=False,
    ),
}


def objective_of(name: str, tokenizer, **changes) -> ReplacedTokens:
    model = Electra(**(CONFIGS[name] | {"vocab_size": len(VOCAB)} | changes))
    return ReplacedTokens(model=model).bind_unchecked(tokenizer.vocabulary)


def random_params(objective: ReplacedTokens, seed: int):
    """Return random parameters; zero biases and unit norms would hide a mix-up."""
    rng = np.random.default_rng(seed)
    params = jax.jit(objective.init)(jax.random.key(seed))
    return jax.tree.map(lambda x: np.asarray(x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)), params)


def torch_electra(model: Electra, network: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    s = getattr(model, network)
    config = transformers.ElectraConfig(
        vocab_size=model.vocab_size, embedding_size=model.embedding_size, hidden_size=s.hidden_size,
        num_hidden_layers=s.num_layers, num_attention_heads=s.num_heads, intermediate_size=s.intermediate_size,
        max_position_embeddings=model.max_positions, type_vocab_size=model.type_vocab_size,
        hidden_act=model.activation, layer_norm_eps=model.norm_eps,
    )
    classes = {"generator": transformers.ElectraForMaskedLM, "discriminator": transformers.ElectraForPreTraining}
    result = classes[network](config).eval()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return result


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits(model, network, params, inputs):
    encoder = getattr(model, network)
    own = model.generator_params(params) if network == "generator" else model.discriminator_params(params)
    hidden = encoder.hidden_states(own, Inputs.of(inputs))
    if network == "generator":
        return encoder.predict_tokens(own, hidden)
    return call(model.replaced_head, params["rtd_head"], hidden)[..., 0]


def check(objective: ReplacedTokens, params, network: str, theirs: torch.nn.Module) -> None:
    for length, padded in SHAPES:
        inputs = batch(objective.model, length, padded, seed=length)
        expected = real(torch_outputs(theirs, inputs).logits.numpy(), inputs)
        assert np.abs(expected).max() > 0.1  # agreement on zeros would prove nothing
        assert np.abs(real(logits(objective.model, network, params, inputs), inputs) - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "both project" else pytest.mark.slow) for name in CONFIGS
])
def test_exported_logits(name, tmp_path, tokenizer):
    objective = objective_of(name, tokenizer)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    for folder, auto, network in (
        (out, transformers.AutoModelForPreTraining, "discriminator"),
        (out / "generator", transformers.AutoModelForMaskedLM, "generator"),
    ):
        model, report = auto.from_pretrained(folder, output_loading_info=True)
        assert type(model).__name__ == read_json(folder / "config.json")["architectures"][0]
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        check(objective, params, network, model.eval())
    ids = transformers.AutoTokenizer.from_pretrained(out)("the cat sat")["input_ids"]
    v = tokenizer.vocabulary
    assert ids == [v.cls, *tokenizer.encode("the cat sat"), v.sep]


@pytest.mark.parametrize("name", first_fast(CONFIGS))
def test_imported_logits(name, tmp_path, tokenizer, vocab_file):
    wanted = objective_of(name, tokenizer).model
    discriminator, generator = (torch_electra(wanted, network) for network in ("discriminator", "generator"))
    if wanted.share_embeddings:
        generator.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
    save_torch(discriminator, tmp_path / "hf", vocab_file)
    generator.save_pretrained(tmp_path / "hf" / "generator")
    imported = import_folder(tmp_path / "hf")
    assert imported.objective.model == wanted and not imported.fresh
    check(imported.objective, imported.params, "discriminator", discriminator)
    check(imported.objective, imported.params, "generator", generator)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both project", "only the discriminator projects"])
def test_round_trip_of_all_parameters(name, tmp_path, tokenizer):
    objective = objective_of(name, tokenizer, dropout=0.25, attention_dropout=0.0, init_std=0.01)
    params = random_params(objective, 2)
    imported = import_folder(export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard()))
    assert imported.objective.model == objective.model and not imported.fresh
    jax.tree.map(np.testing.assert_array_equal, imported.params, params)


@pytest.mark.slow
def test_discriminator_alone(tmp_path, tokenizer, vocab_file):
    wanted = objective_of("both project", tokenizer).model
    discriminator = torch_electra(wanted, "discriminator")
    imported = import_folder(save_torch(discriminator, tmp_path / "hf", vocab_file))
    assert imported.fresh == ("generator",)
    assert imported.objective.model.share_embeddings
    check(imported.objective, imported.params, "discriminator", discriminator)


@pytest.mark.slow
def test_generator_alone_fills_masks(tmp_path, tokenizer, vocab_file):
    generator = torch_electra(objective_of("both project", tokenizer).model, "generator")
    imported = import_folder(save_torch(generator, tmp_path / "hf", vocab_file))
    assert imported.fresh == ("discriminator", "rtd_head",)
    check(imported.objective, imported.params, "generator", generator)
    text = "the [MASK] sat on [MASK] mat"
    answers = fill_mask(imported, [text], top_k=3)[0]
    library = transformers.pipeline("fill-mask", model=generator, tokenizer=transformers.AutoTokenizer.from_pretrained(
        tmp_path / "hf"), top_k=3)(text)
    for ours, theirs in zip(answers, library, strict=True):
        np.testing.assert_allclose([p for _, p in ours], [entry["score"] for entry in theirs], atol=1e-5)
        v = imported.tokenizer
        assert [piece for piece, _ in ours] == v.pieces([entry["token"] for entry in theirs])


@pytest.mark.slow
def test_encoder_alone(tmp_path, tokenizer, vocab_file):
    """ElectraModel has no head; it is imported as a discriminator's encoder."""
    discriminator = torch_electra(objective_of("both project", tokenizer).model, "discriminator")
    imported = import_folder(save_torch(discriminator.electra, tmp_path / "hf", vocab_file))
    assert imported.fresh == ("generator", "rtd_head",)


def test_a_generator_without_its_head(tmp_path, tokenizer, vocab_file):
    """A missing head and a missing network are distinguished."""
    model = objective_of("both project", tokenizer).model
    discriminator, generator = (torch_electra(model, network) for network in ("discriminator", "generator"))
    generator.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
    save_torch(discriminator, tmp_path / "hf", vocab_file)
    generator.electra.save_pretrained(tmp_path / "hf" / "generator")
    assert import_folder(tmp_path / "hf").fresh == ("generator/mlm_head",)


def test_networks_that_cannot_train_together(tmp_path, tokenizer, vocab_file):
    model = objective_of("both project", tokenizer).model
    save_torch(torch_electra(model, "discriminator"), tmp_path / "hf", vocab_file)
    other = dataclasses.replace(model, embedding_size=8)
    torch_electra(other, "generator").save_pretrained(tmp_path / "hf" / "generator")
    with pytest.raises(UserError, match="embedding_size is 8"):
        import_folder(tmp_path / "hf")


def test_generator_folder_of_another_family(tmp_path, tokenizer, vocab_file):
    model = objective_of("both project", tokenizer).model
    save_torch(torch_electra(model, "discriminator"), tmp_path / "hf", vocab_file)
    torch_electra(model, "generator").save_pretrained(tmp_path / "hf" / "generator")
    file = tmp_path / "hf" / "generator" / "config.json"
    file.write_text(json.dumps(read_json(file) | {"model_type": "bert"}))
    with pytest.raises(UserError, match="model_type is 'bert'"):
        import_folder(tmp_path / "hf")


@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_default_generator_is_the_published_one(size):
    c = Electra.published(size)
    found = default_generator(dict(num_layers=c.num_layers, hidden_size=c.hidden_size, embedding_size=c.embedding_size))
    assert found == dict(
        hidden_size=c.generator_hidden_size, num_layers=c.generator_num_layers, num_heads=c.generator_num_heads,
        intermediate_size=c.generator_intermediate_size,
    )


@pytest.mark.slow
def test_an_imported_large_one_masks_a_quarter(tmp_path, tokenizer, monkeypatch):
    """The small model stands in for the large one, whose weights would take a gigabyte."""
    objective = objective_of("both project", tokenizer)
    m = objective.model
    folder = export_folder(tmp_path / "out", objective, random_params(objective, 2), tokenizer, ModelCard())
    assert import_folder(folder).objective.mask_rate == 0.15
    monkeypatch.setitem(electra.PUBLISHED, "large", (m.num_layers, m.embedding_size, m.hidden_size, 256))
    assert import_folder(folder).objective.mask_rate == 0.25
