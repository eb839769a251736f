"""Text embeddings against sentence-transformers on the same folders."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxlm.cli import main
from jaxlm.commands.export import _vectors
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.sentence_transformers import read
from jaxlm.inference.embed import embed
from jaxlm.models.elmo import Elmo
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.runs.model import TrainedModel
from jaxlm.types import FolderSettings, Vectors
from tests.huggingface.conftest import tokenizer, vocab_file  # noqa: F401 - fixtures
from tests.huggingface.support import minilm
from tests.huggingface.test_tasks import MODELS, Bert, Gpt2, Xlnet
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import first_fast, random_params

TEXTS = ["the tree", "ak", "bks the tree, lb as a tree then and then", "a " * 60]


@pytest.mark.parametrize(("model", "pooling"), first_fast([
    (Bert, "cls"), (Bert, "mean"), (Gpt2, "last"), (Xlnet, "cls")
]))
def test_sentence_transformers_gives_our_vectors(model, pooling, bpe, tmp_path):  # noqa: F811
    from sentence_transformers import SentenceTransformer

    kind = {Bert: MaskedLM, Gpt2: CausalLM, Xlnet: PermutationLM}[model]
    objective = kind(model=MODELS[model].for_vocabulary(bpe.vocabulary)).bind_unchecked(bpe.vocabulary)
    params = random_params(objective, 0)
    vectors = Vectors(pooling, 30, model is Bert)
    out = export_folder(tmp_path / "out", objective, params, bpe, ModelCard(), vectors=vectors)
    ours = embed(PretrainedModel(objective, params, bpe), TEXTS, pooling, 30, vectors.normalize)
    theirs = SentenceTransformer(str(out), device="cpu").encode(TEXTS)
    assert ours.shape == (4, 24) and np.abs(ours - ours[::-1]).max() > 0.1
    assert np.abs(ours - theirs).max() < 1e-4
    # XLNet's symbol at the end is the last token.
    assert read(out) == (vectors._replace(pooling="last") if model is Xlnet else vectors)


def test_relative_positions_keep_the_length_of_training(bpe, tmp_path):  # noqa: F811
    from jaxlm.models.t5 import T5
    from jaxlm.objectives.span_corruption import SpanCorruption

    t5 = T5(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, intermediate_size=24)
    for name, objective, wanted in (("t5", SpanCorruption(model=t5), 1024), ("bert", MaskedLM(model=MODELS[Bert]), 37),
                                    ("xlnet", PermutationLM(model=MODELS[Xlnet]), 1024)):
        model = objective.model.for_vocabulary(bpe.vocabulary)
        objective = dataclasses.replace(objective, model=model).bind_unchecked(bpe.vocabulary)
        params = random_params(objective, 0)
        out = export_folder(tmp_path / name, objective, params, bpe, ModelCard(), vectors=Vectors("mean", 1024, False))
        assert AutoTokenizer.from_pretrained(out).model_max_length == read(out).length == wanted
        plain = export_folder(tmp_path / f"{name} text", objective, params, bpe, ModelCard(), max_length=1024)
        assert AutoTokenizer.from_pretrained(plain).model_max_length == import_folder(plain).length == wanted


@pytest.mark.parametrize(("kind", "step", "length", "wanted"), [
    ("bert", 0, 600, 512), ("bert", 0, 40, 40), ("bert", 5, 600, 600), ("bert", 5, None, 512), ("xlnet", 5, 600, 512),
    ("xlnet", 5, 40, 512),
])
def test_an_export_cuts_texts_where_embed_does(bpe, kind, step, length, wanted):  # noqa: F811
    """A stream has no rows of whole texts."""
    objective = MaskedLM(MODELS[Bert]) if kind == "bert" else PermutationLM(MODELS[Xlnet], memory_length=8)
    objective = objective.bind_unchecked(bpe.vocabulary)
    model = TrainedModel(objective, {}, bpe, step=step, length=length)
    assert model.vectors == _vectors(model, "mean", False) == Vectors("mean", wanted, False)


def test_flags_of_vectors_that_would_change_nothing(bpe):  # noqa: F811
    model = PretrainedModel(CausalLM(MODELS[Gpt2]).bind_unchecked(bpe.vocabulary), {}, bpe)
    assert _vectors(model, None, False) is None
    with pytest.raises(UserError, match="choose their pooling"):
        _vectors(model, None, True)
    late = dataclasses.replace(model, settings=FolderSettings(Vectors("mean", 9, True, similarity="maxsim")))
    assert _vectors(late, None, False).similarity == "maxsim"
    for pooling, normalize in (("cls", False), (None, True)):
        with pytest.raises(UserError, match="has vectors of its own kind"):
            _vectors(late, pooling, normalize)


@pytest.mark.slow
def test_a_sentence_transformers_folder_sets_the_pooling(tmp_path, capsys):
    from sentence_transformers import SentenceTransformer

    texts = tmp_path / "texts.txt"
    texts.write_text(f"A man is eating food.\n{'The girl carries a baby, who is asleep at last. ' * 30}\n")
    assert main(["embed", str(minilm()), "--data.source", str(texts), "--out", str(tmp_path / "v.base")]) == 0
    rows = [json.dumps({"query": text, "text": "x"}) + "\n" for text in texts.read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    of_rows = ["--data.source", str(tmp_path / "rows.jsonl"), "--data.text-field"]
    assert main(["embed", str(minilm()), *of_rows, "query", "--out", str(tmp_path / "r.npy")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "r.npy"), np.load(tmp_path / "v.base.npy"))
    (tmp_path / "rows.csv").write_text("text,label\none,1\n,2\n")
    assert main(["embed", str(minilm()), "--data.source", str(tmp_path / "rows.csv")]) == 2
    assert "rows.csv, line 3 has no text; fill it in" in capsys.readouterr().err
    assert main(["embed", str(minilm()), *of_rows, "body", "--out", str(tmp_path / "r2.npy")]) == 2
    assert "no column 'body'; it has 'query', 'text'. Choose the column with --data.text" in capsys.readouterr().err
    peer = SentenceTransformer(str(minilm()), device="cpu", prompts={"query": "query: "}, default_prompt_name="query")
    theirs = peer.encode(texts.read_text().splitlines(), prompt="")
    assert np.abs(np.load(tmp_path / "v.base.npy") - theirs).max() < 1e-4
    peer.save(str(tmp_path / "saved"))
    assert main(["embed", str(tmp_path / "saved"), "--data.source", str(texts), "--out", str(tmp_path / "p.base")]) == 0
    theirs = peer.encode(texts.read_text().splitlines())
    assert np.abs(np.load(tmp_path / "p.base.npy") - theirs).max() < 1e-4


@pytest.mark.slow
def test_word_vectors_are_looked_up_and_layers_of_elmo_averaged(tokenizer):  # noqa: F811
    v = tokenizer.vocabulary
    objective = SkipGram(model=Word2Vec(vocab_size=v.size, hidden_size=6)).bind_unchecked(v)
    params = jax.tree.map(jnp.asarray, random_params(objective, 0))
    table = np.asarray(objective.model.vectors(params))
    ids = tokenizer.encode("cat sat")
    found = embed(PretrainedModel(objective, params, tokenizer), ["cat", "cat sat"])
    np.testing.assert_allclose(found, [table[ids[0]], table[ids].mean(axis=0)], atol=1e-6)
    long = embed(PretrainedModel(objective, params, tokenizer), ["cat " * 512 + "sat " * 512], length=1024)
    np.testing.assert_allclose(long, found[1:], atol=1e-5)

    model = Elmo(vocab_size=v.size, hidden_size=4, cell_size=8, filter_widths=2, num_highways=1)
    elmo = BidirectionalLM(model=model).bind_unchecked(v)
    # A text's vector does not depend on what is beside it.
    params = random_params(elmo, 0)
    both = embed(PretrainedModel(elmo, params, tokenizer), ["cat", "the dog sat on the mat"])
    assert both.shape == (2, 8)
    np.testing.assert_allclose(both[:1], embed(PretrainedModel(elmo, params, tokenizer), ["cat"]), atol=1e-6)
    # The top layer is a mix in which the others have no weight.
    mixed = params | {"mix": {"weights": jnp.array([0.0, 0.0, 99.0]), "scale": jnp.ones(())}}
    top = dataclasses.replace(elmo, model=dataclasses.replace(model, task_layers="top"))
    wanted = embed(PretrainedModel(elmo, mixed, tokenizer), ["cat sat"])
    np.testing.assert_allclose(embed(PretrainedModel(top, params, tokenizer), ["cat sat"]), wanted, atol=1e-6)
    with pytest.raises(UserError, match="no summary token"):
        embed(PretrainedModel(elmo, params, tokenizer), ["cat"], "cls")
    with pytest.raises(UserError, match="text 2 has no tokens"):
        embed(PretrainedModel(elmo, params, tokenizer), ["cat", ""])


def test_vectors_are_once_in_memory(tokenizer):  # noqa: F811
    """Of 4,096 texts, in float32; the texts themselves take less than a vector of 2,048 numbers."""
    v, texts = tokenizer.vocabulary, ["cat", "sat cat"] * 2048
    objective = SkipGram(model=Word2Vec(vocab_size=v.size, hidden_size=2048)).bind_unchecked(v)
    loaded = PretrainedModel(objective, jax.tree.map(jnp.asarray, random_params(objective, 0)), tokenizer)
    embed(loaded, texts[:64], normalize=True)  # compiles
    tracemalloc.start()
    found = embed(loaded, texts, normalize=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert found.shape == (4096, 2048) and peak < 1.5 * found.nbytes


@pytest.mark.parametrize(("pooling", "expected"), [
    ({"pooling_mode": "lasttoken"}, "last"), ({"pooling_mode": ["cls"]}, "cls"),
    ({"pooling_mode_mean_tokens": True}, "mean"),
])
def test_prompts_of_a_folder(pooling, expected, tmp_path):
    for name, content in {
        "modules.json": [{"type": "models.Transformer"}, {"type": "models.Pooling"}], "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": {"prompts": {"query": "q: ", "none": ""}, "default_prompt_name": None},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    found = read(tmp_path)
    assert found == Vectors(expected, None, False, None, (("query", "q: "), ("none", "")))
    assert [found.prompt_of(role) for role in ("query", "document", "")] == ["q: ", "", None]
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling | {"include_prompt": False}))
    assert not read(tmp_path).pools_prompt


def test_folders_with_other_modules_are_refused(tmp_path):
    types = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(types))
    with pytest.raises(UserError, match="Transformer, Pooling, Dense; jaxlm supports only"):
        read(tmp_path)
