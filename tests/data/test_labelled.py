import csv
import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data.labelled import LabelledData
from jaxlm.errors import UserError
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.data.stand_ins import ByteTokenizer

DATA = Path(os.environ.get("JAXLM_DATA", "/nowhere"))
ROWS = [("good film", "b"), ('a "bad", one', "a"), ("fine", "b"), ("long " * 20, "c")]
OTHERS = [("last, held out", "a")]


def write(path, rows=ROWS, header=("text", "label")):
    """In the form of the file's name, by Python's own writers."""
    text = io.StringIO()
    if ".jsonl" in path.name:
        text.write("\n".join(json.dumps(dict(zip(header, row, strict=True))) for row in rows))
    else:
        form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None} if ".tsv" in path.name else {}
        csv.writer(text, **form).writerows([header, *rows])
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def opened(data):
    return data.open(ByteTokenizer(), lambda line: None)


def rows_of(batch, pad=0):
    """(first text, second text, label) of each row that is not filler, texts as bytes without white space."""
    found = []
    for tokens, segments, label in zip(*batch, strict=True):
        texts = [bytes((tokens[segments == number] - 16).astype(np.uint8)).decode() for number in (1, 2)]
        assert (tokens[segments == 0] == pad).all() and (np.diff(segments[segments > 0]) >= 0).all()
        found.append((*texts, label.item()))
    return found


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.csv.gz"])
def test_all_forms_give_the_same_rows(tmp_path, name):
    other = write(tmp_path / f"dev_{name}", OTHERS)
    source = opened(LabelledData(source=write(tmp_path / name), held_out_source=other))
    assert source.classes == ("a", "b", "c")
    train = source.batches("train", 4, 12, "document", 0)
    batch = train.batch(0)
    assert batch.tokens.dtype == batch.segment_ids.dtype == batch.labels.dtype == np.int32
    assert batch.tokens.shape == (4, 12) and batch.labels.shape == (4,)
    wanted = [("goodfilm", "", 1), ('a"bad",one', "", 0), ("fine", "", 1), ("longlonglong", "", 2)]
    assert sorted(rows_of(batch)) == sorted(wanted)
    (held_out,) = source.batches("held_out", 4, 14, "document", 0).evaluation(4, 9)
    assert rows_of(held_out)[0] == ("last,heldout", "", 0)
    assert held_out.labels[1:].tolist() == [-1] * 3 and not held_out.segment_ids[1:].any()
    assert source.fingerprint == opened(
        LabelledData(source=write(tmp_path / f"b{name}"), held_out_source=other)
    ).fingerprint
    assert source.statistics.token_counts[ord("l") + 16] == 1 + 20
    # 12 letters, two of them twice.
    assert source.statistics.unigram_entropy == pytest.approx(np.log(6) / 3 + np.log(12) * 2 / 3)


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    rows = [(f"text {number}", number % 2) for number in range(50)]
    source = opened(LabelledData(source=write(tmp_path / "a.tsv", rows), held_out=0))
    batches = source.batches("train", 10, 12, "document", 3)
    epoch = [row for step in range(5) for row in rows_of(batches.batch(step))]
    assert sorted(epoch) == sorted((f"text{number}", "", number % 2) for number in range(50))
    assert rows_of(batches.batch(7)) == rows_of(source.batches("train", 10, 12, "packed", 3).batch(7))
    assert rows_of(batches.batch(7, slice(2, 5))) == rows_of(batches.batch(7))[2:5]
    assert rows_of(batches.batch(7)) != rows_of(source.batches("train", 10, 12, "document", 4).batch(7))
    assert batches.num_rows == 50 and rows_of(next(batches.stream(7))) == rows_of(batches.batch(7))


def truncated(first, second, length):
    """BERT's `_truncate_seq_pair` (Devlin et al. 2018), as published."""
    first, second = list(first), list(second)
    while len(first) + len(second) > length:
        (first if len(first) > len(second) else second).pop()
    return "".join(first), "".join(second)


def test_the_longer_of_two_texts_is_cut(tmp_path):
    sizes = [(a, b) for a in range(0, 12, 3) for b in range(1, 14, 2)]
    rows = [("x" * a, "y" * b, a / 2 - b) for a, b in sizes]
    path = write(tmp_path / "a.csv", rows, ("one", "two", "score"))
    data = LabelledData(
        source=path, text_field="one", text_pair_field="two", label_field="score", target="number", held_out=0
    )
    for length in (6, 7):
        source = opened(data)
        (batch,) = source.batches("train", len(rows), length, "document", 0).evaluation(len(rows), 1)
        assert batch.labels.dtype == np.float32 and source.classes == ()
        assert sorted(rows_of(batch)) == sorted((*truncated(a, b, length), score) for a, b, score in rows)


