"""Exported embedding models: sentence-transformers and the bare classes of Transformers compute our vectors."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from sentence_transformers import SentenceTransformer

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.huggingface.sentence_transformers import read
from jaxlm.inference.embed import embed
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.runs.load import load_model
from jaxlm.runs.model import load_trained
from jaxlm.tasks.contrastive import Contrastive
from tests.huggingface.support import read_json
from tests.huggingface.test_tasks import MODELS, Bert, Deberta, ElectraEncoder, Gpt2, ModernBert, NomicBert, Xlnet
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import first_fast, random_params

TEXTS = ["the tree", "ak", "bks the tree, lb as a tree then and then", "a " * 60]


@pytest.mark.parametrize(("model", "fields", "architecture"), first_fast([
    (Bert, dict(query_prompt="the query: ", passage_prompt="a: ", widths=(8, 16)), "BertModel"),
    (ModernBert, dict(pooling="cls", normalize=False), "ModernBertModel"),
    (ElectraEncoder, {}, "ElectraModel"),
    (Deberta, {}, "DebertaV2Model"),
    (NomicBert, {}, "NomicBertModel"),
    (Gpt2, dict(pooling="last"), "GPT2Model"),
    (Xlnet, dict(pooling="cls"), "XLNetModel"),
]))
def test_the_folder_gives_our_vectors(model, fields, architecture, bpe, tmp_path):  # noqa: F811
    made = MODELS[model].for_vocabulary(bpe.vocabulary)
    if model is ModernBert:  # as Granite's embedders: their classifier averages tokens, their vectors are [CLS]
        made = dataclasses.replace(made, classifier_pooling="mean")
    objective = Contrastive(model=made, **fields).bind(bpe.vocabulary, 30)
    params = random_params(objective, 0)
    vectors = objective.vector_settings(30)
    out = export_folder(tmp_path / "out", objective, params, bpe, ModelCard(), max_length=30, vectors=vectors)
    _, report = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert {key.partition(".")[0] for key in report["missing_keys"]} <= {"pooler"}  # which no vector reads
    assert read_json(out / "config.json")["architectures"] == [architecture]
    theirs = SentenceTransformer(str(out), device="cpu")
    assert theirs.similarity_fn_name == ("cosine" if objective.normalize else "dot")
    loaded = PretrainedModel(objective, params, bpe)
    for prompt, encode in ((objective.query_prompt, theirs.encode_query), (objective.passage_prompt,
                                                                           theirs.encode_document)):
        ours = embed(loaded, [prompt + text for text in TEXTS], objective.pooling, 30, objective.normalize)
        assert np.abs(ours - ours[::-1]).max() > 0.05
        np.testing.assert_allclose(encode(TEXTS), ours, atol=1e-5)
    config = read_json(out / "config_sentence_transformers.json")
    assert config["matryoshka_dims"] == ([8, 16, 24] if objective.widths else None)
    wanted = vectors._replace(pooling="last" if model is Xlnet else vectors.pooling)
    assert read(out) == wanted
    card = (out / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and ("truncate_dim=8" in card) == bool(objective.widths)
    trained = load_trained(out)
    if objective.query_prompt:
        assert "encode_query(['A query'])" in card
        with pytest.raises(UserError, match="no role 'passage' of a text"):
            trained.encode(TEXTS, role="passage")
        with pytest.raises(UserError, match=r"'query': 'the query: '.*--prompt"):
            trained.encode(TEXTS)
        for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
            np.testing.assert_allclose(trained.encode(TEXTS, role=role), encode(TEXTS), atol=1e-5)
        pooling = read_json(out / "1_Pooling/config.json") | {"include_prompt": False}
        (out / "1_Pooling/config.json").write_text(json.dumps(pooling))
        with pytest.raises(UserError, match="pools texts without their prompt"):
            load_trained(out).encode(TEXTS, role="query")
    with pytest.raises(UserError, match="no pooling 'max'; choose cls, mean, last"):
        trained.encode(TEXTS, "max", prompt="")
    # A prefix scores as in training.
    width = 8
    short = SentenceTransformer(str(out), device="cpu", truncate_dim=width).encode(TEXTS, normalize_embeddings=True)
    cut = embed(loaded, TEXTS, objective.pooling, 30)[:, :width]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5)
    # It is read again as a model of its family, whose heads are new.
    again = load_model(out)
    np.testing.assert_allclose(
        embed(again, TEXTS, objective.pooling, 30), embed(loaded, TEXTS, objective.pooling, 30), atol=1e-5
    )


@pytest.mark.slow
def test_training_reads_texts_as_embed_does(bpe):  # noqa: F811
    """Rows of training, with prompts and cut, give the vectors of `embed`."""
    from jaxlm.data.labelled import Record

    for pooling in ("mean", "last"):
        model = MODELS[Bert].for_vocabulary(bpe.vocabulary)
        objective = Contrastive(model=model, pooling=pooling, query_prompt="the ", negatives=2, query_length=12)
        objective = objective.bind(bpe.vocabulary, 30)
        params = random_params(objective, 0)
        values = {"query": TEXTS[0], "positive": TEXTS[2], "negatives": [TEXTS[3]]}
        (example,) = objective.encode([Record("", "", values, ())], bpe, 30)
        arrays = jax.tree.map(lambda x: jax.numpy.asarray(x)[None], example.arrays)
        found = jax.jit(objective.encode_texts)(params, arrays, None)[0, :3]
        texts = ["the " + TEXTS[0], TEXTS[2], TEXTS[3]]
        loaded = PretrainedModel(dataclasses.replace(objective), params, bpe)
        np.testing.assert_allclose(found, embed(loaded, texts, pooling, 30), atol=1e-5)
