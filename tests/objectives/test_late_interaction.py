"""Late interaction against the multi-vector losses of sentence-transformers 6, and gradient caching."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.contrastive import text_scores
from jaxlm.objectives.self_contrastive import SelfContrastive
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.huggingface.conftest import tokenizer, vocab_file  # noqa: F401 - fixtures
from tests.objectives.test_contrastive import BERT, LENGTH, ROWS, VOCABULARY, OfVectors, assert_close, drawn, gradients
from tests.objectives.test_contrastive import ours as loss_of
from tests.params import first_fast, random_params

WIDTH = 6


class Given(torch.nn.Module):
    """A multi-vector encoder whose inputs are the vectors of tokens."""

    def forward(self, features, task=None):
        return dict(features)


def token_vectors(num_texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors of texts of different lengths, zeros behind them, and their mask.

    All vectors are near one side of the sphere for queries and near the other for every second passage, whose products
    are then negative: less than those of padding.
    """
    draw = np.random.default_rng(4)
    sizes = draw.integers(2, 10, (ROWS, num_texts))
    mask = np.arange(10) < sizes[..., None]
    vectors = draw.normal(size=(ROWS, num_texts, 10, WIDTH))
    vectors[..., 0] += 3.0
    vectors[::2, 1:, :, 0] -= 6.0
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.where(mask[..., None], vectors, 0.0).astype(np.float32), mask


@pytest.mark.parametrize(("negatives", "temperature", "scale"), [
    (0, {}, {}), (2, {"temperature": 0.5}, {"scale": 2.0}),
])
def test_the_loss_is_that_of_sentence_transformers(negatives, temperature, scale):
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

    vectors, mask = token_vectors(2 + negatives)
    objective = OfVectors(interaction="late", negatives=negatives, **temperature)
    value, gradient, metrics = loss_of(objective, vectors, drawn(2 + negatives))
    texts = torch.tensor(vectors, requires_grad=True)
    columns = [{"token_embeddings": texts[:, place], "attention_mask": torch.tensor(mask[:, place])}
               for place in range(2 + negatives)]
    theirs = MultiVectorMultipleNegativesRankingLoss(Given(), **scale)(columns)
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-6)
    # That of a query's zeros goes nowhere: `token_vectors` has set them.
    np.testing.assert_allclose(np.where(mask[..., None], gradient, 0), texts.grad.numpy(), atol=1e-6)
    assert not gradient[:, 1:][~mask[:, 1:]].any() and np.abs(gradient).max() > 0.1

    from sentence_transformers.util.similarity import mean_maxsim

    means = np.stack([mean_maxsim(texts[:, 0].detach(), texts[:, place].detach(), torch.tensor(mask[:, 0]),
                                  torch.tensor(mask[:, place])).numpy() for place in range(1, 2 + negatives)], axis=-1)
    own = np.diagonal(means[..., 0])
    assert means.min() < -0.1  # a product with padding would be 0
    assert metrics["positive_cosine"] == pytest.approx(own.mean(), abs=1e-6)
    others = np.where(np.eye(ROWS, dtype=bool)[..., None] & (np.arange(means.shape[-1]) == 0), -np.inf, means)
    assert metrics["accuracy"] == pytest.approx(np.mean(own > others.max(axis=(1, 2))))


def test_scores_of_a_passage_without_tokens_are_below_all_others():
    vectors, _ = token_vectors(2)
    passages = vectors[:, 1].copy()
    passages[3] = 0
    scores = np.asarray(text_scores(jnp.asarray(vectors[:, 0]), jnp.asarray(passages)))
    assert np.isfinite(scores).all() and (scores[:, 3] < np.delete(scores, 3, 1).min(axis=1)).all()


def bound(**changes) -> Contrastive:
    fields = dict(model=BERT, negatives=1, interaction="late", token_width=WIDTH, temperature=0.5, query_length=8)
    return Contrastive(**fields | changes).bind(VOCABULARY, LENGTH)


def texts() -> dict[str, np.ndarray]:
    """Return eight rows of texts of different lengths, the last one of padding."""
    example, draw = drawn(3, rows=8), np.random.default_rng(5)
    example["attention_mask"] *= np.arange(LENGTH) < draw.integers(3, LENGTH, (8, 3))[..., None]
    example["row"][-1], example["attention_mask"][-1] = -1, 0
    return example


@pytest.mark.parametrize("expand", first_fast([False, True]))
def test_chunks_change_neither_loss_nor_gradient(expand):
    params, example = random_params(bound()), texts()
    whole = gradients(bound(expand_queries=expand), params, example)
    assert_close(gradients(bound(expand_queries=expand, chunks=4), params, example), whole)
    assert np.isfinite(whole[0])
    # Rows of padding change nothing; other queries do.
    cut = {name: array[:7] for name, array in example.items()}
    assert_close(gradients(bound(expand_queries=expand), params, cut), whole)
    assert abs(float(gradients(bound(expand_queries=not expand), params, example)[0]) - float(whole[0])) > 1e-3


