"""GPT-1 against OpenAIGPTLMHeadModel: logits, loss and gradients, both directions; the same greedy continuations."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.generate import generate
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.layers.stack import unstack
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from jaxlm.types import TokenBatch
from tests.huggingface.support import decoder_difference, read_json
from tests.params import first_fast

TOLERANCE = 1e-4
SIZES = {
    "a": dict(n_embd=32, n_layer=2, n_head=4, n_positions=40),
    "b": dict(n_embd=24, n_layer=3, n_head=3, n_positions=64, layer_norm_epsilon=1e-3, afn="silu"),
}
BATCHES = [(33, False), (33, True)]  # each length compiles anew


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = [" ".join(f"{a}{b}s the tree, {b}{a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    return train_tokenizer(texts, tmp_path_factory.mktemp("bpe"), kind="byte-bpe", vocab_size=420)


def save(name: str, tokenizer: Tokenizer, folder, **changes):
    """Save a model with random weights and return it with its folder; unit norms would hide a mix-up."""
    torch.manual_seed(0)
    config = transformers.OpenAIGPTConfig(**(SIZES[name] | dict(vocab_size=tokenizer.vocabulary.size) | changes))
    model = transformers.OpenAIGPTLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    export(tokenizer, folder, Gpt1.template, config.n_positions)
    return model, folder


@pytest.mark.parametrize("name", first_fast(SIZES))
def test_logits_in_both_directions(name, tmp_path, tokenizer):
    model, folder = save(name, tokenizer, tmp_path / "hf")
    stored = load_file(folder / "model.safetensors")  # published files have causal masks as buffers, too
    save_file(stored | {f"h.{i}.attn.bias": np.tri(40, dtype=np.float32)[None, None] for i in range(2)},
              folder / "model.safetensors", {"format": "pt"})
    imported = import_folder(folder)
    objective, params = imported.objective, imported.params
    assert type(objective.model) is Gpt1 and not imported.fresh
    for length, padded in BATCHES:
        assert decoder_difference(objective, params, model, length, padded) < TOLERANCE
    export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(again) is transformers.OpenAIGPTLMHeadModel
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert decoder_difference(objective, params, again.eval(), 33, True) < TOLERANCE
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("aks the tree,", "옛날에 🙂", ""):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    back = import_folder(tmp_path / "out")
    assert back.objective.model == objective.model
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


@pytest.mark.slow
def test_loss_and_gradients(tmp_path, tokenizer):
    """Their model shifts the labels itself; ours has the same targets in full rows of one document."""
    model, folder = save("a", tokenizer, tmp_path / "hf")
    imported = import_folder(folder)
    objective = imported.objective.bind(dataclasses.replace(tokenizer.vocabulary, preserve_rows=True), 20)
    rows = np.random.default_rng(0).integers(0, tokenizer.vocabulary.size, (4, 21)).astype(np.int32)
    example = objective.corrupt(jax.random.key(0), TokenBatch(jnp.asarray(rows), jnp.ones_like(rows)))

    @jax.jit
    @jax.value_and_grad
    def value_and_gradients(params):
        return total_loss(objective.loss(params, example, jax.random.key(0), False))

    loss, gradients = value_and_gradients(imported.params)
    ids = torch.from_numpy(rows.astype(np.int64))
    theirs = model(ids, labels=ids).loss
    theirs.backward()
    assert float(loss) == pytest.approx(theirs.item(), abs=1e-5)
    layer = unstack(gradients["decoder"]["layers"])[1]
    for ours, other in (
        (gradients["embeddings"]["word"]["embedding"], model.transformer.tokens_embed.weight),
        (layer["attention"]["out"]["kernel"], model.transformer.h[1].attn.c_proj.weight),
        (layer["mlp_norm"]["scale"], model.transformer.h[1].ln_2.weight),
    ):
        np.testing.assert_allclose(ours, other.grad.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow  # test_gpt2.py has them
def test_greedy_continuations_are_theirs(tmp_path, tokenizer):
    """Prompts of one length: their class has no positions for padding on the left."""
    model, folder = save("a", tokenizer, tmp_path / "hf")
    imported = import_folder(folder)
    prompts = np.random.default_rng(5).integers(4, tokenizer.vocabulary.size, (4, 6))
    with torch.no_grad():
        ids = torch.from_numpy(prompts)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=1
        )
    rows = [row[: row.index(1) + 1] if 1 in row else row for row in out[:, 6:].tolist()]
    assert len({tuple(row) for row in rows}) > 2  # the prompts have an effect
    assert generate(imported.objective, imported.params, prompts.tolist(), max_new_tokens=20, stop_ids=[1]) == rows


@pytest.mark.parametrize(("key", "value"), [("afn", "mish"), ("embd_pdrop", 0.3), ("n_layer", "two")])
def test_unsupported_configurations_are_refused(key, value, tmp_path, tokenizer):
    _, folder = save("a", tokenizer, tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | {key: value}))
    with pytest.raises(UserError, match=key):
        import_folder(folder)


@pytest.mark.parametrize("changes", [dict(intermediate_size=100), dict(activation="gelu")])
def test_models_that_their_class_cannot_hold_are_refused(changes, tmp_path, tokenizer):
    model = Gpt1(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=128, vocab_size=tokenizer.vocabulary.size)
    objective = CausalLM(model=dataclasses.replace(model, **changes)).bind_unchecked(tokenizer.vocabulary)
    with pytest.raises(UserError, match="four times as wide"):
        export_folder(tmp_path / "out", objective, {}, tokenizer, ModelCard())
