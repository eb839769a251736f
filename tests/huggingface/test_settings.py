"""Settings of a folder beside configuration and weights: they stay through import, training, extension and export."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer

import jaxlm
from jaxlm.cli import main
from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.sentence_transformers import read
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.self_contrastive import SelfContrastive
from jaxlm.runs.load import load_model
from jaxlm.runs.model import load_trained
from jaxlm.runs.resolve import resolve
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.types import FolderSettings, Vectors
from tests.huggingface.support import read_json
from tests.huggingface.test_tasks import MODELS, Bert, Gpt2
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import first_fast, random_params
from tests.tokenizers.test_llama_forms import save as save_form

TEXTS = ["THE Tree", "ak", "bks the TREE, lb as a tree then and then " * 4]
SETTINGS = Vectors(
    "cls", 20, True, "fp ", (("query", "the "), ("document", "a "), ("web", "fp ")), similarity="cosine", widths=(8,))


def change(file, **values):
    file.write_text(json.dumps(read_json(file) | values))


def folder_of(kind, model, bpe, out, **options):  # noqa: F811
    objective = kind(model=MODELS[model].for_vocabulary(bpe.vocabulary)).bind_unchecked(bpe.vocabulary)
    return export_folder(out, objective, random_params(objective, 0), bpe, ModelCard(), **options)


@pytest.fixture(scope="module")
def sentence_folder(bpe, tmp_path_factory):  # noqa: F811
    """A folder with everything away from its default place: cased vocabulary in lower case, modules in subfolders."""
    root = folder_of(MaskedLM, Bert, bpe, tmp_path_factory.mktemp("st") / "model", vectors=SETTINGS)
    (root / "0_Inner").mkdir()
    for file in [file for file in root.iterdir() if file.is_file() and "modules" not in file.name]:
        if file.name != "config_sentence_transformers.json":
            file.rename(root / "0_Inner" / file.name)
    (root / "1_Pooling").rename(root / "Pooling_1")
    modules = read_json(root / "modules.json")
    modules[0]["path"], modules[1]["path"] = "0_Inner", "Pooling_1"
    (root / "modules.json").write_text(json.dumps(modules))
    change(root / "0_Inner/sentence_bert_config.json", do_lower_case=True)
    return root


@pytest.mark.slow
def test_a_folder_of_sentence_transformers_stays_what_it_is(sentence_folder, tmp_path):
    """Import, export and extension against the library on the original folder."""
    text = tmp_path / "text.txt"
    text.write_text("quick zebra quick zebra\n" * 8)
    run, out, more = (str(tmp_path / name) for name in ("run", "out", "more"))
    assert main(["import", str(sentence_folder), run]) == main(["export", run, out]) == 0
    assert main(["tokenizer", "extend", run, more, "--data.source", str(text), "--old-text", str(text)]) == 0
    theirs = SentenceTransformer(str(sentence_folder), device="cpu")
    wanted = {role: encode(TEXTS) for role, encode in (
        ("", theirs.encode), ("query", theirs.encode_query), ("document", theirs.encode_document))}
    assert np.abs(wanted[""] - wanted["query"]).max() > 0.01
    assert np.abs(theirs.encode(TEXTS[:1]) - theirs.encode(["THE Tree".lower()])).max() < 1e-6
    for path in (sentence_folder, run, out, more):
        model = load_trained(path)
        assert model.settings.vectors == SETTINGS
        for role, vectors in wanted.items():
            np.testing.assert_allclose(model.encode(TEXTS, role=role), vectors, atol=1e-5)
    again = SentenceTransformer(out, device="cpu")
    assert again.max_seq_length == 20
    np.testing.assert_allclose(again.encode(TEXTS), wanted[""], atol=1e-5)
    np.testing.assert_allclose(again.encode_query(TEXTS), wanted["query"], atol=1e-5)
    with pytest.raises(UserError, match=r"a module at \.\./x, outside its folder"):
        shutil.copytree(sentence_folder, tmp_path / "copy")
        (tmp_path / "copy/modules.json").write_text('[{"type": "models.Transformer", "path": "../x"}]')
        load_model(tmp_path / "copy")


def test_training_of_vectors_begins_with_their_settings(sentence_folder):
    source = load_model(sentence_folder)
    objective = Contrastive().with_pretrained_model(source)
    assert (objective.pooling, objective.normalize) == ("cls", True)
    assert (objective.query_prompt, objective.passage_prompt) == ("the ", "a ")
    flags = ["--objective.pooling", "mean", "--objective.query-prompt", ""]
    flagged = resolve("contrastive_tiny", flags, str(sentence_folder), pretrained=source).experiment.objective
    assert (flagged.pooling, flagged.query_prompt, flagged.passage_prompt) == ("mean", "", "a ")
    own = Contrastive(query_prompt="lb ", pooling="last").with_pretrained_model(source)  # the user's own preset
    assert (own.pooling, own.query_prompt) == ("last", "lb ")
    assert SelfContrastive().with_pretrained_model(source).pooling == "cls"
    trained = FolderSettings.from_json(json.loads(json.dumps(source.settings.to_json())))
    assert trained == source.settings
    trained = trained.after_training(flagged.vector_settings(30), -1).vectors
    prompts = (("query", ""), ("document", "a "), ("web", "fp "))
    assert trained == SETTINGS._replace(pooling="mean", length=30, prompts=prompts, widths=())
    # The score is a cosine, whether or not the vectors that are given out have unit length.
    plain = dataclasses.replace(source, settings=FolderSettings(SETTINGS._replace(normalize=False)))
    objective = Contrastive().with_pretrained_model(plain)
    dot = dataclasses.replace(source, settings=FolderSettings(SETTINGS._replace(normalize=False, similarity="dot")))
    assert "--objective.temperature 1" in SelfContrastive().with_pretrained_model(dot).remarks(None, 30)[0]
    assert not SelfContrastive().with_pretrained_model(source).remarks(None, 30)
    left = plain.settings.after_training(objective.vector_settings(30), -1)
    assert objective.normalize and not left.vectors.normalize


def test_a_passage_prompt_counts_as_in_the_library(bpe, tmp_path, capsys):  # noqa: F811
    vectors = SETTINGS._replace(prompt=None, prompts=(("query", "the "), ("passage", "a ")))
    folder = folder_of(MaskedLM, Bert, bpe, tmp_path / "model", vectors=vectors)
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), load_trained(folder)
    assert "documents get none, as in sentence-transformers" in capsys.readouterr().err
    np.testing.assert_allclose(ours.encode(TEXTS, role="document"), theirs.encode_document(TEXTS), atol=1e-5)


def test_modules_that_are_not_supported_only_cost_the_vectors(bpe, tmp_path, capsys):  # noqa: F811
    folder = folder_of(MaskedLM, Bert, bpe, tmp_path / "model", vectors=SETTINGS)
    modules = [*read_json(folder / "modules.json"), {"type": "models.Dense", "path": "3_Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    model = load_trained(folder)
    assert "Dense; jaxlm supports only Pooling and Normalize. Its settings" in capsys.readouterr().err
    with pytest.raises(UserError, match="Dense; jaxlm supports only"):
        model.encode(TEXTS)


def test_the_prompt_of_a_reranker(bpe, tmp_path):  # noqa: F811
    task = Rerank(model=MODELS[Bert], query_prompt="lb as ").bind(bpe.vocabulary, 24)
    folder = export_folder(tmp_path / "out", task, random_params(task, 0), bpe, ModelCard(), max_length=24)
    pairs, theirs = [("the tree", "ak"), ("fp", "the gq " * 20)], CrossEncoder(str(folder), device="cpu")
    model = load_trained(folder)
    np.testing.assert_allclose(model.score_pairs(pairs), theirs.predict(pairs), atol=1e-5)
    assert np.abs(theirs.predict(pairs) - theirs.predict(pairs, prompt="")).max() > 1e-3
    assert Rerank().with_pretrained_model(model).query_prompt == "lb as "
    assert Rerank(query_prompt="fp ").with_pretrained_model(model).query_prompt == "fp "
    change(folder / "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(UserError, match="puts 'lb as ' before a text, which jaxlm does only for one label"):
        load_model(folder)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_decoder_gets_the_special_tokens_of_its_tokenizer(name, bpe, tmp_path):  # noqa: F811
    task = Classification(model=MODELS[Gpt2], labels=("a", "b")).bind(bpe.vocabulary, 37)
    folder = export_folder(tmp_path / "task", task, random_params(task, 0), bpe, ModelCard())
    bos, mask = bpe.vocabulary.cls, bpe.vocabulary.mask
    named = {bpe.piece(i): i for i in (bos, mask)}

    def part(what, kind=0):
        return {"Sequence" if len(what) == 1 else "SpecialToken": {"id": what, "type_id": kind}}

    first, last = (part(piece) for piece in named)
    change(folder / "tokenizer.json", post_processor={
        "type": "TemplateProcessing", "single": [first, part("A"), last],
        "pair": [first, part("A"), last, last, part("B", 1)],
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in named.items()},
    })
    change(folder / "tokenizer_config.json", tokenizer_class=name)
    theirs, model = transformers.AutoTokenizer.from_pretrained(folder), load_trained(folder)
    rows = [Record("0", "", {"text": TEXTS[0], "label": None}, ()),
            Record("1", "", {"text": TEXTS[0], "text_pair": TEXTS[1], "label": None}, ())]
    for row, texts in zip(model.objective.encode(rows, model.tokenizer, 37), (TEXTS[:1], TEXTS[:2]), strict=True):
        wanted = theirs(*texts).input_ids
        assert mask in wanted and row.arrays["input_ids"].tolist() == wanted
    vectors = model.objective.text_template.build(model.tokenizer.vocabulary, np.array([9]))
    assert vectors.input_ids.tolist() == [bos, 9, mask]
    again = export_folder(tmp_path / "again", model.objective, model.params, model.tokenizer, ModelCard())
    assert transformers.AutoTokenizer.from_pretrained(again)(*TEXTS[:2]).input_ids == wanted


@pytest.mark.slow
def test_end_tokens_and_settings_of_a_tokenizer(bpe, tmp_path):  # noqa: F811
    folder, run, out = folder_of(CausalLM, Gpt2, bpe, tmp_path / "model"), str(tmp_path / "run"), tmp_path / "out"
    assert load_model(folder).settings.stop_ids == (bpe.vocabulary.eos,)  # of generation_config.json
    new = jaxlm.load(str(folder)).generate(["the tree"], max_new_tokens=4)[0].ids[1]
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=new)
    assert load_model(folder).settings.stop_ids == (new,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [new, 5, 10**6]}))
    change(folder / "tokenizer_config.json", truncation_side="left", padding_side="left", chat_template="old")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["import", str(folder), run]) == main(["export", run, str(out)]) == 0
    for path in (folder, run, out):
        assert jaxlm.load(str(path)).generate(["the tree"], max_new_tokens=4)[0].ids[1:] == [new]
        assert len(jaxlm.load(str(path)).generate(["the tree"], max_new_tokens=4, stop_ids=[])[0].ids) == 4
    assert read_json(out / "generation_config.json")["eos_token_id"] == [new, 5]
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert (theirs.truncation_side, theirs.padding_side, theirs.chat_template) == ("left", "left", "{{ messages }}")
    # After training also the token that ended its texts.
    assert FolderSettings(None, (new,)).after_training(None, 3).stop_ids == (new, 3)
    assert FolderSettings(None, ()).after_training(None, 3).stop_ids == ()


def test_how_a_published_decoder_samples(bpe, tmp_path):  # noqa: F811
    """Its exports and continuations sample as it does; a task's answers are those of its evaluation."""
    folder, run, out = folder_of(CausalLM, Gpt2, bpe, tmp_path / "model"), str(tmp_path / "run"), tmp_path / "out"
    plain = read_json(folder / "generation_config.json")
    wanted = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1,
                  num_beams=4, max_length=30)
    change(folder / "generation_config.json", **wanted, length_penalty=None, cache_implementation="static")
    assert main(["import", str(folder), run]) == main(["export", run, str(out)]) == 0
    assert read_json(out / "generation_config.json") == plain | wanted
    assert transformers.AutoModelForCausalLM.from_pretrained(out).generation_config.temperature == 0.6
    loaded = load_model(run)
    assert loaded.settings.sampling == load_model(folder).settings.sampling == tuple(wanted.items())
    assert loaded.settings.after_training(None, 3).sampling == tuple(wanted.items())
    (folder / "generation_config.json").unlink()  # as in older folders
    change(folder / "config.json", **wanted)
    assert load_model(folder).settings.sampling == tuple(wanted.items())
    task = TextToText(max_target=7).with_pretrained_model(loaded).bind(bpe.vocabulary, 37)
    export_folder(tmp_path / "task", task, loaded.params, bpe, ModelCard(), sampling=loaded.settings.sampling)
    assert not read_json(tmp_path / "task/generation_config.json").keys() & wanted.keys()


