"""Pairs from text alone: SimCSE and the inverse cloze task."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.objectives.self_contrastive import SelfContrastive
from jaxlm.types import TokenBatch
from tests.objectives.test_contrastive import BERT, LENGTH, VOCABULARY
from tests.params import random_params


def test_simcse_reads_a_text_twice():
    objective = SelfContrastive(model=dataclasses.replace(BERT, dropout=0.2)).bind(VOCABULARY, LENGTH)
    assert objective.row_format(LENGTH).length == LENGTH - 2
    tokens = np.random.default_rng(0).integers(110, 190, (4, LENGTH - 2), np.int32)
    sizes = np.array([22, 5, 9, 0])
    segments = (np.arange(LENGTH - 2) < sizes[:, None]).astype(np.int32)
    tokens[2, :5], sizes[2] = tokens[1, :5], 5  # the same sentence again
    segments[2] = segments[1]
    example = jax.jit(objective.corrupt)(jax.random.key(0), TokenBatch(tokens * segments, segments))
    assert example["row"].tolist() == [0, 1, 2, -1]
    assert np.sum(example["attention_mask"], -1).tolist() == [[24, 24], [7, 7], [7, 7], [0, 0]]
    np.testing.assert_array_equal(example["input_ids"][:, 0], example["input_ids"][:, 1])
    params = random_params(objective, std=0.3)
    key = jax.random.key(5)
    encode = jax.jit(objective.encode_texts)
    train, still = (encode(params, example, each) for each in (key, None))
    assert np.abs(train[:3, 0] - train[:3, 1]).max() > 0.1 and np.array_equal(still[:, 0], still[:, 1])
    terms = jax.jit(objective.loss, static_argnums=3)(params, example, key, True)
    z = np.asarray(train / np.linalg.norm(train, axis=-1, keepdims=True))
    s = z[:3, 0] @ z[:3, 1].T / 0.05
    s[1, 2] = s[2, 1] = -np.inf
    wanted = np.mean(np.log(np.exp(s).sum(1)) - np.diag(s))
    assert float(terms["contrastive_loss"].total) / 3 == pytest.approx(wanted, rel=1e-4)
    assert float(terms["contrastive_loss"].weight) == 3


@pytest.mark.slow
def test_a_sentence_finds_the_passage_around_it():
    """Sentences end with even tokens; a query is cut to its length, and a row without two words is padding."""
    vocabulary = dataclasses.replace(VOCABULARY, sentence_end=np.arange(VOCABULARY.size) % 2 == 0)
    objective = SelfContrastive(model=BERT, positives="cloze", keep_rate=0.0, query_length=8).bind(vocabulary, LENGTH)
    tokens = 101 + 2 * np.arange(3 * (LENGTH - 2), dtype=np.int32).reshape(3, -1) % 80
    tokens[:, [7, 10]] += 1
    segments = (np.arange(LENGTH - 2) < np.array([[22], [13], [1]])).astype(np.int32)
    batch = TokenBatch(tokens * segments, segments)
    example = jax.jit(objective.corrupt)(jax.random.key(1), batch)
    assert example["row"].tolist() == [0, 1, -1] and not example["attention_mask"][2].any()
    cls, sep = vocabulary.cls, vocabulary.sep
    for row, size in enumerate((22, 13)):
        query, rest = (ids[mask > 0].tolist() for ids, mask in zip(
            example["input_ids"][row], example["attention_mask"][row], strict=True))
        text = tokens[row, :size].tolist()
        cuts = [(text[:8], text[8:]), (text[8:11], text[:8] + text[11:]), (text[11:], text[:11])]
        assert (query, rest) in [([cls, *one[:6], sep], [cls, *other, sep]) for one, other in cuts]
    titles = [line.title for line in objective.describe(batch, jax.device_get(example), 0)]
    assert titles[:2] == ["query", "positive"]
    with pytest.raises(UserError, match=r"takes sentences out of passages; set --data.sentences False"):
        objective.with_labels_of(None, TextData(sentences=True))
