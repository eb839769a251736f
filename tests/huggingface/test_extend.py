"""`jaxlm tokenizer extend`: a model with the words of a new text, as a Transformers folder.

The peers are AutoTokenizer and the tensors of the old folder; the texts are real.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from safetensors.numpy import load_file

from jaxlm.cli import main
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import DebertaV3
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.runs.load import load_model
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import random_params
from tests.training.support import metrics

SIZES = dict(hidden_size=16, num_layers=1, num_heads=2)
WORDS = 150
# Tensors with a row for each id.
TABLES = {
    "wordpiece": {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
    "albert": {"albert.embeddings.word_embeddings.weight", "predictions.bias"},
    "t5": {"shared.weight", "lm_head.weight"},
    "xlm-roberta": {"roberta.embeddings.word_embeddings.weight", "lm_head.bias"},
    "gpt2": {"transformer.wte.weight"},
    "roberta": {"roberta.embeddings.word_embeddings.weight", "lm_head.bias"},
}


@pytest.fixture(scope="module")
def texts(real_data, tmp_path_factory) -> dict[str, Path]:
    """JSON lines: `new`, scientific English and Korean; `old` and `lines`, English, Korean and scientific."""
    folder = tmp_path_factory.mktemp("texts")

    def wiki(name: str, start: int, end: int) -> list[str]:
        with lzma.open(real_data / "pretrain" / f"wiki_{name}.jsonl.xz", "rt", encoding="utf-8") as file:
            return [json.loads(line)["text"] for line in itertools.islice(file, start, end)]

    with gzip.open(real_data / "scitldr" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        science = [" ".join(json.loads(line)["source"]) for line in itertools.islice(file, 400)]
    english, korean = wiki("en", 0, 300), wiki("ko", 0, 120)
    lines = [
        [line for text in document for line in text.split("\n") if len(line) > 20][-length:]
        for document, length in ((english, 170), (korean, 170), (science[300:], 160))
    ]
    parts = {"new": [*science[:300], *korean[:80]], "old": english[:200], "lines": list(itertools.chain(*lines))}
    for name, content in parts.items():
        (folder / name).with_suffix(".jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in content), encoding="utf-8"
        )
    return {name: folder / f"{name}.jsonl" for name in parts}


def read(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def xlm_roberta_vocabulary(texts: list[str], folder: Path) -> Path:
    """A small SentencePiece model in the form that XLM-R was published in."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line[:2000] for text in texts for line in text.split("\n")]), vocab_size=1500,
        model_prefix=str(folder / "sentencepiece.bpe"), character_coverage=0.999, minloglevel=2, num_threads=2,
    )
    return folder / "sentencepiece.bpe.model"


def make_folder(kind: str, data: Path, texts: dict[str, Path], folder: Path) -> Path:
    """Write a model with random weights and a published vocabulary, or one like it."""
    files = data / "tokenizers"
    if kind == "wordpiece":
        objective, tokenizer = MaskedLM(Bert(**SIZES)), Tokenizer.load(files / "bert-base-uncased" / "vocab.txt")
    elif kind == "albert":
        objective, tokenizer = MaskedLM(Albert(**SIZES)), Tokenizer.load(files / "albert" / "spiece.model")
    elif kind == "t5":  # jaxlm's own vocabulary; output matrix of its own, a multiple of 128 rows
        tokenizer = train_tokenizer(read(texts["old"]), folder / "vocabulary", vocab_size=1500)
        objective = SpanCorruption(T5(head_dim=8, intermediate_size=32, tied_head=False, scaled_head=False, **SIZES))
    elif kind == "xlm-roberta":
        objective = MaskedLM(Roberta(**SIZES), input_format="full-sentences")
        tokenizer = Tokenizer.load(xlm_roberta_vocabulary(read(texts["old"]), folder))
    elif kind == "gpt2":
        objective, tokenizer = CausalLM(Gpt2(**SIZES)), Tokenizer.load(files / "gpt2")
    else:  # 64 · 24 rows, of which 36 have no token
        tokenizer = train_tokenizer(read(texts["old"]), folder / "vocabulary", kind="byte-bpe", vocab_size=1500)
        objective = MaskedLM(Roberta(vocab_size=1536, **SIZES), input_format="full-sentences")
    objective = objective.bind(tokenizer.vocabulary, 32)
    export_folder(folder / "old", objective, random_params(objective), tokenizer, ModelCard())
    return folder / "old"