def test_wrapped_weights_and_adapters(bpe, tmp_path, capsys):  # noqa: F811
    folder = folder_of(MaskedLM, Bert, bpe, tmp_path / "model")
    before, file = import_folder(folder).params, folder / "model.safetensors"
    save_file({f"module._orig_mod.{name}": x for name, x in load_file(file).items()}, file)
    capsys.readouterr()
    after = import_folder(folder)
    word = [params["embeddings"]["word"]["embedding"] for params in (before, after.params)]
    np.testing.assert_array_equal(*word)
    assert not after.fresh and not capsys.readouterr().err
    (folder / "adapter_config.json").write_text("{}")
    import_folder(folder)
    assert "has an adapter (adapter_config.json), which is not read" in capsys.readouterr().err
    file.unlink()
    with pytest.raises(UserError, match="has an adapter"):
        import_folder(folder)


@pytest.mark.parametrize("flag", [["vocab-size", "999"], ["tokenizer-kind", "bpe"], ["normalization", "identity"]])
def test_a_tokenizer_cannot_be_trained_for_a_pretrained_model(flag, sentence_folder, capsys):
    with pytest.raises(UserError, match=f"has a tokenizer of its own; leave out --data.{flag[0]}"):
        resolve("bert_tiny", [f"--data.{flag[0]}", flag[1]], "MODEL", pretrained=load_model(sentence_folder))
    resolve("bert_tiny", ["--data.tokenizer", str(sentence_folder), f"--data.{flag[0]}", flag[1]])
    assert f"has a vocabulary already; --data.{flag[0]} changes nothing." in capsys.readouterr().err


