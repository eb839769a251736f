"""Pretraining text: tokenizer and token store in the cache folder, and mistakes."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from typing import NamedTuple

import numpy as np
import pytest
from etils import epath

from jaxlm.cli import main
from jaxlm.data import cache, parts
from jaxlm.data.base import RowFormat
from jaxlm.data.store import Store
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import Tokenizer

DATA = os.environ.get("JAXLM_DATA", "")
VOCABULARY = os.path.join(DATA, "tokenizers", "bert-base-uncased", "vocab.txt")


class Prepared(NamedTuple):
    tokenizer: Tokenizer
    store: Store


def prepare(config, report):
    """Return tokenizer and store, as a run prepares them."""
    config = dataclasses.replace(config)  # one object lists its text once
    tokenizer = config.prepare_tokenizer(report)
    return Prepared(tokenizer, config.open(tokenizer, report))


def write_words(path, count, seed=0):
    """Write documents of made-up words, enough text for a small vocabulary."""
    random = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(random.choice(syllables, 3)) for _ in range(400)]
    documents = [" ".join(random.choice(words, 60)) + "." for _ in range(count)]
    path.write_text("\n\n".join(documents))
    return documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_words(path / "words.txt", 120)
    return path


def test_a_cache_folder_that_cannot_be_written_names_its_variable(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "file"))
    for chosen, advice in (("", "set the variable JAXLM_CACHE to"), (config.source, "choose")):
        with pytest.raises(UserError, match=rf"cannot be written \(Not a directory\); {advice} another folder\.$"):
            prepare(dataclasses.replace(config, cache_dir=chosen), list)


@pytest.fixture(scope="module")
def config(folder):
    return TextData(
        source=str(folder / "words.txt"), cache_dir=str(folder / "cache"), vocab_size=600, held_out=0.05, length=32
    )


def test_a_text_is_prepared_once(folder, config):
    lines = []
    first = prepare(config, lines.append)
    assert [line.split()[0] for line in lines] == ["Training", "Tokenizing"]
    assert first.tokenizer.vocabulary.size == first.store.vocab_size == 600
    assert first.store.manifest["tokenizer"] == first.tokenizer.fingerprint
    assert first.store.held_out.documents >= 1
    assert 2 < first.store.statistics.unigram_entropy < np.log(600)
    train = first.store.train
    sizes = np.diff(train.offsets.read(0, train.documents + 1))
    assert first.store.statistics.longest_document == sizes.max() / sizes.sum()

    again = prepare(dataclasses.replace(config, length=512, workers=3), lines.append)
    assert len(lines) == 2  # at once, and for every objective
    assert again.store.folder == first.store.folder

    # What is stored is the text.
    batch = first.store.batches("train", 4, RowFormat("document", 20), 0).batch(0)
    text = (folder / "words.txt").read_text()
    for row in batch.tokens:
        assert first.tokenizer.decode(row).strip() in text

    # A copy under another name and time is read again, and gives the same store.
    copy = folder / "copy.jsonl"
    documents = (folder / "words.txt").read_text().split("\n\n")
    copy.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    tokenizer = str(folder / "tokenizer")
    first.tokenizer.save(tokenizer)
    same = prepare(dataclasses.replace(config, source=str(copy), tokenizer=tokenizer), lines.append)
    assert same.store.fingerprint == first.store.fingerprint
    assert same.store.manifest["parts"] == first.store.manifest["parts"]
    assert [line.split()[0] for line in lines[2:]] == ["Tokenizing"]


def test_an_empty_name_of_a_tokenizer_is_refused(config):
    with pytest.raises(UserError, match=r"data\.tokenizer is empty; leave the flag out"):
        dataclasses.replace(config, tokenizer="").prepare_tokenizer()


def test_share_and_text_change_the_store(folder, config, tmp_path):
    first = prepare(config, lambda line: None)
    other_share = prepare(dataclasses.replace(config, held_out=0.2), lambda line: None)
    assert other_share.tokenizer == first.tokenizer
    assert other_share.store.fingerprint != first.store.fingerprint
    assert other_share.store.held_out.documents > first.store.held_out.documents

    path = tmp_path / "words.txt"
    path.write_text((folder / "words.txt").read_text())
    same = dataclasses.replace(config, source=str(path))
    assert prepare(same, lambda line: None).store.fingerprint == first.store.fingerprint
    path.write_text(path.read_text()[:-1] + "!")  # the same size, one character changed
    changed = prepare(same, lambda line: None)
    assert changed.store.fingerprint != first.store.fingerprint
    assert changed.store.manifest["text"] != first.store.manifest["text"]


def test_the_tokenizer_alone(config, tmp_path):
    trained = config.prepare_tokenizer(lambda line: None)
    assert trained == prepare(config, lambda line: None).tokenizer
    trained.save(tmp_path / "own")
    given = dataclasses.replace(config, tokenizer=str(tmp_path / "own"))
    assert given.prepare_tokenizer(lambda line: None) == trained
    assert prepare(given, lambda line: None).store.folder == prepare(config, lambda line: None).store.folder


def test_symbols_of_an_objective(config, tmp_path):
    plain, report = config.prepare_tokenizer(lambda line: None), [].append
    trained = config.prepare_tokenizer(report, symbols=("[R]", "[MASK]"))
    v = trained.vocabulary
    assert trained.piece(v.id("[R]")) == "[R]" and v.special[v.id("[R]")] and v.id("[MASK]") == v.mask
    assert config.prepare_tokenizer(report, symbols=("[R]", "[MASK]")) == trained != plain
    assert config.prepare_tokenizer(report) == plain
    plain.save(tmp_path / "plain")
    with pytest.raises(UserError, match=r"no special token \[R\]; .*--symbols '\[R\]'"):
        dataclasses.replace(config, tokenizer=str(tmp_path / "plain")).prepare_tokenizer(report, symbols=("[R]",))


def test_synthetic_rows_and_statistics(config):
    prepared = prepare(config, lambda line: None)
    vocabulary = prepared.tokenizer.vocabulary
    batch = config.synthetic(3, RowFormat("document", 10), vocabulary)
    assert batch.tokens.shape == batch.segment_ids.shape == (3, 10) and batch.tokens.dtype == np.int32
    assert not vocabulary.special[batch.tokens].any() and (batch.segment_ids.T == [1, 2, 3]).all()
    assert (batch.tokens == config.synthetic(3, RowFormat("document", 10), vocabulary).tokens).all()
    tokens = prepared.store.train.tokens.read(0, prepared.store.train.num_tokens)
    assert (prepared.store.statistics.token_counts == np.bincount(tokens, minlength=600)).all()


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXLM_CACHE", raising=False)
    assert str(cache.cache_folder()) == str(tmp_path / ".cache" / "jaxlm")
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "there"))
    assert str(cache.cache_folder()) == str(tmp_path / "there")
    assert cache.compilation_cache() == str(tmp_path / "there" / "xla")
    assert str(cache.cache_folder("here")) == "here"
    monkeypatch.setenv("JAXLM_CACHE", "~/there")
    assert cache.compilation_cache() == str(tmp_path / "there" / "xla")
    # As if what reads buckets were installed.
    monkeypatch.setattr(cache, "any_path", lambda path: epath.Path(path).expanduser())
    monkeypatch.setenv("JAXLM_CACHE", "gs://bucket/cache")
    assert str(cache.cache_folder()) == "gs://bucket/cache"
    assert cache.compilation_cache() == str(tmp_path / ".cache" / "jaxlm" / "xla"), "compiled programs stay on a disk"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 4), ("vocab_size", 100), ("vocab_size", 1 << 23), ("held_out", -0.1), ("held_out", 0.9),
        ("held_out", float("nan")), ("workers", -1),
    ],
)
def test_values_out_of_range(field, value):
    TextData().validate()
    with pytest.raises(UserError, match=f"data.{field} is "):
        dataclasses.replace(TextData(), **{field: value}).validate()


def test_a_source_is_needed_to_read_text(config):
    """An imported run has no source, but can be planned and asked."""
    sourceless, report = dataclasses.replace(config, source=" "), [].append
    sourceless.validate()
    with pytest.raises(UserError, match=r"--data\.source is empty"):
        sourceless.prepare_tokenizer(report)
    with pytest.raises(UserError, match=r"--data\.source is empty"):
        sourceless.open(config.prepare_tokenizer(report), report)


@pytest.mark.parametrize("text", ["", "\n \n\t\n"])
def test_an_empty_corpus(tmp_path, text):
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(UserError, match=r"empty\.txt holds no text"):
        prepare(TextData(source=str(tmp_path / "empty.txt"), cache_dir=str(tmp_path / "c")), lambda line: None)


def test_what_is_left_out_of_a_text_is_told(config, tmp_path):
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.jsonl").write_text('{"text": null}\n{"text": "one"}\n{"text": " "}\n')
    (folder / "b.pdf").write_text("x")
    lines, config = [], dataclasses.replace(config, source=str(folder), cache_dir=str(tmp_path / "cache"),
                                            tokenizer_kind="bytes", held_out=0.0)
    for count in (4, 2):  # the second time from the cache
        prepare(config, lines.append)
        said = [line for line in lines if not line.startswith(("Training", "Tokenizing"))]
        assert said == ["Files of text: 1; left out: 1 .pdf (b.pdf)",
                        f"Rows of {folder} without text, which are left out: 2"]
        assert len(lines) == count
        lines.clear()


def test_a_vocabulary_larger_than_the_text_supports(config, tmp_path):
    lines = []
    large = dataclasses.replace(config, vocab_size=50_000, cache_dir=str(tmp_path))
    tokenizer, store = prepare(large, lines.append)
    assert 600 < len(tokenizer) == store.vocab_size < 50_000
    size = f"{len(tokenizer):,} ids and not 50,000 (--data.vocab-size)"
    remark = f"The vocabulary has {size}: this text has no more pieces"
    assert remark in lines
    lines.clear()
    assert prepare(large, lines.append).tokenizer == tokenizer and lines == [remark]  # also when it is found again


def test_a_vocabulary_of_words_counts_all_of_the_text(tmp_path, monkeypatch):
    """A vocabulary of pieces comes from a sample, and a mixture's words have its shares."""
    monkeypatch.setattr("jaxlm.data.text._SAMPLE", 10_000)
    rng, lines = np.random.default_rng(0), []
    words = np.array([a + b + c for a in "bdfgk" for b in "aeiou" for c in "lmnprst"] * 12, object)[:2000]
    words += [chr(ord("a") + i // 175) for i in range(2000)]
    counts = dict(zip(words, map(int, rng.integers(5, 15, 2000)), strict=True))
    assert len(counts) == 2000
    occurrences = rng.permutation([word for word, count in counts.items() for _ in range(count)])
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(part) for part in np.array_split(occurrences, 100)))
    assert (tmp_path / "a.txt").stat().st_size > 90_000

    def pieces(source, **settings):
        data = TextData(source=source, cache_dir=str(tmp_path / "cache"), vocab_size=5000, **settings)
        return data.prepare_tokenizer(lines.append).vocabulary.pieces

    expected = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    for _ in range(2):
        assert pieces(str(tmp_path / "a.txt"), tokenizer_kind="words")[107:] == expected
    assert [line.split()[0] for line in lines] == ["Training", "Counting", "The", "The"]
    assert lines[-1].endswith("5,000 (--data.vocab-size): this text has no more pieces")
    pieces(str(tmp_path / "a.txt"))
    assert re.search(r": the (9|10),\d\d\d bytes of the text that were read have no more pieces$", lines[-1])
    (tmp_path / "b.txt").write_text("zu zu zu zo")  # a hundredth of some 19,000 words
    assert pieces(f"{tmp_path}/a.txt@0.99,{tmp_path}/b.txt@0.01", tokenizer_kind="words")[107:110] == (
        "zu", "zo", expected[0]
    )
    shutil.rmtree(tmp_path / "cache" / "tokenizers")
    for file in (tmp_path / "cache" / "words").glob("*/counts.json"):
        file.write_text("{")
    with pytest.raises(UserError, match=r"counts.json is damaged.*delete .*anew"):
        pieces(str(tmp_path / "a.txt"), tokenizer_kind="words")