FAST = ("wordpiece",)


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in TABLES]
)
def extended(request, real_data, texts, tmp_path_factory) -> tuple[str, Path, Path]:
    """Kind, folder of the model, and folder of the extended one."""
    folder = tmp_path_factory.mktemp(request.param)
    old = make_folder(request.param, real_data, texts, folder)
    assert main(["tokenizer", "extend", str(old), "--data.source", str(texts["new"]), "--words", str(WORDS),
                 str(folder / "new"), "--old-text", str(texts["old"])]) == 0
    return request.param, old, folder / "new"


def test_ids_of_500_lines_are_those_of_transformers(extended, texts):
    _, old, new = extended
    lines = read(texts["lines"])
    assert len(lines) == 500
    before, theirs = map(transformers.AutoTokenizer.from_pretrained, (old, new))
    ours = Tokenizer.load(new)
    for line in lines:
        assert theirs(line, add_special_tokens=False)["input_ids"] == ours.encode(line)
    size = len(before)
    assert theirs.convert_ids_to_tokens(range(size)) == before.convert_ids_to_tokens(range(size))
    assert len(theirs) == len(ours) >= size + WORDS
    ids = [np.concatenate(one(lines, add_special_tokens=False)["input_ids"]) for one in (before, theirs)]
    assert len(ids[1]) < len(ids[0]) and (ids[1] >= size).sum() > 100


def means_of_pieces(old: Path, new: Path, table: np.ndarray) -> np.ndarray:
    """Return the mean of the rows of each new id's pieces, as the old vocabulary's model cuts them."""
    old_model = tokenizers.Tokenizer.from_file(str(old / "tokenizer.json"))
    pieces = transformers.AutoTokenizer.from_pretrained(new).convert_ids_to_tokens
    size, end = old_model.get_vocab_size(), len(transformers.AutoTokenizer.from_pretrained(new))
    segments = ([token.id for token in old_model.model.tokenize(piece)] for piece in pieces(range(size, end)))
    return np.stack([table[ids].astype(np.float64).mean(0) for ids in segments])


def test_rows_of_new_words_are_the_means_of_their_pieces(extended):
    kind, old, new = extended
    before, after = (load_file(folder / "model.safetensors") for folder in (old, new))
    size = tokenizers.Tokenizer.from_file(str(old / "tokenizer.json")).get_vocab_size()
    config = json.loads((new / "config.json").read_text())
    grown = {name for name in before if before[name].shape != after[name].shape}
    assert grown == TABLES[kind] and before.keys() == after.keys()
    rng = np.random.default_rng(0)
    for name, table in before.items():
        if name not in grown:
            np.testing.assert_array_equal(after[name], table)
            continue
        np.testing.assert_array_equal(after[name][:size], table[:size])
        wanted = means_of_pieces(old, new, table)
        rows = after[name][size : size + len(wanted)]
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-7)
        assert table.ndim == 1 or rows.std(axis=0).min() > 0.2 * table.std(), "resize_token_embeddings: all rows equal"
        mutant = rng.normal(table.mean(0), table.std(0), rows.shape)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(mutant, wanted, rtol=0, atol=1e-7)
        assert len(after[name]) == config["vocab_size"]
        # As likely as an end of text, rows without a token would be drawn in its place.
        spare, mean = after[name][max(len(table), size + len(wanted)) :], table[:size].astype(np.float64).mean(0)
        np.testing.assert_allclose(spare, np.broadcast_to(mean, spare.shape), rtol=0, atol=1e-7)
    rows, before_rows = config["vocab_size"], json.loads((old / "config.json").read_text())["vocab_size"]
    assert rows % (128 if kind == "t5" else 64 if before_rows % 64 == 0 else 1) == 0
    assert rows - (size + len(wanted)) < 128


def test_transformers_opens_the_model(extended):
    _, _, new = extended
    architecture = json.loads((new / "config.json").read_text())["architectures"][0]
    _, found = getattr(transformers, architecture).from_pretrained(new, output_loading_info=True)
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("extended", ["wordpiece"], indirect=True)
def test_pretraining_continues(extended, texts, tmp_path, preset):
    _, _, new = extended
    run = tmp_path / "run"
    assert main(["pretrain", str(preset), "--init-from", str(new), "--run-dir", str(run), "--data.source",
                 str(texts["new"]), "--train.steps", "4"]) == 0
    rows = json.loads((new / "config.json").read_text())["vocab_size"]
    model = load_model(run)
    assert model.objective.model.vocab_size == rows == len(model.tokenizer) == 30_522 + WORDS
    trained, began = (np.asarray(m.params["embeddings"]["word"]["embedding"]) for m in (model, load_model(new)))
    assert (trained[30_522:] != began[30_522:]).any(axis=1).sum() > WORDS // 2


