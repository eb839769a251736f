"""GPT-2 against GPT2LMHeadModel: logits in both directions, and the same greedy continuations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.generate import generate
from jaxlm.inference.score import text_begin
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.stack import unstack
from jaxlm.models.llama import Llama
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.huggingface.support import decoder_difference, read_json
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
SIZES = {
    "a": dict(n_embd=32, n_layer=2, n_head=4, n_inner=64, activation_function="gelu_new", n_positions=40),
    "b": dict(n_embd=24, n_layer=3, n_head=3, n_inner=None, activation_function="gelu", n_positions=64,
              layer_norm_epsilon=1e-3),
}


@pytest.fixture(scope="session")
def bpe_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a byte-level BPE vocabulary in GPT-2's two files: the 256 bytes, a few merges, and the end symbol."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("bpe")
    merges = ["t h", "th e", "Ġ the", "a n", "Ġ a", "i n", "e r", "o n", "Ġ c"]
    pieces = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(bpe_files: Path) -> Tokenizer:
    return Tokenizer.load(bpe_files)


def torch_gpt2(name: str, tokenizer: Tokenizer, seed: int = 0, **changes) -> transformers.GPT2LMHeadModel:
    """Return a model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(seed)
    eos = tokenizer.vocabulary.eos
    config = transformers.GPT2Config(
        **(SIZES[name] | dict(vocab_size=tokenizer.vocabulary.size, bos_token_id=eos, eos_token_id=eos) | changes)
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def save_torch(model, folder: Path, tokenizer: Tokenizer, **options) -> Path:
    model.save_pretrained(folder, **options)
    export(tokenizer, folder, Gpt2.template, model.config.n_positions)
    return folder


def our_objective(name: str, tokenizer: Tokenizer) -> CausalLM:
    size = SIZES[name]
    model = Gpt2(
        vocab_size=tokenizer.vocabulary.size, hidden_size=size["n_embd"], num_layers=size["n_layer"],
        num_heads=size["n_head"], intermediate_size=size["n_inner"] or 4 * size["n_embd"],
        max_positions=size["n_positions"], activation=size["activation_function"],
        norm_eps=size.get("layer_norm_epsilon", 1e-5),
    )
    return CausalLM(model=model).bind_unchecked(tokenizer.vocabulary)


BATCHES = [(33, False), (33, True)]  # each length compiles anew


@pytest.mark.parametrize("name", first_fast(SIZES))
def test_imported_logits(name, tmp_path, tokenizer):
    model = torch_gpt2(name, tokenizer)
    imported = import_folder(save_torch(model, tmp_path / "hf", tokenizer))
    assert not imported.fresh
    assert imported.objective.vocabulary.eos == tokenizer.vocabulary.eos
    for length, padded in BATCHES:
        assert decoder_difference(imported.objective, imported.params, model, length, padded) < TOLERANCE


@pytest.mark.parametrize("name", first_fast(SIZES))
def test_exported_logits(name, tmp_path, tokenizer):
    objective = our_objective(name, tokenizer)
    params = random_params(objective)
    export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for length, padded in BATCHES:
        assert decoder_difference(objective, params, model.eval(), length, padded) < TOLERANCE
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the man in the  can", "옛날에 🙂", ""):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    # Imported again, every number is unchanged.
    again = import_folder(tmp_path / "out")
    assert dataclasses.replace(again.objective.model, dtype="float32") == objective.model
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_fused_attention_matrix_is_query_key_value(tmp_path, tokenizer):
    objective = our_objective("a", tokenizer)
    params = random_params(objective)
    export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = unstack(params["decoder"]["layers"])[1]["attention"]
    fused = model.transformer.h[1].attn.c_attn.weight.detach().numpy()
    assert fused.shape == (32, 96)
    for i, name in enumerate(("query", "key", "value")):
        np.testing.assert_array_equal(fused[:, 32 * i : 32 * (i + 1)], ours[name]["kernel"])


def test_older_files(tmp_path, tokenizer):
    """Names of the bare model, with causal masks as buffers, as in the published files."""
    from safetensors.numpy import load_file, save_file

    model = torch_gpt2("a", tokenizer)
    folder = save_torch(model, tmp_path / "hf", tokenizer)
    stored = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): array for name, array in stored.items()}
    tensors |= {f"h.{i}.attn.bias": np.tri(40, dtype=np.float32)[None, None] for i in range(2)}
    save_file(tensors, folder / "model.safetensors")
    imported = import_folder(folder)
    assert decoder_difference(imported.objective, imported.params, model, 9, True) < TOLERANCE


