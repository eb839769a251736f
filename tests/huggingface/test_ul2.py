"""UL2 in Transformers: T5ForConditionalGeneration with the modes' symbols; a T5 that is trained further as UL2."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxlm.cli import main
from jaxlm.config.presets import load_config
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.generate import generate
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import class_of
from jaxlm.objectives.mixture_of_denoisers import MODES, MixtureOfDenoisers
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import random_params
from tests.training.support import write_text
from tests.training.test_init_from import first_params

MODEL = T5(
    hidden_size=24, num_layers=2, num_heads=2, head_dim=8, intermediate_size=40, activation="gated-gelu",
    tied_head=False, scaled_head=False,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", documents=80)


def tokenizer_of(text: Path, folder: Path, **settings) -> Tokenizer:
    return train_tokenizer([text.read_text()], folder, kind="bpe", **settings)


@pytest.mark.slow
def test_exported_model_generates_the_same_text(text, tmp_path):
    tokenizer = tokenizer_of(text, tmp_path / "own", vocab_size=512, symbols=MODES)
    objective = MixtureOfDenoisers(model=MODEL).bind(tokenizer.vocabulary, 32)
    params = random_params(objective, 3)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(out, output_loading_info=True)
    assert type(model) is transformers.T5ForConditionalGeneration
    assert not report["missing_keys"] and not report["unexpected_keys"]
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for mode in MODES:
        ids = tokenizer.encode_with_symbols(f"{mode} bada gofu")
        assert ids == [tokenizer.vocabulary.id(mode), *tokenizer.encode("bada gofu")]
        assert theirs(f"{mode} bada gofu")["input_ids"] == [*ids, tokenizer.vocabulary.eos]
        with torch.no_grad():
            expected = model.eval().generate(
                torch.tensor([[*ids, tokenizer.vocabulary.eos]]), max_new_tokens=8, do_sample=False, num_beams=1,
            )[0].tolist()
        assert generate(objective, params, [ids], max_new_tokens=8) == [expected[1:]]
    # The class does not say what it was trained for: it comes back as the model's own objective.
    imported = import_folder(out)
    assert class_of(imported.objective) is SpanCorruption and imported.objective.model == objective.model
    jax.tree.map(np.testing.assert_array_equal, imported.params, params)


@pytest.mark.slow
def test_continued_pretraining_adds_missing_special_tokens(text, tmp_path):
    """`--init-from` (U-PaLM, Tay et al. 2022): embedding and output matrix get rows for the new symbols."""
    tokenizer = tokenizer_of(text, tmp_path / "own", vocab_size=639)
    objective = SpanCorruption(model=MODEL).bind(tokenizer.vocabulary, 32)
    assert objective.model.vocab_size == 640 and not set(MODES) & set(tokenizer.vocabulary.symbols)
    params = random_params(objective, 1)
    hf = export_folder(tmp_path / "hf", objective, params, tokenizer, ModelCard())
    run, out = tmp_path / "run", tmp_path / "out"
    assert main([
        "pretrain", str(Path(__file__).parents[2] / "configs" / "ul2_tiny.py"), "--init-from", str(hf), "--run-dir",
        str(run), "--data.source", str(text), "--data.length", "16", "--data.held-out", "0.1", "--train.steps", "1",
        "--train.batch-size", "4", "--train.tracker", "none",
    ]) == 0
    objective = load_config(run / "config.json").objective
    assert class_of(objective) is MixtureOfDenoisers and objective.model.vocab_size == 768
    ours = first_params(run)
    np.testing.assert_array_equal(ours["shared"]["embedding"][:640], params["shared"]["embedding"])
    np.testing.assert_array_equal(ours["lm_head"]["kernel"][:, :640], params["lm_head"]["kernel"])
    assert main(["export", str(run), str(out)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.convert_tokens_to_ids(list(MODES)) == [639, 640, 641]
    assert theirs("bada gofu")["input_ids"] == [*tokenizer.encode("bada gofu"), tokenizer.vocabulary.eos]
