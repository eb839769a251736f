"""The Reformer against ReformerModelWithLMHead: logits both directions, loss and gradients, greedy continuations.

No part of theirs is replaced: with their `hash_seed` both have the same rotations.
"""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.reformer import FAMILY, default_buckets
from jaxlm.inference.generate import generate
from jaxlm.models.layers.chunked import torch_normal
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.base import total_loss
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from jaxlm.types import TokenBatch
from tests.huggingface.support import decoder_difference, decoder_logits, read_json
from tests.params import first_fast

TOLERANCE = 1e-4
SIZES = {
    "a": dict(
        hidden_size=24, attn_layers=["local", "lsh"] * 2, num_attention_heads=3, attention_head_size=8,
        feed_forward_size=32, axial_pos_shape=[8, 12], axial_pos_embds_dim=[8, 16], local_attn_chunk_length=4,
        lsh_attn_chunk_length=6, num_hashes=3, num_buckets=[4, 6], hash_seed=0,
    ),
    "b": dict(
        hidden_size=16, attn_layers=["lsh"], num_attention_heads=2, attention_head_size=12, feed_forward_size=20,
        axial_pos_shape=[16, 6], axial_pos_embds_dim=[12, 4], lsh_attn_chunk_length=8, num_hashes=1, num_buckets=8,
        hash_seed=7, hidden_act="gelu", layer_norm_eps=1e-3,
    ),
}
BATCHES = [(7, False), (96, True)]  # one chunk and many; each length compiles anew


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = [" ".join(f"{a}{b}s the tree, {b}{a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    return train_tokenizer(texts, tmp_path_factory.mktemp("bpe"), kind="byte-bpe", vocab_size=380)


def save(sizes: dict, tokenizer: Tokenizer, folder, **changes):
    """Save a model with random weights and return it with its folder; unit norms would hide a mix-up.

    Their class has two output biases, of which it adds the decoder's.
    """
    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        **(sizes | dict(vocab_size=tokenizer.vocabulary.size, is_decoder=True, initializer_range=0.2) | changes),
        eos_token_id=tokenizer.vocabulary.eos, pad_token_id=tokenizer.vocabulary.pad,
        max_position_embeddings=math.prod(sizes["axial_pos_shape"]),
    )
    model = transformers.ReformerModelWithLMHead(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if name != "lm_head.bias" else 0.0))
    model.save_pretrained(folder)
    export(tokenizer, folder, Reformer.template, math.prod(config.axial_pos_shape))
    return model, folder


@pytest.mark.parametrize("name", first_fast(SIZES))
def test_logits_in_both_directions(name, tmp_path, tokenizer):
    model, folder = save(SIZES[name], tokenizer, tmp_path / "hf")
    imported = import_folder(folder)
    objective, params = imported.objective, imported.params
    assert type(objective.model) is Reformer and not imported.fresh
    for length, padded in BATCHES:
        assert decoder_difference(objective, params, model, length, padded) < TOLERANCE
    export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(again) is transformers.ReformerModelWithLMHead
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert decoder_difference(objective, params, again.eval(), 96, True) < TOLERANCE
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("aks the tree,", "옛날에 🙂", ""):
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    back = import_folder(tmp_path / "out")
    assert back.objective.model == objective.model
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


@pytest.mark.parametrize("seed", first_fast(range(3)))
def test_logits_of_random_sizes(seed, tmp_path, tokenizer):
    rng = np.random.default_rng(seed)
    draw = lambda low, high: int(rng.integers(low, high))  # noqa: E731
    widths = [draw(2, 12), draw(2, 12)]
    sizes = dict(
        hidden_size=sum(widths), attn_layers=[["local", "lsh"][draw(0, 2)] for _ in range(draw(1, 4))],
        num_attention_heads=draw(1, 4), attention_head_size=draw(4, 10), feed_forward_size=draw(4, 40),
        axial_pos_shape=[draw(6, 10), draw(8, 12)], axial_pos_embds_dim=widths, local_attn_chunk_length=draw(2, 7),
        lsh_attn_chunk_length=draw(2, 7), num_hashes=draw(1, 4), num_buckets=2 * draw(1, 9), hash_seed=draw(0, 2**32),
    )
    model, folder = save(sizes, tokenizer, tmp_path / "hf")
    imported = import_folder(folder)
    assert decoder_difference(imported.objective, imported.params, model, draw(20, 40), bool(seed % 2)) < TOLERANCE


