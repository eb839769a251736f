"""ERNIE's sizes, its equality with BERT without entities, and options that must not change its outputs.

tests/knowledge/test_entity_autoencoder.py compares layers and losses with the formulas in PyTorch.
"""

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
from jaxlm.huggingface.bert import table
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.models.base import Inputs

SMALL = Ernie(
    vocab_size=50, hidden_size=16, num_layers=5, num_text_layers=2, num_heads=2, intermediate_size=32, max_positions=12,
    entity_hidden_size=12, entity_num_heads=3, dropout=0.0, attention_dropout=0.0,
)


def random_params(model: Ernie, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: model.init(key) | {"pooler": model.init_pooler(key)}, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: rng.normal(path[-1].key == "scale", 0.3, leaf.shape).astype(np.float32), shapes
    )


def some_inputs(rows: int = 4, length: int = 11, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    sizes = np.array([length, 5, 2, 8])[:rows, None]
    mask = (np.arange(length) < sizes).astype(np.int32)
    entities = np.where((rng.random((rows, length)) < 0.4) & (mask > 0), rng.integers(0, 9, (rows, length)), -1)
    return Inputs(
        rng.integers(5, 50, (rows, length)), rng.integers(0, 2, (rows, length)), mask,
        entities=jnp.asarray(entities, jnp.int32),
        entity_vectors=jnp.asarray(rng.normal(size=(9, 12)), jnp.float32)[entities],
    )


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, inputs, at=None):
    return model.hidden_states(params, inputs, at=at)


def test_published_parameter_counts():
    objective = EntityAutoencoder(model=Ernie.published("base"))
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    counts = {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in shapes.items()}
    assert sum(counts.values()) == 114_751_532
    assert sum(counts[name] for name in ("embeddings", "encoder", "entity_encoder", "pooler")) == 114_050_244


@pytest.mark.slow
def test_without_entities_and_their_weights_it_is_bert():
    params, inputs = random_params(SMALL), some_inputs()
    for part in params["entity_encoder"].values():  # W_e = b_e = 0
        part["mlp"]["wi"] = jax.tree.map(np.zeros_like, part["mlp"]["wi"])
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=5, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12,
    )
    bert = transformers.BertModel(config).eval()
    names = {name.removeprefix("bert."): torch.from_numpy(np.array(array))
             for name, array in table(False).to_transformers(params) if name.startswith("bert.")}
    names |= {f"pooler.dense.{end}": torch.from_numpy(array.T.copy())
              for end, array in (("weight", params["pooler"]["kernel"]), ("bias", params["pooler"]["bias"]))}
    bert.load_state_dict(names)
    with torch.no_grad():
        theirs = bert(*(torch.tensor(np.asarray(x)) for x in (inputs.ids, inputs.mask, inputs.token_types)))
    ours = run(SMALL, params, inputs)
    real = np.asarray(inputs.mask) > 0
    np.testing.assert_allclose(np.asarray(ours)[real], theirs.last_hidden_state.numpy()[real], atol=1e-5)
    np.testing.assert_allclose(jax.jit(SMALL.pool)(params, ours), theirs.pooler_output.numpy(), atol=1e-5)


@pytest.mark.slow
def test_options_that_change_nothing():
    params, inputs = random_params(SMALL), some_inputs()
    expected = run(SMALL, params, inputs)
    for changes in (dict(remat="full"), dict(loop_layers=True, remat="cheap")):
        np.testing.assert_allclose(run(dataclasses.replace(SMALL, **changes), params, inputs), expected, atol=2e-6)
    at = jnp.array([[0, 3, 3, 7], [0, 1, 4, 0], [1, 0, 0, 0], [7, 2, 5, 0]])
    chosen = np.take_along_axis(np.asarray(expected), np.asarray(at)[..., None], axis=1)
    for last in (True, False):
        model = dataclasses.replace(SMALL, last_layer_at_positions=last)
        np.testing.assert_allclose(run(model, params, inputs, at), chosen, atol=2e-6)
    few = dataclasses.replace(SMALL, num_text_layers=3)  # one layer with attention over entities
    few_params = random_params(few)
    at_few = run(few, few_params, inputs, at)
    np.testing.assert_allclose(
        at_few, np.take_along_axis(np.asarray(run(few, few_params, inputs)), np.asarray(at)[..., None], 1), atol=2e-6
    )


@pytest.mark.slow
def test_a_vector_without_an_entity_and_text_without_entities():
    params, inputs = random_params(SMALL), some_inputs()
    expected = run(SMALL, params, inputs)
    noise = jnp.where((inputs.entities < 0)[..., None], 99.0, inputs.entity_vectors)
    np.testing.assert_array_equal(run(SMALL, params, inputs._replace(entity_vectors=noise)), expected)
    none = inputs._replace(entities=jnp.full_like(inputs.entities, -1))
    plain = run(SMALL, params, inputs._replace(entities=None, entity_vectors=None))
    np.testing.assert_array_equal(run(SMALL, params, none), plain)
    assert np.abs(np.asarray(plain - expected)).max() > 0.1


def test_impossible_sizes():
    with pytest.raises(UserError, match="leaves fewer than two of the 12 layers to entities"):
        Ernie(num_text_layers=11)
    with pytest.raises(UserError, match="entity_hidden_size 100 is not divisible by entity_num_heads 3"):
        Ernie(entity_num_heads=3)
    with pytest.raises(UserError, match="cannot teach its hidden layers"):
        SMALL.layer_states({}, some_inputs())
