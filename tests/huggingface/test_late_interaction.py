"""Exported models of late interaction: `MultiVectorEncoder` of sentence-transformers 6 computes our vectors."""

from __future__ import annotations

import json
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.evaluation.encoder import Encoder
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_of
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.contrastive import text_scores
from jaxlm.runs.model import TrainedModel
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.types import FolderSettings
from tests.huggingface.support import read_json
from tests.huggingface.test_tasks import MODELS, Bert, ElectraEncoder, ModernBert
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import first_fast, random_params

QUERIES = ["the tree", "ak, then", "lb as. a tree"]
PASSAGES = ["bks the tree, lb as a tree then, and then.", "ak", "a . , " * 30]
LENGTH = 30


def trained(model, bpe, **fields):  # noqa: F811
    fields = dict(interaction="late", token_width=10, query_length=12) | fields
    objective = Contrastive(model=MODELS[model].for_vocabulary(bpe.vocabulary), **fields).bind(bpe.vocabulary, LENGTH)
    settings = FolderSettings(objective.vector_settings(LENGTH))
    return TrainedModel(objective, random_params(objective, 0), bpe, (), "here", 1, LENGTH, settings)


def exported(model: TrainedModel, out):
    return export_folder(out, model.objective, model.params, model.tokenizer, ModelCard(), max_length=LENGTH,
                         vectors=model.vectors)


CASES = first_fast([
    (Bert, dict(query_prompt="fq: ", passage_prompt="fa: ", expand_queries=True)),
    (ModernBert, {}),
    (ModernBert, dict(expand_queries=True, skiplist_words=("a", "Ġthe"))),
    (ElectraEncoder, dict(query_length=0)),
])


@pytest.mark.parametrize(("model", "fields"), CASES)
def test_the_folder_gives_our_vectors_and_scores(model, fields, bpe, tmp_path):  # noqa: F811
    ours = trained(model, bpe, **fields)
    out = exported(ours, tmp_path / "out")
    theirs = MultiVectorEncoder(str(out), device="cpu")
    assert [type(module).__name__ for module in theirs] == ["Transformer", "Dense", "MultiVectorMask", "Normalize"]
    assert theirs.similarity_fn_name == "maxsim"
    words = read_json(out / "2_MultiVectorMask/config.json")["skiplist_words"]
    assert sorted(words) == sorted(fields.get("skiplist_words", string.punctuation))
    found = {}
    for role, texts, encode in (("query", QUERIES, theirs.encode_query),
                                ("document", PASSAGES, theirs.encode_document)):
        found[role], wanted = ours.encode(texts, role=role), encode(texts)
        assert [len(vectors) for vectors in found[role]] == [len(vectors) for vectors in wanted]
        for one, other in zip(found[role], wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    if "expand_queries" in fields:
        assert [len(vectors) for vectors in found["query"]] == [12, 12, 12]
    scores = np.array([[text_scores(jnp.asarray(q[None]), jnp.asarray(p[None]))[0, 0] for p in found["document"]]
                       for q in found["query"]])
    wanted = theirs.similarity(theirs.encode_query(QUERIES), theirs.encode_document(PASSAGES))
    np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert np.abs(scores - scores[0]).max() > 0.1
    card = (out / "README.md").read_text()
    assert "MultiVectorEncoder('out')" in card and "encode_query(['A query'])" in card and "Left out" not in card
    with pytest.raises(UserError, match="a vector per token, which are not pooled; leave out --pooling"):
        ours.encode(QUERIES, pooling="mean", role="query", prompt="")
    with pytest.raises(UserError, match="a vector per token; export it, and give MultiVectorEncoder"):
        Encoder(ours)


def rows(objective: Contrastive, bpe) -> dict[str, np.ndarray]:  # noqa: F811
    """Return a batch of the texts, each passage with the next one as its hard negative."""
    records = [Record("", "", {"query": query, "positive": PASSAGES[i], "negatives": ["lb " + PASSAGES[i - 1]]}, ())
               for i, query in enumerate(QUERIES)]
    examples = objective.encode(records, bpe, LENGTH)
    most = max(example.arrays["input_ids"].shape[1] for example in examples)
    batch = {name: np.stack([np.pad(each.arrays[name], ((0, 0), (0, most - each.arrays[name].shape[1])),
                                    constant_values=value) for each in examples])
             for name, value in objective.padding.items()}
    return batch | {"row": np.arange(len(records), dtype=np.int32)}


@pytest.mark.parametrize(("model", "fields"), CASES)
def test_loss_and_gradients_are_those_of_the_folder(model, fields, bpe, tmp_path):  # noqa: F811
    ours = trained(model, bpe, negatives=1, temperature=0.5, **fields)
    objective = ours.objective
    batch = jax.tree.map(jnp.asarray, rows(objective, bpe))
    value, gradient = jax.jit(jax.value_and_grad(
        lambda params: total_loss(objective.loss(params, batch, jax.random.key(0), False))))(ours.params)
    theirs = MultiVectorEncoder(str(exported(ours, tmp_path / "out")), device="cpu").eval()
    columns = [QUERIES, PASSAGES, ["lb " + PASSAGES[i - 1] for i in range(3)]]
    features = []
    for place, texts in enumerate(columns):
        task = "document" if place else "query"
        features.append(theirs.preprocess(texts, prompt=theirs.prompts.get(task) or None, task=task))
    loss = MultiVectorMultipleNegativesRankingLoss(theirs, scale=2.0)(features)
    loss.backward()
    assert float(value) == pytest.approx(loss.item(), rel=1e-5)
    (model_there,) = family_of(objective).models(objective)
    wanted = dict(theirs[0].model.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in wanted.values() if parameter.grad is not None)
    compared = 0
    for name, array in model_there.table.to_transformers(jax.device_get(gradient)):
        there = wanted[name].grad
        there = torch.zeros(array.shape) if there is None else there
        np.testing.assert_allclose(array, there, atol=1e-5 * max(scale, 1), err_msg=name)
        compared += bool(there.abs().max() > 1e-3)
    assert compared > 10
    projection = theirs[1].linear.weight.grad
    np.testing.assert_allclose(gradient["token_projection"]["kernel"].T, projection, atol=1e-5)
    assert projection.abs().max() > 0.01


def test_other_readers_of_the_folder(bpe, tmp_path):  # noqa: F811
    """Without modules it is a Transformers model alone, and an import says what it lacks."""
    ours = trained(Bert, bpe)
    plain = export_folder(tmp_path / "plain", ours.objective, ours.params, bpe, ModelCard(), max_length=LENGTH)
    assert "Left out, without a counterpart there | token_projection |" in (plain / "README.md").read_text()
    assert not (plain / "modules.json").exists()
    again = TrainedModel(**vars(import_folder(exported(ours, tmp_path / "out"))))
    with pytest.raises(UserError, match="has the modules Transformer, Dense, MultiVectorMask, Normalize; jaxlm"):
        again.encode(QUERIES)
    assert json.loads((tmp_path / "out/modules.json").read_text())[2]["type"].endswith("modules.MultiVectorMask")
