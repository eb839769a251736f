"""The Llama families, Nomic BERT, GTE and mmBERT as published: sizes, FLOPs, initial weights; refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.models.llama import EuroBert, Gemma3, Llama, Mistral, Qwen3
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.params import first_fast

CONFIGS = Path(__file__).parents[2] / "configs"
# Of Transformers' classes, built from the published configurations.
COUNTS = {
    "eurobert_210m": 310_266_624, "eurobert_610m": 755_625_600, "eurobert_2_1b": 2_403_092_736,
    "smollm2_135m": 134_515_008, "smollm2_360m": 361_821_120, "llama_3_2_1b": 1_235_814_400,
    "qwen3_0_6b": 596_049_920, "gemma3_270m": 268_098_176, "nomic_base": 137_354_304,
    "mmbert_small": 140_897_536, "mmbert_base": 307_786_240,
}


def count(model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes(name):
    assert count(load_preset(str(CONFIGS / f"{name}.py")).objective.model) == COUNTS[name]


def test_sizes_without_presets():
    assert count(Llama.published("3.2-3b")) == 3_212_749_824
    assert count(Mistral.published("7b")) == 7_241_732_096  # mistralai/Mistral-7B-v0.1
    assert count(Gte.published("multilingual-base")) == 306_210_496


def test_rows_of_post_norm_models_are_a_multiple_of_64():
    """Nomic's 30,528 of 30,522 ids, GTE's 250,048 of 250,002. GTE drops out the product with the gate, too."""
    for model, ids in ((NomicBert.published("base"), 30_522), (Gte.published("multilingual-base"), 250_002)):
        assert type(model)().for_vocabulary(Vocabulary.stand_in(ids)).vocab_size == model.vocab_size
        stack = dataclasses.replace(model, dropout=0.3).stack
        assert (stack.dropout, stack.mlp_dropout) == (0.3, None)
        assert stack.intermediate_dropout == (0.3 if type(model) is Gte else 0.0)


# GFLOP of a row's forward pass, from L·(n·(4hd(H + K) + 6hf) + 4Hd·n²) + predicted·2hV.
@pytest.mark.parametrize(("size", "length", "predicted", "expected"), [
    ("210m", 2048, 1024, 820.2), ("210m", 8192, 819, 4490.7), ("610m", 2048, 1024, 2689.5),
    ("610m", 8192, 819, 15819.9), ("2.1b", 2048, 1024, 9263.8), ("2.1b", 8192, 819, 49962.1),
])
def test_flops_count_the_few_heads(size, length, predicted, expected):
    assert EuroBert.published(size).forward_flops(length, predicted) / 1e9 == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("model", first_fast([EuroBert, Qwen3, Gemma3]))
def test_initial_weights(model):
    """One normal for all matrices, not cut; norms are 1, stored as 0 in Gemma, and there are no biases."""
    own = model(vocab_size=900, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, num_layers=4,
                intermediate_size=160, tied_head=False)
    params = jax.jit(own.init)(jax.random.key(0))
    layers = params["encoder"]["layers"]
    assert layers["attention"]["key"]["kernel"].shape == (4, 64, 2 * 32)
    assert ("query_norm" in layers["attention"]) == (model is not EuroBert)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "scale":
            assert np.all(leaf == (model is not Gemma3))
        else:
            assert path[-1].key in ("kernel", "embedding")
            assert np.std(leaf) == pytest.approx(0.02, rel=0.03) and np.max(np.abs(leaf)) > 3 * 0.02


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_kv_heads": 5}, "num_heads 12 is not divisible by num_kv_heads 5"),
    ({"num_kv_heads": 0}, "num_kv_heads is 0"),
    ({"head_dim": 7}, "head_dim is 7"), ({"activation": "relu"}, "activation is relu"),
    ({"num_heads": 10, "num_kv_heads": 5}, "768 is not divisible by num_heads 10"),
    *(({"rope_scaling": scaling}, "rope_scaling is") for scaling in (
        (0.0,), (2.0, 1.0), (8.0, 4.0, 1.0, 64.0), (8.0, 1.0, 4.0, 0.0))),
])
def test_invalid_configurations(changes, words):
    with pytest.raises(UserError, match=words):
        EuroBert(**changes)


def test_a_window_of_no_token_is_refused():
    with pytest.raises(UserError, match="window is 0"):
        Mistral(window=0)
