"""The report of a text, against counts by hand."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.data import describe
from jaxlm.data.describe import count_contained, describe_text
from jaxlm.data.text import TextData
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.data.stand_ins import store_of

ADVICE = "; choose one of its languages, or train one on it (--data.tokenizer auto --data.vocab-size {} or more)"


@pytest.fixture
def tokenizer(tmp_path):
    """WordPiece with two whole letters, and one that continues words alone."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "한"]))
    return Tokenizer.load(str(tmp_path / "vocab.txt"))


def test_the_lines_are_counts(tokenizer, tmp_path):
    documents = ["a" * size for size in range(1, 102)]
    store = store_of(tmp_path / "store", documents)
    lengths, scripts, _, lacking = describe_text(store, tokenizer, ["aab", "ab 한한\n", "zz?z1"])
    expected = [f"{np.percentile(range(1, 102), share):,.0f} ({share} %)" for share in (10, 50, 90, 100)]
    assert lengths == f"Tokens of 101 documents, at most: {', '.join(expected)}"
    assert scripts == "Scripts of 10 letters: Latin 80.00%, Hangul 20.00%"
    # z, ? and 1; b is there as ##b. Five of the fourteen characters, with the space and the line end.
    assert lacking == "The vocabulary lacks 3 of 6 characters, 35.714% of the text, such as z ? 1" + ADVICE.format(812)


def test_the_command_reports_on_each_source(tokenizer, tmp_path, capsys):
    for name in "pq":
        rows = [json.dumps({"text": f"{name} a ab"})] * 40
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    source = f"{tmp_path / 'p.jsonl'}@1,{tmp_path / 'q.jsonl'}@2"
    flags = ["configs/bert_tiny.py", "--data.source", source, "--data.tokenizer", str(tmp_path / "vocab.txt")]
    assert main(["tokenize", *flags, "--report"]) == 0
    said = capsys.readouterr().out
    for name in "pq":
        assert f"{tmp_path / name}.jsonl: Scripts of 160 letters: Latin 100.00%\n" in said
        lacking = f"The vocabulary lacks 1 of 3 characters, 16.667% of the text, such as {name}" + ADVICE.format(806)
        assert f"{tmp_path / name}.jsonl: {lacking}\n" in said
    assert main(["tokenize", *flags]) == 0
    assert "Scripts" not in capsys.readouterr().out


def test_bytes_lack_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(["zażółć gęślą jaźń 한국 \u200d"] * 30))
    data, lines = TextData(source=str(tmp_path / "text.txt"), tokenizer_kind="bytes", cache_dir=str(tmp_path)), []
    data.describe(data.prepare_tokenizer(list), lines.append)
    assert "The vocabulary lacks 0 of " in lines[-1] and lines[-1].endswith(" 0.000% of the text")


@pytest.mark.parametrize("kind", ["unigram", "byte-bpe"])
def test_what_is_spelt_in_bytes_is_counted(kind, tmp_path):
    """Chinese under an English vocabulary; one of the size that the line names spells less than 5 % so."""
    draw, letters = np.random.default_rng(0), [chr(0x4E00 + 7 * n) for n in range(60)]
    texts = ["".join(draw.choice(letters, 20)) + " the same words in English" for _ in range(50)]
    english = train_tokenizer([text[20:] for text in texts], tmp_path / "t", kind=kind, vocab_size=480)
    lines, store = [], store_of(tmp_path / "store", texts)
    for tokenizer in (english, None):
        tokenizer = tokenizer or train_tokenizer(texts, tmp_path / "u", kind=kind, vocab_size=size)  # noqa: F821
        lines.append([line for line in describe_text(store, tokenizer, texts) if line.startswith("The vocabulary")])
        size = int(re.search("vocab-size ([0-9]+)", lines[0][1])[1])
    share = 1000 / sum(map(len, texts))
    spelt = f"The vocabulary spells in bytes 60 of 75 characters, {share:.3%} of the text, such as "
    assert "lacks 0 of" in lines[0][0] and lines[0][1].startswith(spelt)
    assert size == 2 * (75 + 400) and "lacks 0 of" in lines[1][0]
    shares = [float(re.search(r"([0-9.]+)% of the text", line)[1]) for line in lines[1][1:]]
    assert all(share < 5 for share in shares) and "%" in lines[1][0] and "choose" not in "".join(lines[1])


@pytest.mark.parametrize("at_once", [7, 1 << 20])
def test_held_out_documents_in_the_training_text(tmp_path, monkeypatch, at_once):
    """Against sets of runs; documents that are copied whole, in part, or too short."""
    monkeypatch.setattr(describe, "_AT_ONCE", at_once)
    draw = np.random.default_rng(0)
    base = ["".join(map(chr, draw.integers(97, 123, draw.integers(5, 90)))) for _ in range(150)]
    copies = [text[: len(text) * 9 // 10] + "!" * (i % 20) for i, text in enumerate(base[::2])]
    store = store_of(tmp_path / "store", base + copies, held_out=0.3)
    texts = []
    for split in (store.train, store.held_out):
        ends, tokens = split.offsets.read(0, split.documents + 1), split.tokens.read(0, split.num_tokens)
        texts.append([tokens[start:end].tolist() for start, end in itertools.pairwise(ends)])

    def runs(text):
        return [tuple(text[start : start + 13]) for start in range(len(text) - 12)]

    trained = {run for text in texts[0] for run in runs(text)}
    shares = [np.mean([run in trained for run in runs(text)]) for text in texts[1] if runs(text)]
    expected = sum(share >= 0.8 for share in shares)
    assert count_contained(store) == (expected, len(shares)) and 5 < expected < len(shares) - 5


def test_of_a_large_text_evenly_spaced_blocks_are_read(tokenizer, tmp_path, monkeypatch):
    """The longest document is that of all."""
    store = store_of(tmp_path / "store", ["a" * size for size in range(1, 1001)], held_out=0.1)
    train, read = store.train, {"offsets": 0, "tokens": 0}
    for name, value in (("_MOST_LENGTHS", 100), ("_LENGTHS_AT_ONCE", 5), ("_AT_ONCE", 64), ("_MOST_SEARCHED", 40_000)):
        monkeypatch.setattr(describe, name, value)
    for array, name in ((train.offsets, "offsets"), (train.tokens, "tokens")):
        def counted(start, end, name=name, original=array.read):
            read[name] += end - start
            return original(start, end)

        monkeypatch.setattr(array, "read", counted)
    lengths, _, contained, _ = describe_text(store, tokenizer, ["a"])
    n, every = train.documents, -(-train.num_tokens // 40_000)
    own = np.diff(type(train.offsets).read(train.offsets, 0, n + 1))
    assert 40 < int(lengths.split()[2]) <= 100 and f" of {n:,} documents, at most: " in lengths
    assert lengths.endswith(f", {own.max():,} (100 %)") and 50 < read["offsets"] < 130
    assert abs(int(re.search(r"([0-9]+) [(]50 %[)]", lengths)[1]) - np.median(own)) < 50
    assert every > 5 and contained.endswith(f"-grams in 1/{every} of the training text, in evenly spaced blocks")
    assert 30_000 < read["tokens"] < 50_000


def test_without_held_out_text_nothing_is_contained(tmp_path):
    assert count_contained(store_of(tmp_path / "store", ["a" * 50] * 5)) == (0, 0)
    assert count_contained(store_of(tmp_path / "short", ["abc", "def"] * 20, held_out=0.3)) == (0, 0)