@pytest.mark.parametrize("key, value", [
    ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True), ("scale_attn_weights", False),
    ("activation_function", "mish"), ("embd_pdrop", 0.3), ("n_layer", "two"), ("is_causal", False),
])
def test_unsupported_configurations_are_refused(key, value, tmp_path, tokenizer):
    folder = save_torch(torch_gpt2("a", tokenizer), tmp_path / "hf", tokenizer)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=key):
        import_folder(folder)


@pytest.mark.parametrize("name", first_fast(SIZES))
def test_greedy_continuations_are_theirs(name, tmp_path, tokenizer):
    """Prompts of different lengths, padded on the left; some continuations stop early, some never."""
    model = torch_gpt2(name, tokenizer, seed=2)
    imported = import_folder(save_torch(model, tmp_path / "hf", tokenizer))
    eos, rng = tokenizer.vocabulary.eos, np.random.default_rng(5)
    prompts = [rng.integers(0, eos, n).tolist() for n in (3, 9, 1, 6, 14)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[eos] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    def theirs(stop: int) -> list[list[int]]:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=stop, pad_token_id=stop
            )
        rows = out[:, longest:].tolist()
        return [row[: row.index(stop) + 1] if stop in row else row for row in rows]

    wanted = theirs(eos)
    assert len({tuple(row) for row in wanted}) > 2  # the prompts have an effect
    assert generate(imported.objective, imported.params, prompts, max_new_tokens=20) == wanted
    stop = wanted[0][3]  # a symbol that is generated
    wanted = theirs(stop)
    assert min(map(len, wanted)) < 20
    assert generate(imported.objective, imported.params, prompts, max_new_tokens=20, stop_ids=[stop]) == wanted


def test_exported_generation_settings(tmp_path, tokenizer):
    """`generate` of an exported folder stops at our end symbol by default."""
    objective = our_objective("a", tokenizer)
    export_folder(tmp_path / "out", objective, random_params(objective), tokenizer, ModelCard())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == tokenizer.vocabulary.eos
    assert model.generation_config.pad_token_id is not None


@pytest.mark.parametrize("plain_stream", first_fast([False, True]))
def test_the_begin_token_is_that_of_the_plain_stream(plain_stream, tmp_path, tokenizer):
    objective = dataclasses.replace(our_objective("a", tokenizer), plain_stream=plain_stream)
    export_folder(tmp_path / "out", objective, random_params(objective), tokenizer, ModelCard())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    begin = tokenizer.vocabulary.eos if plain_stream else None
    assert (model.config.bos_token_id, model.generation_config.bos_token_id) == (begin, begin)
    assert import_folder(tmp_path / "out").objective.plain_stream == plain_stream


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_text_begins_in_an_export_as_in_its_run(family, tmp_path, tokenizer):
    """In plain streams after the end of the previous text; the begin token of an import stays."""
    tokenizer = tokenizer.with_roles({"bos": "<s>"})
    objective, v = our_objective("a", tokenizer), tokenizer.vocabulary
    if family == "llama":
        sizes = dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)
        objective = CausalLM(model=Llama(vocab_size=v.size, max_positions=32, **sizes)).bind_unchecked(v)
    objective = dataclasses.replace(objective, plain_stream=True)
    params = random_params(objective)
    for step, begin in ((0, v.bos), (5, v.eos)):
        out = export_folder(tmp_path / str(step), objective, params, tokenizer, ModelCard(), step=step)
        own, theirs = PretrainedModel(objective, params, tokenizer, step=step), AutoTokenizer.from_pretrained(out)
        assert text_begin(own) == text_begin(import_folder(out)) == begin
        for config in (transformers.AutoConfig, transformers.GenerationConfig):
            assert config.from_pretrained(out).bos_token_id == theirs.bos_token_id == begin
        assert theirs.eos_token_id == v.eos != v.bos and theirs("<s>").input_ids == tokenizer.encode_with_symbols("<s>")
