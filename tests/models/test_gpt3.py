"""GPT-3: published sizes, its banded attention against GPT-Neo's local attention, and cached reading of prompts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.models.base import Inputs
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.gpt3 import Gpt3
from jaxlm.models.layers.attention import in_band
from jaxlm.models.layers.stack import unstack
from jaxlm.objectives.causal_lm import CausalLM
from tests.huggingface.support import decoder_difference
from tests.huggingface.test_gpt2 import bpe_files, tokenizer  # noqa: F401 - fixtures
from tests.params import first_fast, random_params

SMALL = Gpt3(
    vocab_size=61, hidden_size=24, num_layers=4, num_heads=3, intermediate_size=96, max_positions=48, band=5
)

@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, ids, segments=None):
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, documents=segments)))


def neo(model: Gpt3, params) -> transformers.GPTNeoForCausalLM:
    """Return GPT-Neo with the same weights: global and local layers alternate, scores have no scale.

    Queries, keys and values have no biases.
    """
    config = transformers.GPTNeoConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, num_layers=model.num_layers,
        num_heads=model.num_heads, intermediate_size=model.intermediate_size, window_size=model.band,
        max_position_embeddings=model.max_positions, attention_types=[[["global", "local"], model.num_layers // 2]],
    )
    theirs = transformers.GPTNeoForCausalLM(config).eval()

    def norm(name, own):
        return {f"{name}.weight": own["scale"], f"{name}.bias": own["bias"]}

    def dense(name, own):
        return {f"{name}.weight": own["kernel"].T, f"{name}.bias": own["bias"]}

    word = params["embeddings"]["word"]["embedding"]
    weights = {"transformer.wte.weight": word, "lm_head.weight": word,
               "transformer.wpe.weight": params["embeddings"]["position"]["embedding"]}
    weights |= norm("transformer.ln_f", params["decoder"]["final_norm"])
    for i, own in enumerate(unstack(params["decoder"]["layers"])):
        at, attention = f"transformer.h.{i}", own["attention"]
        weights |= norm(f"{at}.ln_1", own["attention_norm"]) | norm(f"{at}.ln_2", own["mlp_norm"])
        weights |= dense(f"{at}.mlp.c_fc", own["mlp"]["wi"]) | dense(f"{at}.mlp.c_proj", own["mlp"]["wo"])
        weights |= dense(f"{at}.attn.attention.out_proj", attention["out"])
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            scale = (model.hidden_size / model.num_heads) ** -0.5 if name == "query" else 1.0
            weights[f"{at}.attn.attention.{letter}_proj.weight"] = attention[name]["kernel"].T * scale
    missing = theirs.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in weights.items()}, strict=False)
    assert not missing.unexpected_keys and all("bias" in name for name in missing.missing_keys)
    return theirs


@pytest.fixture(scope="module")
def params():
    made = random_params(SMALL)
    for name in ("query", "key", "value"):
        made["decoder"]["layers"]["attention"][name]["bias"] *= 0
    return made


IDS = np.random.default_rng(1).integers(0, 61, (3, 33)).astype(np.int32)


@pytest.mark.parametrize("changes", first_fast([{}, dict(loop_layers=True), dict(remat="full", loop_layers=True)]))
def test_bands_equal_gpt_neos(changes, params):
    with torch.no_grad():
        expected = neo(SMALL, params)(torch.from_numpy(IDS.astype(np.int64))).logits.numpy()
    found = logits(dataclasses.replace(SMALL, **changes), params, jnp.asarray(IDS))
    assert np.abs(found - expected).max() < 1e-4 < 1.0 < np.abs(expected).max()
    dense = logits(dataclasses.replace(SMALL, band=0), params, jnp.asarray(IDS))
    assert np.abs(dense - expected)[:, :5].max() < 1e-4  # no distance exceeds the band yet
    assert np.abs(dense - expected)[:, 5:].max() > 0.02


def test_without_bands_it_is_gpt2(params):
    dense = dataclasses.replace(SMALL, band=0)
    gpt2 = Gpt2(**{field.name: getattr(dense, field.name) for field in dataclasses.fields(Gpt2)})
    np.testing.assert_array_equal(logits(dense, params, jnp.asarray(IDS)), logits(gpt2, params, jnp.asarray(IDS)))


@pytest.mark.slow
def test_packed_documents_have_the_logits_of_separate_rows(params):
    segments = jnp.asarray(np.repeat([[1] * 12 + [2] * 21], 3, axis=0), jnp.int32)
    whole = logits(SMALL, params, jnp.asarray(IDS), segments)
    np.testing.assert_allclose(whole[:, 12:], logits(SMALL, params, jnp.asarray(IDS[:, 12:])), atol=1e-5)


@pytest.mark.slow
def test_cached_decoding_has_the_same_logits(params):
    """Prompts padded on the left, longer than the band; then one token after another."""
    sizes, new = (20, 11, 3), 12
    prompts = np.zeros((3, 20), np.int32)
    for row, size in enumerate(sizes):
        prompts[row, 20 - size :] = IDS[row, :size]
    mask = jnp.asarray(np.arange(20) >= 20 - np.array(sizes)[:, None])
    found, state = jax.jit(SMALL.prefill, static_argnums=3)(params, jnp.asarray(prompts), mask, new)
    expected = np.asarray(logits(SMALL, params, jnp.asarray(IDS)))
    decode = jax.jit(SMALL.decode)
    for step in range(new):
        for row, size in enumerate(sizes):
            np.testing.assert_allclose(found[row], expected[row, size + step - 1], atol=1e-4)
        tokens = jnp.asarray([IDS[row, size + step] for row, size in enumerate(sizes)])
        found, state = decode(params, tokens, state)


def test_in_band():
    assert in_band(3, 5, 2, first=2)[0, 0].tolist() == [
        [False, True, True, True, False], [False, False, True, True, True], [False, False, False, True, True]
    ]


def test_flops_count_the_band_in_every_second_layer():
    model = Gpt3()
    dense = dataclasses.replace(model, band=0)
    saved = dense.forward_flops(2048) - model.forward_flops(2048)
    assert saved == 6 * 4 * 2048 * (2048 - 256) * 768
    assert model.forward_flops(128) == dense.forward_flops(128)


def test_dense_models_are_exported_as_gpt2_and_banded_ones_refused(tmp_path, tokenizer):  # noqa: F811
    model = dataclasses.replace(SMALL, vocab_size=tokenizer.vocabulary.size, band=0)
    objective = CausalLM(model=model, plain_stream=True).bind_unchecked(tokenizer.vocabulary)
    weights = random_params(model)
    export_folder(tmp_path / "out", objective, weights, tokenizer, ModelCard())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is transformers.GPT2LMHeadModel
    assert decoder_difference(objective, weights, theirs, 33, True) < 1e-4
    assert type(import_folder(tmp_path / "out").objective.model) is Gpt2
    banded = dataclasses.replace(objective, model=dataclasses.replace(model, band=5))
    with pytest.raises(UserError, match=r"objective\.model\.band 0 can be exported"):
        export_folder(tmp_path / "banded", banded, weights, tokenizer, ModelCard())


@pytest.mark.parametrize("changes", [dict(band=-1), dict(num_layers=3)])
def test_invalid_bands(changes):
    with pytest.raises(UserError, match="band"):
        dataclasses.replace(SMALL, **changes)