def test_synthetic():
    vocabulary = Vocabulary.stand_in(300)
    batch = LabelledData(text_pair_field="b", target="number").synthetic(3, 8, vocabulary)
    assert batch.segment_ids.tolist() == [[1] * 4 + [2] * 4] * 3 and not vocabulary.special[batch.tokens].any()
    assert batch.labels.shape == (3,) and batch.labels.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "text", "fields", "message"),
    [
        ("a.tsv", "text\tlabel\nx\ty\tz\n", {}, r"a\.tsv, line 2 has 3 columns instead of 2"),
        ("a.tsv", "text\tlabel\nx\ty\n", {"label_field": "gold"}, r"line 2 has no column 'gold'; .*'text', 'label'"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x"}', {}, r"a\.jsonl, line 2 has no column 'label'"),
        ("a.jsonl", '{"text": "x", "label": 1}\n[', {}, r"a\.jsonl, line 2: this is not JSON"),
        ("a.csv", "text,label\nx,1\ny,many\n", {"target": "number"}, r"a\.csv, line 3: the label 'many' is no number"),
        ("a.csv", "text,label\n", {}, "has no rows to train on"),
        ("a.xml", "", {}, r"must end in \.tsv"),
        ("a.tsv", "text\tlabel\nx\t1\n", {"held_out": 0.7}, "--data.held-out"),
        ("a.tsv", "text\tlabel\nx\t1\n", {"length": 2}, "--data.length"),
        ("a.tsv", "text\tlabel\nx\t1\n", {"text_field": ""}, "--data.text-field"),
    ],
)
def test_bad_input_is_refused_with_its_place(tmp_path, name, text, fields, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        opened(LabelledData(source=str(tmp_path / name), **fields))


def test_a_label_that_training_never_saw(tmp_path):
    other = write(tmp_path / "dev.tsv", [*ROWS[:2], ("odd", "d")])
    with pytest.raises(UserError, match=r"dev\.tsv, line 4: the label 'd' does not occur in the training file"):
        opened(LabelledData(source=write(tmp_path / "a.tsv"), held_out_source=other))
    with pytest.raises(UserError, match=r"--data\.tokenizer is empty"):
        LabelledData().prepare_tokenizer()
    with pytest.raises(UserError, match=r"--data\.source is empty"):
        opened(LabelledData())


@pytest.mark.skipif(not DATA.is_dir(), reason="needs JAXLM_DATA")
@pytest.mark.parametrize(
    ("path", "fields", "count", "classes", "shares"),
    [
        ("glue/SST-2", {"text_field": "sentence"}, None, ("0", "1"), (0.5, 0.65)),
        ("glue/CoLA", {"text_field": "4", "label_field": "2"}, None, ("0", "1"), (0.65, 0.75)),
        ("glue/MRPC", {"text_field": "#1 String", "text_pair_field": "#2 String", "label_field": "Quality"}, None,
         ("0", "1"), (0.6, 0.72)),
        ("nsmc", {"text_field": "document"}, 40_000, ("0", "1"), (0.45, 0.55)),
    ],
)
def test_published_tasks(path, fields, count, classes, shares):
    file = DATA / path / "train.tsv.gz"
    data = LabelledData(source=str(file), tokenizer=str(DATA / "tokenizers/bert-base-uncased/vocab.txt"), **fields)
    tokenizer = data.prepare_tokenizer()
    source = data.open(tokenizer, lambda line: None)
    assert source.classes == classes
    with gzip.open(file, "rt", encoding="utf-8-sig", newline="\n") as lines:
        texts = [line.rstrip("\r\n").split("\t") for line in lines]
    total = sum(source.batches(split, 8, 64, "document", 0).num_rows for split in ("train", "held_out"))
    assert total == len(texts) - ("text_field" in fields and not fields["text_field"].isdecimal())
    assert count in (None, total)
    for split in ("train", "held_out"):  # even where the file is sorted by label, as NSMC's is
        batches = source.batches(split, 64, 64, "document", 0).evaluation(64, 10**6)
        labels = np.concatenate([batch.labels for batch in batches])
        assert shares[0] < (labels == 1).sum() / (labels >= 0).sum() < shares[1], split
    if len(texts) < 10_000:  # what is fed is what the file says
        number = next(n for n, name in enumerate(texts[0], 1) if fields["text_field"] in (name, str(n))) - 1
        known = {tokenizer.decode(tokenizer.encode(row[number])) for row in texts}
        batch = source.batches("train", 8, 512, "document", 0).batch(0)
        assert {tokenizer.decode(t[s == 1]) for t, s in zip(batch.tokens, batch.segment_ids, strict=True)} <= known