@pytest.mark.slow
def test_loss_and_gradients(tmp_path, tokenizer):
    """Their reversible backward pass runs in training only, where a row has as many tokens as the grid."""
    model, folder = save(SIZES["a"], tokenizer, tmp_path / "hf", hidden_dropout_prob=0.0,
                         local_attention_probs_dropout_prob=0.0)
    imported = import_folder(folder)
    objective, rows = imported.objective, np.random.default_rng(0).integers(0, 300, (2, 97)).astype(np.int32)
    example = objective.corrupt(jax.random.key(0), TokenBatch(jnp.asarray(rows), jnp.ones_like(rows)))

    @jax.jit
    @jax.value_and_grad
    def value_and_gradients(params):
        return total_loss(objective.loss(params, example, jax.random.key(0), False))

    loss, gradients = value_and_gradients(imported.params)
    rows = torch.from_numpy(rows.astype(np.int64))
    logits = model.train()(rows[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    theirs.backward()
    assert float(loss) == pytest.approx(theirs.item(), abs=1e-5)
    own = dict(FAMILY.models(objective)[0].table.to_transformers(gradients))
    assert not np.any(own.pop("lm_head.bias")) and not np.any(own.pop("lm_head.decoder.bias"))
    for name, gradient in own.items():
        expected = model.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(SIZES))
def test_greedy_continuations_are_theirs(name, tmp_path, tokenizer):
    """From one chunk into several; a longer prompt in the batch does not change the continuation."""
    _, folder = save(SIZES[name], tokenizer, tmp_path / "hf")
    imported = import_folder(folder)
    export_folder(tmp_path / "out", imported.objective, imported.params, tokenizer, ModelCard())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, tokenizer.vocabulary.size, size).tolist() for size in (3, 3, 17, 40)]
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            out = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for row in expected for token in row}) > 10
    assert generate(imported.objective, imported.params, prompts, max_new_tokens=30, stop_ids=[]) == expected


@pytest.mark.slow
def test_an_older_files_bias_is_added(tmp_path, tokenizer):
    """A file may have one name for it; older files also have constants."""
    model, folder = save(SIZES["b"], tokenizer, tmp_path / "hf")
    tensors = model.state_dict()
    tensors["lm_head.bias"] = tensors.pop("lm_head.decoder.bias")
    tensors["reformer.encoder.layers.0.attention.self_attention.mask_value_float32"] = torch.tensor(-1e9)
    import safetensors.torch

    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    imported = import_folder(folder)
    with torch.no_grad():
        expected = model(torch.ones((1, 5), dtype=torch.int64)).logits.numpy()
    found = decoder_logits(imported.objective.model, imported.params, *[jnp.ones((1, 5), jnp.int32)] * 2)
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("shape", [(4, 8, 2, 4), (3, 5, 3, 2), (2, 128, 4, 33)])
def test_rotations_are_those_of_torch(shape):
    for seed in (0, 7, 2**32 - 1):
        torch.manual_seed(seed)
        np.testing.assert_allclose(torch_normal(seed, shape), torch.randn(shape).numpy(), atol=2e-6)


@pytest.mark.parametrize(("length", "chunk"), [(4096, 64), (65536, 256), (1 << 19, 64), (96, 6)])
def test_default_numbers_of_buckets_are_theirs(length, chunk):
    config = transformers.ReformerConfig(
        max_position_embeddings=length, lsh_attn_chunk_length=chunk, attn_layers=["lsh"], is_decoder=True
    )
    layer = transformers.models.reformer.modeling_reformer.LSHSelfAttention(config)
    layer._set_num_buckets(length)
    found = default_buckets(length, chunk)
    assert (found if len(found) > 1 else found[0]) == config.num_buckets


@pytest.mark.parametrize(
    ("key", "value"),
    [("axial_pos_embds", False), ("lsh_num_chunks_before", 2), ("local_num_chunks_after", 1), ("is_decoder", False),
     ("attn_layers", ["full"]), ("num_buckets", "many"), ("axial_pos_shape", [8, 1.5]), ("axial_pos_shape", [8])],
)
def test_unsupported_configurations_are_refused(key, value, tmp_path, tokenizer):
    _, folder = save(SIZES["a"], tokenizer, tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | {key: value}))
    with pytest.raises(UserError, match=key):
        import_folder(folder)