@pytest.mark.slow
def test_chunks_take_less_memory_for_texts_and_for_scores():
    def peak(chunks: int) -> int:
        objective = bound(chunks=chunks, negatives=0)
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        example = jax.tree.map(jnp.asarray, objective.synthetic(256, LENGTH))

        def loss(params):
            return total_loss(objective.loss(params, example, jax.random.key(0), True))

        return jax.jit(jax.grad(loss)).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 256 * 256 * 8 * LENGTH  # of all tokens of a query with all of a passage
    assert peak(1) > scores > 2 * peak(8)


@pytest.mark.slow  # huggingface/test_late_interaction.py has padded texts
def test_padding_is_neither_read_nor_scored():
    params, example = random_params(bound()), texts()
    other = dict(example, input_ids=np.where(example["attention_mask"], example["input_ids"], 7).astype(np.int32))
    for fields in ({}, dict(query_length=0), dict(expand_queries=True)):
        objective = bound(**fields)
        whole = gradients(objective, params, example)
        assert_close(gradients(objective, params, other), whole)
        wider = {name: np.pad(x, ((0, 0), (0, 0), (0, 4))) if x.ndim > 1 else x for name, x in example.items()}
        longer = dataclasses.replace(objective, model=dataclasses.replace(objective.model, max_positions=LENGTH + 4))
        positions = np.pad(params["embeddings"]["position"]["embedding"], ((0, 4), (0, 0)))
        grown = params | {"embeddings": params["embeddings"] | {"position": {"embedding": positions}}}
        assert float(gradients(longer, grown, wider)[0]) == pytest.approx(float(whole[0]), rel=1e-5)


def test_words_of_the_skip_list_are_read_and_not_scored(tokenizer):  # noqa: F811
    objective = bound().bind(tokenizer.vocabulary, LENGTH)
    skipped = [tokenizer.vocabulary.pieces[i] for i in objective.skipped_ids]
    assert skipped == [".", ",", "?"]
    ids = np.array([tokenizer.encode("the cat , the dog . it ran ?")], np.int32)
    inputs = Inputs(jnp.asarray(ids), mask=jnp.ones_like(ids))
    params = jax.tree.map(jnp.asarray, random_params(objective))
    query, passage = (np.asarray(objective.token_vectors(params, inputs, is_query)[0]) for is_query in (True, False))
    is_word = ~np.isin(ids[0], objective.skipped_ids)
    assert is_word.sum() == ids.size - 3
    np.testing.assert_array_equal(query[is_word], passage[is_word])
    np.testing.assert_allclose(np.linalg.norm(query, axis=-1), 1, atol=1e-6)
    assert not passage[~is_word].any()
    without = dataclasses.replace(objective, skiplist_words=())
    np.testing.assert_array_equal(without.token_vectors(params, inputs, False)[0], query)


def test_a_run_from_late_interaction_has_its_settings(tokenizer):  # noqa: F811
    from jaxlm.objectives.pretrained import PretrainedModel
    from jaxlm.types import FolderSettings

    trained = bound(expand_queries=True, skiplist_words=("the",))
    settings = FolderSettings(trained.vector_settings(LENGTH))
    source = PretrainedModel(trained, random_params(trained), tokenizer, settings=settings)
    found = Contrastive(model=BERT).with_pretrained_model(source)
    assert (found.interaction, found.token_width, found.query_length, found.expand_queries, found.skiplist_words) == (
        "late", WIDTH, 8, True, ("the",))
    assert Contrastive(token_width=7).with_pretrained_model(source).token_width == 7
    merged = found.bind(VOCABULARY, LENGTH).merge_pretrained(jax.tree.map(np.zeros_like, source.params), source)
    np.testing.assert_array_equal(merged["token_projection"]["kernel"], source.params["token_projection"]["kernel"])
    assert settings.after_training(None, -1).vectors is None  # whose projection another objective has not kept


@pytest.mark.parametrize(("kind", "fields", "words"), [
    (Contrastive, dict(widths=(4,)), "late has unit vectors; leave out objective.widths"),
    (Contrastive, dict(normalize=False), "late has unit vectors"),
    (Contrastive, dict(expand_queries=True), "needs interaction late, and query_length up to"),
    (Contrastive, dict(expand_queries=True, query_length=LENGTH + 1), "query_length up to data.length"),
    (Contrastive, dict(expand_queries=True, interaction="single", query_length=8), "needs interaction late"),
    (Contrastive, dict(criterion="cosent"), "cosent compares pairs of vectors; leave out .* interaction"),
    (SelfContrastive, dict(model=ModernBert()), "draws dropout twice"),
])
def test_refusals(kind, fields, words):
    with pytest.raises(UserError, match=words):
        kind(**dict(model=BERT, interaction="late") | fields).check(VOCABULARY, LENGTH)


def test_expansion_needs_a_mask():
    vocabulary = dataclasses.replace(Vocabulary.stand_in(200), mask=-1)
    with pytest.raises(UserError, match=r"no \[MASK\], which objective.expand_queries needs"):
        bound(expand_queries=True, model=Gpt2(max_positions=LENGTH)).check(vocabulary, LENGTH)
