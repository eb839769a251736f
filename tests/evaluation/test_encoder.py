"""A `TrainedModel` under sentence-transformers' evaluators and under mteb, against `SentenceTransformer` itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import jaxlm
from jaxlm.errors import UserError
from jaxlm.evaluation.encoder import Encoder
from tests.huggingface.support import minilm

TEXTS = ["A cat sleeps.", "The river is old and wide.", "Dogs eat the small fish.", "New houses are red or blue."]
OTHERS = ["A kitten is asleep.", "It rains in the city.", "A dog is eating.", "The sun shines on green fields."]


@pytest.fixture(scope="module")
def pair():
    from sentence_transformers import SentenceTransformer  # several seconds, for this file alone

    folder = str(minilm())
    return Encoder(jaxlm.load(folder)), SentenceTransformer(folder, device="cpu")


def same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys() and len(theirs) > 1
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_evaluators_of_sentence_transformers(pair):
    from sentence_transformers.sentence_transformer.evaluation import (
        EmbeddingSimilarityEvaluator,
        InformationRetrievalEvaluator,
    )

    similarity = EmbeddingSimilarityEvaluator(TEXTS, OTHERS, [0.9, 0.1, 0.7, 0.2], batch_size=3, truncate_dim=100)
    same(*map(similarity, pair))
    corpus = dict(enumerate(OTHERS + TEXTS[1:]))
    retrieval = InformationRetrievalEvaluator(dict(enumerate(TEXTS)), corpus, {0: {0}, 1: {4, 1}, 2: {2}, 3: {6}})
    same(*map(retrieval, pair))
    with pytest.raises(UserError, match="vectors are float32"):
        pair[0].encode(TEXTS, precision="int8")
    with pytest.raises(UserError, match="has no prompt 'query'"):
        pair[0].encode(TEXTS, prompt_name="query")
    with pytest.raises(UserError):
        pair[0].encode("a text that is no list")
    model = pair[0].model  # with prompts by role, a text without one has none, as there
    prompts = model.vectors._replace(prompt=None, prompts=(("query", "query: "), ("document", "passage: ")))
    prompted = Encoder(dataclasses.replace(model, settings=model.settings._replace(vectors=prompts)))
    np.testing.assert_array_equal(prompted.encode(TEXTS), pair[0].encode(TEXTS))
    assert np.abs(prompted.encode_query(TEXTS) - pair[0].encode(TEXTS)).max() > 0.01
    np.testing.assert_allclose(np.linalg.norm(pair[0].encode(TEXTS, normalize_embeddings=True), axis=1), 1, atol=1e-5)


def test_mteb(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path))
    mteb = pytest.importorskip("mteb")
    from mteb.mocks import mock_tasks

    def scores(model) -> dict:
        tasks = [mock_tasks.MockSTSTask(), mock_tasks.MockRetrievalTask(), mock_tasks.MockClassificationTask()]
        found = mteb.evaluate(model, tasks, cache=None, co2_tracker=False, encode_kwargs={"batch_size": 2})
        return {task.task_name: task.get_score() for task in found.task_results}

    same(*map(scores, pair))
    meta = pair[0].mteb_model_meta
    assert meta.name == f"jaxlm/{minilm().name}" and len(meta.revision) == 16
