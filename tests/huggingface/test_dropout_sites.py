"""Where each family drops what, in training: shapes and rates, counted in a layer of ours and of Transformers'."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers

from jaxlm.huggingface.families import family_of
from jaxlm.models.base import Inputs
from jaxlm.models.layers import attention, dropout
from tests.huggingface.test_families import EXPORTED, objective_of

ONE_RATE = ("T5", "Xlnet")
"""Models whose class has one rate for attention and the rest."""
IN_SUITE = ("Bert", "Gpt2", "T5", "Xlnet", "Deberta")
LENGTH, TARGET = 24, 20
# Reformer's class drops in chunks, and ModernBERT's where its training did not.
WITHOUT = ("Reformer", "ModernBert", "ModernBertDecoder")
MODELS = {system.model.__name__: system for system in EXPORTED if system.model.__name__ not in WITHOUT}


def small(system) -> tuple[object, object]:
    """Return an objective of one layer and its model in Transformers."""
    objective = objective_of(system)
    names = {field.name for field in dataclasses.fields(objective.model)}
    attention_rate = 0.1 if system.model.__name__ in ONE_RATE else 0.2
    rates = dict(dropout=0.1, attention_dropout=attention_rate, embedding_dropout=0.3)
    if objective.model.dropout == 0:  # the classes of the Llama line have none but in attention
        del rates["dropout"]
    sizes = dict(
        hidden_size=64, num_layers=1, num_heads=4, intermediate_size=256, head_dim=16, num_kv_heads=2, vocab_size=60
    )
    changes = {name: value for name, value in (rates | sizes).items() if name in names}
    objective = dataclasses.replace(objective, model=dataclasses.replace(objective.model, **changes))
    exported = family_of(objective).models(objective)[0]
    config = transformers.AutoConfig.for_model(**exported.config)
    config._attn_implementation = "eager"
    return objective, getattr(transformers, exported.architecture)(config).train()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.slow) for name in MODELS
])
def test_dropout_is_where_transformers_has_it(name, monkeypatch):
    objective, theirs = small(MODELS[name])
    model, found, expected = objective.model, collections.Counter(), collections.Counter()
    scores = attention._attention

    def count(sites, shape, rate):
        sites[tuple(sorted(shape)), round(rate, 3)] += 1  # XLNet's class has the rows on another axis

    def drop(x, p=0.5, training=True, inplace=False):
        if training and p:
            count(expected, x.shape, p)
        return x

    def attend(query, key, value, bias, visible, seeds, scale, rate):
        if seeds is not None:
            count(found, (len(query), query.shape[2], query.shape[1], key.shape[1]), rate)
        return scores(query, key, value, bias, visible, None, scale, rate)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    monkeypatch.setattr(dropout, "_dropout", lambda x, seeds, rate: count(found, x.shape, rate) or x)
    monkeypatch.setattr(attention, "_attention", attend)

    def encode(params, key):
        inputs = Inputs(jnp.zeros((3, LENGTH), jnp.int32))
        hidden = model.hidden_states(params, inputs, key=key)
        if theirs.config.is_encoder_decoder:
            model.decoder_states(params, inputs.ids[:, :TARGET], hidden, inputs.mask, key=key)
        return hidden

    ids = torch.zeros((3, LENGTH), dtype=torch.long)
    theirs(input_ids=ids, **{"decoder_input_ids": ids[:, :TARGET]} if theirs.config.is_encoder_decoder else {})
    jax.eval_shape(encode, jax.eval_shape(objective.init, jax.random.key(0)), jax.random.key(1))
    if name == "Albert":  # its class lacks that of the feed-forward output, which the original has
        expected[tuple(sorted((3, LENGTH, 64))), 0.1] += 1
    if name.startswith("Deberta"):  # ours drops those of the distances that a row of this length has
        expected[(2 * LENGTH + 1, 64), 0.1] = expected.pop(((64, 512), 0.1))
    if name == "Xlnet":  # as in Transformer-XL, rows share the distances of their direction
        expected[(2, 2 * LENGTH, 64), 0.1] = expected.pop(((3, 2 * LENGTH, 64), 0.1))
    assert found == expected and len(found) > 0
