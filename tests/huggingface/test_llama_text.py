"""Special tokens and texts of the families with the layers of Llama: masks, how a text begins, spare tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import jaxlm
from jaxlm.data.labelled import Record
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.runs.resolve import resolve
from jaxlm.tasks.text_to_text import TextToText
from tests.huggingface.rotary_models import LENGTH, TOLERANCE
from tests.huggingface.support import read_json


def test_a_mask_of_tokens_in_reserve(pair, tmp_path):
    """Llama 3 has some. A tokenizer with a mask keeps it; one without begin symbol begins texts with the end symbol."""
    imported = pair("llama").ours
    reserve = imported.tokenizer.with_symbols(["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"])
    found = dataclasses.replace(imported, tokenizer=reserve).in_direction(False)
    assert found.params is imported.params and found.tokenizer.vocabulary.mask == 272 == len(reserve) - 2
    assert found.tokenizer.encode_with_symbols("the <|reserved_special_token_0|>") == [*reserve.encode("the"), 272]
    assert found.in_direction(False).tokenizer == found.tokenizer
    content = read_json(pair("llama").folder / "tokenizer_config.json") | {"bos_token": None}
    folder = Path(shutil.copytree(pair("llama").folder, tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    v = import_folder(folder).in_direction(False).tokenizer.vocabulary
    assert (v.bos, v.cls, v.sep, v.mask) == (-1, 271, 271, 272)


def test_a_decoder_has_the_mask_of_a_later_phase(pair, tmp_path):
    preset = tmp_path / "x.py"
    preset.write_text(
        "import dataclasses\n"
        "from jaxlm.config.experiment import PhaseConfig\nfrom jaxlm.config.presets import load_preset\n"
        "from jaxlm.models.llama import Llama\nfrom jaxlm.objectives.causal_lm import CausalLM\n"
        "from jaxlm.objectives.masked_lm import MaskedLM\n"
        "found = load_preset('clm_then_mlm_tiny')\n"
        "phases = PhaseConfig(2), PhaseConfig(2, objective=MaskedLM(input_format='document'))\n"
        "experiment = dataclasses.replace(\n"
        "    found, objective=CausalLM(model=Llama()),\n"
        "    train=dataclasses.replace(found.train, steps=4, phases=phases))\n"
    )
    found = resolve(str(preset), ["--data.length", "32"], init_from=str(pair("llama").folder))
    first, second = (phase.experiment.objective.model for phase in found.experiment.phases)
    assert (first.is_causal, second.is_causal, found.pretrained.tokenizer.vocabulary.mask) == (True, False, 272)
    assert first.vocab_size == second.vocab_size == found.pretrained.objective.model.vocab_size > 272


def test_a_text_begins_as_the_tokenizer_says(pair, tmp_path):
    """With <bos>, where a prompt is continued, where a continuation is scored, and in rows of a corpus."""
    theirs, folder, imported = pair("mistral")
    v, tokenizer = imported.tokenizer.vocabulary, transformers.AutoTokenizer.from_pretrained(folder)
    context, rest, loaded = "the cat sat", " on the mat", jaxlm.load(folder)
    asked = tokenizer(context, return_tensors="pt")
    assert asked.input_ids[0, 0] == v.bos == 270
    with torch.no_grad():
        wanted = theirs.generate(**asked, max_new_tokens=12, do_sample=False, eos_token_id=999, pad_token_id=0)[0]
        whole = tokenizer(context + rest, return_tensors="pt").input_ids
        log_probs = theirs(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
    for text in (context, "<|begin_of_text|>" + context):
        (found,) = loaded.generate([text], max_new_tokens=12, stop_ids=())
        assert found.ids == wanted[asked.input_ids.shape[1] :].tolist()
    (score,) = loaded.score([(context, rest)])
    np.testing.assert_allclose(score.log_probs, log_probs[asked.input_ids.shape[1] - 1 :], atol=TOLERANCE)
    task = TextToText(model=imported.objective.model, max_target=8).bind(v, LENGTH)
    (row,) = task.encode([Record("", "", {"source": context, "targets": [rest]}, ())], imported.tokenizer, LENGTH)
    assert row.arrays["input_ids"][: asked.input_ids.shape[1]].tolist() == asked.input_ids[0].tolist()
    row_format = imported.objective.bind(v, LENGTH).row_format(LENGTH)
    (tmp_path / "x.txt").write_text("\n\n".join([context] * 200))
    data = TextData(source=str(tmp_path / "x.txt"), cache_dir=str(tmp_path), held_out=0.0)
    tokens = data.open(imported.tokenizer, list).batches("train", 1, row_format, 0).batch(0).tokens[0]
    document = [*asked.input_ids[0].tolist(), v.eos]
    assert " ".join(map(str, document)) in " ".join(map(str, tokens))


def test_special_tokens_without_a_row_are_left_out(pair, tmp_path, capsys):
    """Gemma 3's tokenizer has a token of images, which its models of text lack."""
    folder = Path(shutil.copytree(pair("gemma3_text").folder, tmp_path / "x"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    imported = import_folder(folder)
    assert len(imported.tokenizer) == rows == imported.objective.model.vocab_size == len(tokenizer) - 1
    assert "no rows for the special tokens <image_soft_token>; they are left out" in capsys.readouterr().err
    assert imported.tokenizer.encode("the cat") == tokenizer("the cat").input_ids[1:]
    tokenizer.add_tokens(["catcatcat"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=f"{rows + 1} ids but the model only {rows} rows"):
        import_folder(folder)


def test_masks_are_filled_without_cls_and_with_the_end_symbol_as_padding(pair, tmp_path):
    """The batch is padded with the end symbol; the mask takes the space before it."""
    imported = pair("eurobert").ours
    v = imported.tokenizer.vocabulary
    assert v.pad == v.eos == v.sep and v.cls == v.bos and v.mask not in (v.pad, v.bos)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (pair("eurobert").folder, out))
    texts = ["the cat <|mask|> on the mat", "the<|mask|>", "옛날에 🙂  <|mask|> tree\n ran under it then"]
    for text in texts:
        assert before(text).data == after(text).data and before(text)["input_ids"][0] == v.bos
        assert before(text)["input_ids"][1:] == imported.tokenizer.encode_with_symbols(text)
    assert before(*texts[:2]).data == after(*texts[:2]).data
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)
    *filled, named = fill_mask(imported, [*texts, "the cat [MASK] on the mat"], 3)
    assert named == filled[0]
    for text, answers in zip(texts, filled, strict=True):
        np.testing.assert_allclose([p for _, p in answers[0]], [each["score"] for each in library(text)], atol=1e-5)
