"""BERT's sizes, and options that must not change its outputs.

tests/huggingface/test_bert.py compares it with Transformers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.next_sentence import NEXT_SENTENCE
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.params import first_fast

SMALL = Bert(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=12)


def count(model: Bert, next_sentence: bool = True) -> dict[str, int]:
    """Return the number of parameters by top-level name."""
    objective = MaskedLM(model=model, input_format="next-sentence" if next_sentence else "document")
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    return {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in shapes.items()}


@pytest.mark.parametrize(
    ("size", "vocabulary", "pretraining"),
    first_fast([
        ("base", 28996, 108_932_934), ("tiny", 30522, 4_433_468), ("mini", 30522, 11_267_900),
        ("small", 30522, 29_058_876), ("medium", 30522, 41_668_412), ("base", 30522, 110_106_428),
        ("large", 30522, 336_226_108), ("large", 28996, 334_661_958),
    ]),
)
def test_published_parameter_counts(size, vocabulary, pretraining):
    assert sum(count(Bert.published(size, vocab_size=vocabulary)).values()) == pretraining


@pytest.mark.parametrize(
    ("size", "encoder", "with_pooler", "masked_lm"),
    first_fast([
        ("base", 108_891_648, 109_482_240, 109_514_298),
        ("tiny", 4_369_408, 4_385_920, 4_416_698),
        ("large", 334_092_288, 335_141_888, 335_174_458),
    ]),
)
def test_parameter_counts_by_part(size, encoder, with_pooler, masked_lm):
    model = Bert.published(size)
    parts = count(model)
    assert parts["embeddings"] + parts["encoder"] == encoder
    assert encoder + parts["pooler"] == with_pooler
    assert sum(count(model, next_sentence=False).values()) == masked_lm


@pytest.mark.slow
def test_grid_of_miniatures():
    """The 24 published miniatures, with pooler and without heads."""
    grid = {
        2: (4_385_920, 9_591_040, 22_458_880, 38_603_520), 4: (4_782_464, 11_170_560, 28_763_648, 52_779_264),
        6: (5_179_008, 12_750_080, 35_068_416, 66_955_008), 8: (5_575_552, 14_329_600, 41_373_184, 81_130_752),
        10: (5_972_096, 15_909_120, 47_677_952, 95_306_496), 12: (6_368_640, 17_488_640, 53_982_720, 109_482_240),
    }
    for layers, expected in grid.items():
        for hidden, total in zip((128, 256, 512, 768), expected, strict=True):
            parts = count(Bert(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64,
                                     intermediate_size=4 * hidden))
            assert parts["embeddings"] + parts["encoder"] + parts["pooler"] == total


@pytest.fixture(scope="module")
def params():
    return jax.jit(SMALL.init)(jax.random.key(0))


def inputs(rows: int = 2, length: int = 9):
    ids = jax.random.randint(jax.random.key(1), (rows, length), 1, SMALL.vocab_size)
    return ids, jnp.zeros_like(ids).at[:, 5:].set(1)


@functools.partial(jax.jit, static_argnums=0)
def encode(model, params, ids, types, mask=None, key=None):
    return model.hidden_states(params, Inputs(ids, types, mask), key=key)


@pytest.mark.slow  # test_gpt2.py has the same of GPT-2
def test_initial_values_follow_the_paper():
    model = Bert(vocab_size=500, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128)
    params = jax.jit(model.init)(jax.random.key(3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name == "bias":
            assert not leaf.any()
        elif name == "scale":
            assert (leaf == 1).all()
        else:  # truncated at two standard deviations without rescaling: 0.8796 of the nominal deviation remains
            assert jnp.abs(leaf).max() <= 2 * model.init_std
            # Four standard errors; those of the standard deviation of n values are about std / √(2n).
            assert abs(float(leaf.std()) / (0.8796 * model.init_std) - 1) < 4 / (2 * leaf.size) ** 0.5
    first, second = np.asarray(params["encoder"]["layers"]["mlp"]["wi"]["kernel"])
    assert not np.array_equal(first, second)


@pytest.mark.slow  # tests/huggingface/test_bert.py compares padded rows
def test_padding_does_not_change_other_tokens(params):
    ids, types = inputs()
    plain = encode(SMALL, params, ids, types)
    padded_ids = jnp.pad(ids, ((0, 0), (0, 3)), constant_values=7)
    mask = jnp.pad(jnp.ones_like(ids), ((0, 0), (0, 3)))
    padded = encode(SMALL, params, padded_ids, jnp.pad(types, ((0, 0), (0, 3))), mask)
    np.testing.assert_allclose(padded[:, :9], plain, atol=2e-6)
    # Without the mask, tokens would attend to the padding.
    unmasked = encode(SMALL, params, padded_ids, jnp.pad(types, ((0, 0), (0, 3))))
    assert np.abs(np.asarray(unmasked[:, :9] - plain)).max() > 1e-3


@pytest.mark.slow  # tests/huggingface/test_bert.py compares them
def test_outputs_depend_on_every_input(params):
    ids, types = inputs()
    plain = np.asarray(encode(SMALL, params, ids, types))
    for changed in ((ids.at[:, 8].set(ids[:, 8] % 40 + 1), types), (ids, 1 - types), (ids[:, ::-1], types)):
        assert np.abs(np.asarray(encode(SMALL, params, *changed)) - plain)[:, 0].max() > 1e-4


@pytest.mark.slow  # test_gpt2.py has it
def test_remat_changes_neither_loss_nor_gradients(params):
    ids, types = inputs()

    def gradients(remat):
        model = dataclasses.replace(SMALL, remat=remat)

        def loss(params):  # dropout masks must be equal in the second forward pass
            return jnp.mean(model.hidden_states(params, Inputs(ids, types), key=jax.random.key(2, impl="rbg")) ** 3)

        return jax.jit(jax.value_and_grad(loss))({name: params[name] for name in ("embeddings", "encoder")})

    expected = gradients("none")
    assert np.abs(expected[1]["encoder"]["layers"]["mlp"]["wi"]["kernel"][0]).max() > 1e-4
    for remat in ("dots", "full"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, gradients(remat))


@pytest.mark.parametrize("changes", [
    {}, *(pytest.param(changes, marks=pytest.mark.slow) for changes in (
        {"remat": "full", "loop_layers": True}, {"last_layer_at_positions": False})),
])
def test_states_at_positions_equal_those_of_all_positions(params, changes):
    ids, types = inputs()
    model = dataclasses.replace(SMALL, **changes)
    mask = jnp.ones_like(ids).at[1, 7:].set(0)
    positions = jnp.array([[0, 8, 3, 3], [6, 0, 1, 2]])

    def few(params):
        return model.hidden_states(params, Inputs(ids, types, mask), at=positions)

    def whole(params):
        return jnp.take_along_axis(SMALL.hidden_states(params, Inputs(ids, types, mask)), positions[..., None], axis=1)

    def gradients(function):
        loss = jax.jit(jax.grad(lambda params: jnp.sum(function(params) ** 3)))
        return loss({name: params[name] for name in ("embeddings", "encoder")})

    np.testing.assert_allclose(jax.jit(few)(params), jax.jit(whole)(params), atol=2e-6)
    expected = gradients(whole)
    assert np.abs(expected["encoder"]["layers"]["mlp"]["wi"]["kernel"]).max((1, 2)).min() > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients(few), expected)


class Biased(Bert):
    """Has a bias of its own on attention, and a mask that differs between queries and rows."""

    def _embed(self, params, inputs, key):
        x, shared = super()._embed(params, inputs, key)
        length = inputs.ids.shape[1]
        far = jnp.arange(length)[:, None] - jnp.arange(length)
        mask = (far != 2) | (inputs.ids[:, None, :, None] % 2 == 0)
        visible = shared.visible._replace(mask=mask, bias=-jnp.array([0.5, 2.0])[None, :, None, None] * abs(far))
        return x, shared._replace(visible=visible)


@pytest.mark.parametrize(("rate", "slots"), [(0.2, 2), (0.99, SMALL.max_positions)])
def test_the_last_layer_has_the_masks_and_biases_of_its_positions(rate, slots):
    """With as many positions as tokens, too, where no shape would tell wrong rows."""
    length, found = SMALL.max_positions, []
    tokens = np.random.default_rng(0).integers(20, 50, (3, length - 2)).astype(np.int32)
    for last in (True, False):
        model = Biased(**dataclasses.asdict(SMALL) | {"last_layer_at_positions": last, "init_std": 0.3})
        objective = MaskedLM(model=model, mask_rate=rate, input_format="document").bind(Vocabulary.stand_in(50), length)
        example = objective.corrupt(jax.random.key(1), TokenBatch(tokens, np.ones_like(tokens)))
        assert example["masked_positions"].shape == (3, slots)

        def loss(params, objective=objective, example=example):
            return total_loss(objective.loss(params, example, jax.random.key(2), False))

        found.append(jax.jit(jax.value_and_grad(loss))(jax.jit(objective.init)(jax.random.key(0))))
    assert np.abs(found[0][1]["encoder"]["layers"]["attention"]["query"]["kernel"]).max((1, 2)).min() > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)


def test_the_last_layer_computes_only_the_positions():
    model = Bert(vocab_size=50, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=256)
    params = jax.eval_shape(model.init, jax.random.key(0))
    ids = jnp.zeros((2, 128), jnp.int32)

    def flops(positions):
        run = jax.jit(lambda params: model.hidden_states(params, Inputs(ids), at=positions))
        return run.lower(params).compile().cost_analysis()["flops"]

    # Keys and values at 128 positions, the rest at 4: about a third of the layer, so two thirds of both layers.
    assert flops(jnp.zeros((2, 4), jnp.int32)) < 0.68 * flops(None)


@pytest.mark.slow
def test_remat_policies_keep_less_and_less(params):
    """Residual bytes of the backward pass: everything > results of matrix products > inputs of the layers."""
    ids, types = inputs()

    def kept(remat):
        model = dataclasses.replace(SMALL, remat=remat)
        run = lambda params: jax.vjp(lambda p: model.hidden_states(p, Inputs(ids, types)), params)[1]  # noqa: E731
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(run, params)))

    everything, dots, inputs_only = kept("none"), kept("dots"), kept("full")
    # The products of a layer: query, key, value, out and the feed-forward's two.
    products = SMALL.num_layers * ids.size * 4 * (5 * SMALL.hidden_size + SMALL.intermediate_size)
    assert everything > dots >= inputs_only + 0.9 * products


@pytest.mark.slow  # test_gpt2.py has it
def test_dropout_needs_a_key(params):
    ids, types = inputs()
    quiet = encode(SMALL, params, ids, types)
    noisy = [encode(SMALL, params, ids, types, None, jax.random.key(seed, impl="rbg")) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert np.abs(np.asarray(noisy[0] - noisy[2])).max() > 0.1
    off = dataclasses.replace(SMALL, dropout=0.0, attention_dropout=0.0)
    np.testing.assert_allclose(encode(off, params, ids, types, None, jax.random.key(1, impl="rbg")), quiet, atol=2e-6)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32_and_has_float32_logits(params):
    ids, types = inputs()
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    hidden = encode(half, params, ids, types)
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(hidden.astype(jnp.float32), encode(SMALL, params, ids, types), atol=0.1)
    params = params | jax.jit(functools.partial(NEXT_SENTENCE.init, half))(jax.random.key(4))
    assert half.predict_tokens(params, hidden[:, :1]).dtype == jnp.float32
    assert NEXT_SENTENCE.predict(half, params, hidden).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "hidden_size 16 is not divisible by num_heads 3"),
        ({"num_layers": 0}, r"num_layers is 0; it must be in \[1, 1000\]"),
        ({"dropout": 1.0}, r"dropout is 1\.0; it must be in \[0, 1\)"),
        ({"attention_dropout": -0.1}, r"attention_dropout is -0\.1"),
        ({"num_heads": 0}, r"num_heads is 0; it must be in \[1, "),
        ({"type_vocab_size": -1}, r"type_vocab_size is -1; it must be in \[0, "),
        ({"norm_eps": -1.0}, r"norm_eps is -1\.0; it must be in \(0, inf\)"),
    ],
)
def test_invalid_configurations(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.slow
def test_a_model_without_segment_types_has_no_embedding_of_them():
    model = dataclasses.replace(SMALL, type_vocab_size=0)
    params = jax.jit(model.init)(jax.random.key(0))
    assert set(params["embeddings"]) == {"word", "position", "norm"}
    assert jax.jit(model.hidden_states)(params, Inputs(inputs()[0])).shape == (2, 9, 16)


def test_layer_states_are_the_inputs_of_all_layers_and_the_output(params):
    ids, types = inputs()
    (first, second, last), scores = jax.jit(SMALL.layer_states)(params, Inputs(ids, types))
    assert [x.shape for x in scores] == [(2, SMALL.num_heads, 9, 9)] * 2
    np.testing.assert_allclose(last, encode(SMALL, params, ids, types), atol=1e-6)
    one = dataclasses.replace(SMALL, num_layers=1)
    of_one = params | {"encoder": jax.tree.map(lambda leaf: leaf[:1], params["encoder"])}
    np.testing.assert_allclose(second, encode(one, of_one, ids, types), atol=1e-6)
    assert np.abs(np.asarray(first - second)).max() > 1e-3