def test_widths_and_prompts_are_read_again(bpe, tmp_path):  # noqa: F811
    assert read(folder_of(MaskedLM, Bert, bpe, tmp_path / "model", vectors=SETTINGS)) == SETTINGS


@pytest.mark.parametrize("side", first_fast(["left", "right"]))
def test_a_decoder_that_embeds_with_instructions(side, tmp_path):
    """As Qwen3-Embedding: the last token, an end symbol by the tokenizer's template, prompts, padding in front."""
    folder = save_form("qwen3", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end, number = tokenizer.eos_token, tokenizer.eos_token_id
    first, other = ([{"Sequence": {"id": name, "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}]
                    for name in "AB")
    change(folder / "tokenizer.json", post_processor={"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        {"type": "TemplateProcessing", "single": first, "pair": [*first, *other],
         "special_tokens": {end: {"id": end, "ids": [number], "tokens": [end]}}},
    ]})
    change(folder / "tokenizer_config.json", padding_side=side)
    torch.manual_seed(0)
    model = transformers.Qwen3Model(transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=number, eos_token_id=number,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    change(folder / "config.json", architectures=["Qwen3ForCausalLM"])  # with the tensors of the bare model, as there
    instruction = "Instruct: find the tree\nQuery:"
    settings = {"prompts": {"query": instruction, "document": ""}, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    kinds = ("", "1_Pooling", "2_Normalize")
    for kind in kinds[1:]:
        (folder / kind).mkdir()
    (folder / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": kind, "type": f"sentence_transformers.models.{kind[2:] or 'Transformer'}"}
        for i, kind in enumerate(kinds)]))
    (folder / "1_Pooling/config.json").write_text(json.dumps(
        {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True, "include_prompt": True}))
    texts = ["the cat", "mat, then it ran " * 6, "a", "it " * 90]
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.tokenizer.padding_side == side and theirs.tokenizer(texts)["input_ids"][0][-1] == number
    wanted = {"query": theirs.encode_query(texts), "document": theirs.encode_document(texts)}
    assert np.abs(wanted["query"] - wanted["document"]).max() > 0.1
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["import", str(folder), run]) == main(["export", run, out]) == 0
    for path in (folder, run, out):
        ours = load_trained(path)
        for role, vectors in wanted.items():
            np.testing.assert_allclose(ours.encode(texts, role=role), vectors, atol=1e-5)
    again = SentenceTransformer(out, device="cpu")
    assert again.tokenizer.padding_side == side and again.prompts["query"] == instruction
    np.testing.assert_allclose(again.encode_query(texts), wanted["query"], atol=1e-5)