def test_a_missing_tokenizer_is_refused_before_the_text_is_read(config, tmp_path):
    lines = []
    with pytest.raises(UserError):
        prepare(dataclasses.replace(config, tokenizer=str(tmp_path / "none"), cache_dir=str(tmp_path)), lines.append)
    assert not lines


def test_the_share_of_unknown_words(tmp_path, monkeypatch):
    """It is counted while the parts are tokenized, on any machine; a store that is found again still knows it."""
    monkeypatch.setattr(parts, "LEAST", 300)
    words = [*"abcdefgh", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    documents = [" ".join(np.random.default_rng(i).choice(words[:8], 8)) + " ." for i in range(60)]
    documents[7], documents[50] = "a b zebra . Žluťoučký", "zebra yak a"
    source = str(tmp_path / "x.txt")
    settings = dict(cache_dir=str(tmp_path / "c"), tokenizer=str(tmp_path / "vocab.txt"), held_out=0.1)

    def summary(*lines):
        epath.Path(source).write_text("\n\n".join(lines))
        config = TextData(source=source, **settings)
        tokenizer = config.prepare_tokenizer(lambda line: None)
        for shard in (2, 0, 1):
            config.tokenize(tokenizer, shard, 3, lambda line: None)
        first = config.open(tokenizer, lambda line: None)
        assert config.open(tokenizer, pytest.fail).summary == first.summary
        return first.summary

    assert summary(*documents).endswith(f"; {4 / (58 * 9 + 8):.1%} of the tokens are [UNK]")
    few = summary(*documents, *["yak yak yak"] * 20)
    unsuited = "such as 'zebra', 'Žluťoučký', 'yak': the vocabulary does not suit this text"
    assert few.endswith(f"; {64 / (58 * 9 + 8 + 60):.1%} of the tokens are [UNK], {unsuited}")
    for _ in range(2):  # also when it is found again
        with pytest.raises(UserError, match=r"x\.txt: every token is \[UNK\], such as 'один', 'два'.*; choose"):
            summary("один два", "три")


def test_a_cache_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(dataclasses.replace(config, cache_dir=str(tmp_path / "file" / "c")), lambda line: None)
    with pytest.raises(UserError, match=r"cannot be written .*null"):
        prepare(dataclasses.replace(config, cache_dir="a\0b"), lambda line: None)


def test_nothing_here_imports_jax():
    script = "import sys; import jaxlm.data.text, jaxlm.data.batches; sys.exit(int('jax' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.skipif(not os.path.exists(VOCABULARY), reason="needs $JAXLM_DATA")
def test_published_vocabularies(config, tmp_path):
    path = tmp_path / "odd.txt"
    path.write_text("Nul\x00 byte, bell \x07.\n\nAnother one, un" + "b" * 300 + "elievable")
    prepared = prepare(
        TextData(source=str(path), cache_dir=str(tmp_path / "c"), tokenizer=VOCABULARY, held_out=0), lambda line: None
    )
    batch = prepared.store.batches("train", 2, RowFormat("document", 12), 0).batch(0)
    found = {prepared.tokenizer.decode(row[mask > 0]) for row, mask in zip(*batch[:2], strict=True)}
    assert any("nul byte, bell" in text for text in found)


MEASURE = """
    import json, sys
    from jaxlm.data import engine
    from jaxlm.data.text import TextData
    from jaxlm.tokenizers.tokenizer import Tokenizer
    path, tokenizer, folder = sys.argv[1:]
    engine._ALONE = 1 << 40
    data = TextData(source=path, tokenizer=tokenizer, cache_dir=folder, held_out=0.0)
    store = data.open(Tokenizer.load(tokenizer), lambda line: None)
    # Not getrusage's ru_maxrss, which counts what the process that forked this one held.
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(json.dumps([store.train.documents, store.train.num_tokens, int(peak) / 1024]))
"""


def tokenized(path, tokenizer, folder):
    """Return documents, tokens and peak memory in MB of a process that builds the store of a file."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(path), str(tokenizer), str(folder)],
        capture_output=True, text=True, check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lines.txt", "one_line.txt", "nul.txt"])
def test_memory_does_not_grow_with_the_text(config, folder, tmp_path, form):
    """100 MB of text as many documents, as one line, or as NUL bytes take less than 500 MB.

    A line is as many documents as parts.
    """
    trained = config.prepare_tokenizer(lambda line: None)
    trained.save(tmp_path / "tokenizer")
    words = " ".join((folder / "words.txt").read_text().split())
    path = tmp_path / form
    with path.open("w") as file:
        for _ in range(100_000_000 // len(words)):
            file.write("\x00" * len(words) if form == "nul.txt" else words)
            file.write("\n\n" if form == "lines.txt" else " ")
    documents, tokens, peak = tokenized(path, tmp_path / "tokenizer", tmp_path / "store")
    assert documents == (100_000_000 // len(words) if form == "lines.txt" else -(-path.stat().st_size // parts.LEAST))
    assert tokens > 10_000_000
    assert peak < 500


@pytest.mark.slow
def test_a_large_document_takes_little_memory(config, folder, tmp_path):
    trained = config.prepare_tokenizer(lambda line: None)
    trained.save(tmp_path / "tokenizer")
    words = " ".join((folder / "words.txt").read_text().split())
    (tmp_path / "small.txt").write_text(words)
    (tmp_path / "large.txt").write_text((words + " ") * (20_000_000 // len(words)))
    small = tokenized(tmp_path / "small.txt", tmp_path / "tokenizer", tmp_path / "one")
    large = tokenized(tmp_path / "large.txt", tmp_path / "tokenizer", tmp_path / "two")
    assert large[0] == 1
    assert large[1] > 300 * small[1]
    # Buffers: 105 to 120 MB more on one machine, as the allocator returns some of them or none.
    assert large[2] < small[2] + 150


def test_the_command_tokenizes_in_shards(folder, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "LEAST", 10_000)
    arguments = ["tokenize", "configs/bert_tiny.py", "--data.source", config.source, "--data.cache-dir", tmp_path,
                 "--data.vocab-size", "600", "--data.held-out", "0.05", "--data.length", "32"]

    def run(*more):
        assert main([str(argument) for argument in (*arguments, *more)]) == 0
        return capsys.readouterr().out

    assert "Shard 1/2 is stored; it has" in run("--shard", "1/2")
    assert "Token store: " not in run("--shard", "0/2")
    said = run()
    assert "Tokenizing" not in said and "Token store: " in said
    assert "Tokenizing" not in run("--shard", "0/2")
    for shard in ("2/2", "1", "-1/2", "0/0"):
        assert main([*map(str, arguments), f"--shard={shard}"]) == 2
        assert f"--shard is {shard}; give I/N" in capsys.readouterr().err
