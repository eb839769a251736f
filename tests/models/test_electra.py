"""ELECTRA's networks: published sizes, shared parameters, padded rows."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.electra import Electra
from jaxlm.models.layers.stack import call
from tests.params import first_fast, random_params

SMALL = Electra(
    vocab_size=90, embedding_size=12, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
    generator_hidden_size=8, generator_num_layers=1, generator_num_heads=2, generator_intermediate_size=16,
    max_positions=24, init_std=0.3,
)


def shapes(model: Electra):
    return jax.eval_shape(model.init, jax.random.key(0))


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("size", "discriminator", "generator", "joint"),
    first_fast([
        ("small", 13_549_057, 4_620_026, 14_196_219),
        ("small++", 13_549_057, 13_546_682, 23_122_875),
        ("base", 109_483_009, 33_740_602, 119_386_427),
        ("large", 335_142_913, 51_295_290, 354_655_291),
    ]),
)
def test_published_parameter_counts(size, discriminator, generator, joint):
    model = Electra.published(size)
    found = shapes(model)
    assert count(model.discriminator_params(found)) + count(found["rtd_head"]) == discriminator
    assert count(model.generator_params(found)) == generator
    assert count(found) == joint


@pytest.mark.parametrize(
    ("width", "joint"), first_fast([(192, 18_967_675), (64, 14_196_219), (128, 15_975_611), (256, 23_122_875)])
)
def test_sweep_of_generator_widths(width, joint):
    model = Electra.published(
        "small", generator_hidden_size=width, generator_num_heads=width // 64, generator_intermediate_size=4 * width
    )
    assert count(shapes(model)) == joint


def test_a_projection_exists_only_if_widths_differ():
    found = shapes(Electra.published("base"))
    assert "projection" in found["generator"] and "projection" not in found["discriminator"]


def test_separate_embeddings_are_a_second_copy():
    shared = shapes(SMALL)
    separate = shapes(Electra(**(vars(SMALL) | {"share_embeddings": False})))
    assert count(separate) - count(shared) == count(shared["embeddings"])


@pytest.mark.parametrize("network", ["generator", pytest.param("discriminator", marks=pytest.mark.slow)])
def test_no_token_attends_to_padding(network):
    own = getattr(SMALL, network)
    params = getattr(SMALL, f"{network}_params")(random_params(SMALL))
    encode = jax.jit(lambda params, ids, mask: own.hidden_states(params, Inputs(ids, mask=mask)))
    ids = jax.random.randint(jax.random.key(1), (1, 20), 0, 90)
    mask = (jnp.arange(20) < 13)[None]
    padded = encode(params, ids, mask)
    alone = encode(params, ids[:, :13], None)
    np.testing.assert_allclose(padded[:, :13], alone, atol=1e-5)
    other = encode(params, ids, jnp.ones_like(mask))
    assert np.abs(other[:, :13] - alone).max() > 1e-2  # it would change without the mask


def test_logits_are_float32_in_bfloat16():
    model = Electra(**(vars(SMALL) | {"dtype": "bfloat16"}))
    params = shapes(model)
    ids = jnp.ones((2, 7), jnp.int32)
    own = model.generator_params(params)
    hidden = jax.eval_shape(model.generator.hidden_states, own, Inputs(ids))
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(model.generator.predict_tokens, own, hidden).dtype == jnp.float32
    hidden = jax.eval_shape(model.hidden_states, params, Inputs(ids))
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(functools.partial(call, model.replaced_head), params["rtd_head"], hidden).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 18, "num_heads": 4}, "hidden_size 18 is not divisible by num_heads 4"),
        ({"generator_num_heads": 3}, "generator_hidden_size 256 is not divisible by generator_num_heads 3"),
        ({"generator_num_layers": 0}, "generator_num_layers is 0"),
        ({"embedding_size": 0}, "embedding_size is 0"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0"),
        ({"norm_eps": float("nan")}, r"norm_eps is nan; it must be in \(0, inf\)"),
    ],
)
def test_invalid_configurations(changes, message):
    with pytest.raises(UserError, match=message):
        Electra(**changes)