@pytest.mark.slow
def test_loss_on_old_text_before_training(texts, tmp_path):
    """Within 5 % of that before, for a trained model: new words take little probability from the old ones."""
    preset = Path(__file__).parents[2] / "configs" / "bert_tiny.py"
    base = ["pretrain", str(preset), "--data.source", str(texts["old"]), "--data.held-out", "0.2",
            "--data.length", "32", "--train.phases", "", "--train.eval-every", "0", "--train.eval-batches", "40"]
    assert main([*base, "--run-dir", str(tmp_path / "run"), "--train.steps", "300", "--data.vocab-size", "2048"]) == 0
    assert main(["tokenizer", "extend", str(tmp_path / "run"), str(tmp_path / "new"), "--words", "300",
                 "--data.source", str(texts["new"]), "--old-text", str(texts["old"])]) == 0
    losses = []
    for name in ("run", "new"):
        run = tmp_path / f"{name}-evaluated"
        assert main([*base, "--init-from", str(tmp_path / name), "--run-dir", str(run), "--train.steps", "1",
                     "--optimizer.learning-rate", "1e-12"]) == 0
        losses.append(metrics(run)[-1]["eval_mlm_loss"])
    print(losses)
    assert losses[0] < 6.5  # log(2048) is 7.6
    assert abs(losses[1] / losses[0] - 1) < 0.05, losses


def test_parameters_that_a_folder_lacks_are_not_taken_for_trained(vocab_file, tmp_path, capsys):
    """A DeBERTa v3 published as a discriminator alone, extended, then imported and exported again."""
    text, tokenizer = tmp_path / "text.txt", Tokenizer.load(vocab_file)
    text.write_text("the unsatable catdogs ran. " * 20)
    model = DebertaV3(**SIZES, intermediate_size=24, max_positions=40, position_buckets=8, generator_num_layers=1)
    objective = ReplacedTokens(model=model, mask_share=1.0, two_segments=False).bind(tokenizer.vocabulary, 32)
    export_folder(tmp_path / "old", objective, random_params(objective), tokenizer, ModelCard())
    shutil.rmtree(tmp_path / "old" / "generator")
    old, new, run, again = (str(tmp_path / name) for name in ("old", "new", "run", "again"))
    assert main(["tokenizer", "extend", old, new, "--data.source", str(text), "--old-text", str(text)]) == 0
    assert main(["import", new, run]) == 0 and main(["export", run, again]) == 0
    fresh = load_model(old).fresh
    assert fresh and all(name.startswith("generator/") for name in fresh)
    for folder in (new, run, again):
        assert load_model(folder).fresh == fresh
        assert main(["fill-mask", folder, "the [MASK] ran"]) == 2
        assert "so it would answer at random" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["words", "bytes", "no weights", "out", "short text"])
def test_mistakes_are_refused_by_one_sentence(case, vocab_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the unsatable catdogs ran. " * (1 if case == "short text" else 20))
    tokenizer = Tokenizer.load(vocab_file)
    if case in ("words", "bytes"):
        tokenizer = train_tokenizer([text.read_text()], tmp_path / "vocabulary", kind=case, vocab_size=500)
    objective = MaskedLM(Bert(**SIZES)).bind(tokenizer.vocabulary, 32) if case != "bytes" else CausalLM(
        Gpt2(**SIZES)).bind(tokenizer.vocabulary, 32)
    export_folder(tmp_path / "model", objective, random_params(objective), tokenizer, ModelCard())
    if case == "no weights":
        (tmp_path / "model" / "model.safetensors").unlink()
    if case == "out":
        out.mkdir()
        (out / "file").touch()
    arguments = ["tokenizer", "extend", str(tmp_path / "model"), str(out), "--data.source", str(text)]
    assert main([*arguments, "--old-text", str(text)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxlm:")]
    assert {"words": "has whole words or bytes", "bytes": "has whole words or bytes",
            "no weights": "has no model.safetensors", "out": "exists and is not empty",
            "short text": "no word of several pieces that occurs 5 times"}[case] in line
    assert case == "out" or not out.exists()
