"""`jaxlm.load` from Python: what the commands print."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlm
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.huggingface.sentence_transformers import Vectors
from jaxlm.inference.embed import embed
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models.base import Inputs
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from tests.huggingface.test_tasks import MODELS, Bert, Gpt2
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import random_params

TEXTS = ["the tree", "ak", "bks the tree, lb as a tree then and then"]


def loaded(kind, model, bpe, tmp_path, vectors=None):  # noqa: F811
    model = MODELS[model].for_vocabulary(bpe.vocabulary)
    objective = kind(model=model).bind_unchecked(bpe.vocabulary)
    export_folder(tmp_path / "out", objective, random_params(objective, 0), bpe, ModelCard(), vectors=vectors)
    return jaxlm.load(str(tmp_path / "out"))


def test_a_masked_model(bpe, tmp_path):  # noqa: F811
    model = loaded(MaskedLM, Bert, bpe, tmp_path)
    assert jax.tree.structure(jax.tree.map(lambda leaf: leaf, model)) == jax.tree.structure(model)
    np.testing.assert_array_equal(model.encode(TEXTS, "cls"), embed(model, TEXTS, "cls"))
    np.testing.assert_array_equal(model.encode(TEXTS), embed(model, TEXTS, "mean"))
    assert model.fill(["the [MASK]"], 2) == fill_mask(model, ["the [MASK]"], 2)
    token_logits = jax.jit(model.objective.model.token_logits)
    for text, found in zip(TEXTS, model.score(TEXTS), strict=True):
        v, ids = bpe.vocabulary, bpe.encode(text)
        rows = np.tile(np.array([v.cls, *ids, v.sep], np.int32), (len(ids), 1))
        places = np.arange(len(ids))
        at = jnp.asarray(places[:, None] + 1, jnp.int32)
        rows[places, places + 1] = v.mask
        logits = token_logits(model.params, Inputs(jnp.asarray(rows)), at)[:, 0]
        wanted = jax.nn.log_softmax(logits[:, : v.size])[places, np.array(ids)]
        np.testing.assert_allclose(found.log_probs, wanted, atol=1e-4)
        assert found.total == pytest.approx(float(jnp.sum(wanted)), abs=1e-3)
    for call in (model.encode, model.fill, model.score):
        for texts in ("the tree", [], None, 3, iter(["the tree"])):
            with pytest.raises(UserError, match="give a list of one text or more"):
                call(texts)
    with pytest.raises(UserError, match="length of texts must be 3"):
        model.encode(TEXTS, length=2)
    with pytest.raises(UserError, match="has no mlm_head, so it would answer at random"):
        dataclasses.replace(model, fresh=("mlm_head",)).fill(["the [MASK]"])


@pytest.mark.slow
def test_a_decoder(bpe, tmp_path):  # noqa: F811
    model = loaded(CausalLM, Gpt2, bpe, tmp_path)
    (answer,) = model.generate(["the tree"], max_new_tokens=3)
    ids, hidden_states = bpe.encode("the tree"), jax.jit(model.objective.model.hidden_states)
    for token in answer.ids:  # greedy
        hidden = hidden_states(model.params, Inputs(jnp.array([ids])))
        logits = model.objective.model.predict_tokens(model.params, hidden[0, -1])
        assert token == int(jnp.argmax(logits[: bpe.vocabulary.size]))
        ids.append(token)
    (found,) = model.score(["the tree"])
    assert len(found.log_probs) == len(bpe.encode("the tree")) and found.total < 0
    with pytest.raises(UserError, match="does not fill masks"):
        model.fill(["the [MASK]"])


def test_a_folder_sets_the_defaults_of_vectors(bpe, tmp_path):  # noqa: F811
    model = loaded(MaskedLM, Bert, bpe, tmp_path, Vectors("cls", 4, True))
    np.testing.assert_array_equal(model.encode(TEXTS), embed(model, TEXTS, "cls", 4, True))
    np.testing.assert_array_equal(model.encode(TEXTS, normalize=False), embed(model, TEXTS, "cls", 4))
    prompted = [f"the {text}" for text in TEXTS]
    np.testing.assert_array_equal(model.encode(TEXTS, prompt="the "), embed(model, prompted, "cls", 4, True))


@pytest.mark.slow
def test_inputs_without_a_mask_get_that_of_the_padding(bpe):  # noqa: F811
    model = MODELS[Bert].for_vocabulary(bpe.vocabulary)
    params, v, summary = random_params(model), bpe.vocabulary, jax.jit(model.summary)
    ids = jnp.array([[v.cls, *bpe.encode("the tree"), v.sep]])
    padded = jnp.pad(ids, ((0, 0), (0, 5)), constant_values=v.pad)
    completed = model.complete_inputs(Inputs(padded), v)
    np.testing.assert_array_equal(completed.mask, padded != v.pad)
    np.testing.assert_allclose(summary(params, completed), summary(params, Inputs(ids)), atol=1e-5)
    assert np.abs(summary(params, Inputs(padded)) - summary(params, completed)).max() > 1e-3
    packed = Inputs(padded, documents=(padded != v.pad).astype(jnp.int32))
    assert model.complete_inputs(packed, v).mask is None
    given = Inputs(padded, mask=jnp.ones_like(padded))
    assert model.complete_inputs(given, v) is given
