"""What is told of rows: labels, unknown words, rows that are also trained on; labels in an evaluation."""

from __future__ import annotations

import collections
import dataclasses
import json
import tracemalloc
import types

import numpy as np
import pytest

from jaxlm.commands.evaluate import print_result
from jaxlm.data.labelled import EncodedExample, LabelledSource, Record, shared_rows
from jaxlm.errors import UserError
from jaxlm.models.bert import Bert
from jaxlm.models.t5 import T5
from jaxlm.tasks.answers import AnswerRows, Answers
from jaxlm.tasks.base import Answer
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.evaluate import Evaluation, answer_rows, evaluate
from jaxlm.tasks.metrics import class_details
from jaxlm.tasks.remarks import label_remarks, row_remarks
from jaxlm.tasks.tagging import Tagging, TagRows
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.data.stand_ins import ByteTokenizer
from tests.tasks.rows import squad


def test_rows_that_are_also_trained_on_are_counted(tmp_path):
    """Whatever their labels; the same file is refused."""
    (tmp_path / "x.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    (tmp_path / "y.tsv").write_text("text\tlabel\na\ty\nc\ty\nb\ty\n")
    data = TextRows(source=str(tmp_path / "x.tsv"), dev=str(tmp_path / "y.tsv"))
    shared = f"2 of 3 rows of {data.dev} are also in {data.source}, which is trained on"
    assert data.open(ByteTokenizer(), print).summary.endswith(shared)
    for name, answer in (("x", "red"), ("y", "house")):
        content = squad("a red house", answers=[{"text": answer, "answer_start": "a red house".index(answer)}])
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    questions = AnswerRows(source=str(tmp_path / "x.json"), dev=str(tmp_path / "y.json"))
    assert "1 of 1 rows of" in questions.open(ByteTokenizer(), print).summary
    (tmp_path / "link.tsv").symlink_to(tmp_path / "x.tsv")
    for dev in (data.source, str(tmp_path / "link.tsv")):
        with pytest.raises(UserError, match=r"--data.dev is the file of --data.source, .*x.tsv, which is trained on"):
            dataclasses.replace(data, dev=dev).open(ByteTokenizer(), print)


def test_rows_that_are_trained_on_are_compared_one_by_one():
    """Their texts, here 6 MB as JSON, are not all in memory beside the rows."""
    def row(number):
        return Record(str(number), "x", {"text": f"{number} {'word ' * 60}"}, ())

    rows, others = [row(-1), row(7), row(7)], [row(number) for number in range(20_000)]
    tracemalloc.start()
    said = shared_rows("dev", rows, "train", others, "is trained on")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert said == "2 of 3 rows of dev are also in train, which is trained on" and peak < 100_000


class Canned:
    """Task that answers class or tag 1 to everything, without a model."""

    def run(self, params, source, length, batch_size):
        examples = source.examples("held_out", self, length)
        return [{"logits": np.eye(2)[1], "tags": np.ones(length, int)} for _ in examples]


CLASSES = "text\tlabel\na\ty\nb\t\nc\tnew\nd\tx\ne\ty\n"
SENTENCES = "a y\nb x\n\nc y\nd new\n"


def test_numbers_sort_as_numbers_among_labels():
    """As the labels 0 to 11 of shared/cases/text/twelve_classes.jsonl."""
    names = ["10", "2", "b", "-1", "0.5", "1e1", "B", "nan", "", "1_0"]
    rows = [Record("0", "", {"label": name}, ()) for name in names]
    ordered = ("-1", "0.5", "2", "10", "1e1", "", "1_0", "B", "b", "nan")
    assert Classification().with_labels(rows).labels == ordered
    assert Classification().with_labels(rows, ["b", "2"]).labels[:3] == ("b", "2", "-1")
    assert list(class_details(["0"] * 3, ["10", "9", "0"], ["0"])["classes"]) == ["0", "9", "10"]
    twelve = [Record("0", "", {"label": str(number)}, ()) for number in range(12)]
    assert Classification().with_labels(twelve[::-1]).labels == tuple(map(str, range(12)))


@pytest.mark.parametrize(("kind", "data", "text", "accuracy", "counts"), [
    (Classification, TextRows, CLASSES, 2 / 4, {"examples": 5, "unlabelled": 1, "unseen": 1}),
    (Tagging, TagRows, SENTENCES, 2 / 4, {"examples": 2, "unseen": 1}),
], ids=["classes", "tags"])
def test_evaluation_scores_rows_with_a_label(kind, data, text, accuracy, counts, tmp_path, capsys):
    """A label that training had not seen counts as a wrong answer."""
    (tmp_path / "x.tsv").write_text(text)
    task = type(kind.__name__, (Canned, kind), {})(labels=("x", "y"))
    task = task.bind_unchecked(Vocabulary.stand_in(300))
    data = data(dev=str(tmp_path / "x.tsv"), length=16)
    found = evaluate(Evaluation(task, {}, data.open(ByteTokenizer()), data, 4), tmp_path / "out.jsonl")
    assert found["metrics"]["accuracy"] == accuracy and found == found | counts
    details = {"classes", "confusion"} if kind is Classification else set()
    assert found.keys() == {"task", "metrics", *counts} | details
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["gold"] for row in rows] == [task.gold(row) for row in data.read(data.dev)]
    print_result(found)
    said = capsys.readouterr().out
    assert "1 with a label that training had not seen and scored as wrong" in said
    assert ("1 without a label and not scored" in said) == ("unlabelled" in counts)
    assert ("predicted as 'y'" in said and "--sweep optimizer.learning-rate=" in said) == (kind is Classification)


def test_names_of_classes_are_printed_as_they_are(capsys):
    """Brackets and colons are no markup of the terminal."""
    names = ("[/b]", "[neg]", ":heart:")
    print_result({"task": "classification", "examples": 3, "metrics": {"accuracy": 1.0}} | class_details(
        names, names, names))
    head, *lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(names)
    assert head.split() == ["class", "precision", "recall", "f1", "rows", *names]


def test_words_that_are_not_read_are_counted(tmp_path, capsys):
    (tmp_path / "x.conll").write_text("a y\nb x\n\nc y\n" + "d x\n" * 16)
    task = type("CannedTags", (Canned, Tagging), {})(model=Bert(), labels=("x", "y"))
    data = TagRows(dev=str(tmp_path / "x.conll"), length=16)
    task, rows = task.bind_unchecked(Vocabulary.stand_in(300)), data.open(ByteTokenizer())
    (example,) = task.encode(rows.records["held_out"][1:], ByteTokenizer(), 16)
    unread = 17 - (example.arrays["labels"] >= 0).sum()
    found = evaluate(Evaluation(task, {}, rows, data, 4), tmp_path / "out.jsonl")
    assert found["unread"] == unread > 0
    print_result(found)
    assert f", {unread} words beyond --data.length and so not read" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line.get("unread") for line in lines] == [None, unread]
    assert lines[1]["prediction"] == ["y"] * (17 - unread) + ["x"] * unread


class PairsOfTexts:
    """A row encoder of two texts a row."""

    padding = types.MappingProxyType({"ids": 0, "other": 1})

    @staticmethod
    def encode(records, tokenizer, length):
        sizes = [min(length, len(record.texts[0])) for record in records]
        return [EncodedExample(i, {"ids": np.zeros((2, size))}) for i, size in enumerate(sizes)]


def test_remarks_about_rows():
    labels = ["good", "Good ", "1", "1.0", "true", "rare", "new"]
    counts = collections.Counter({"good": 5, "Good ": 2, "1": 2, "1.0": 2, "true": 2, "rare": 1})
    assert label_remarks(labels, counts) == [
        "Labels (7): good (5), 'Good ' (2), 1 (2), 1.0 (2), true (2), rare (1), new (0)",
        "Labels of a single row: 'rare'",
        "Labels that differ in form only, and are classes of their own unless the file is corrected: 'good', 'Good '",
        "Labels that differ in form only, and are classes of their own unless the file is corrected: "
        "'1', '1.0', 'true'",
    ]
    rows = [Record(str(i), f"x, line {i}", {"text": text, "label": "a"}, (text,)) for i, text in
            enumerate(("short", "a text of many words", " "))]
    task = Classification(labels=("a",)).bind_unchecked(Vocabulary.stand_in(300))
    source = LabelledSource(ByteTokenizer(), {"train": rows}, True)
    assert row_remarks(task, source) == [
        "Labels (1): a (3)", "1 row with an empty text (kept), the first at x, line 2",
    ]
    assert source.cut_remarks(PairsOfTexts, 12) == ["1 of 3 rows reach --data.length 12; longer texts are cut there"]
    assert source.cut_remarks(PairsOfTexts, 30) == []


def test_questions_without_an_answer_are_counted(tmp_path, capsys):
    """In training and in evaluation, unless the task can say that there is none."""
    data, (told,) = AnswerRows(dev=str(tmp_path / "x.json"), length=64), Answers().gold_remarks([
        Record(str(i), "x", {"answers": golds}, ()) for i, golds in enumerate((["red"], [], None, []))])
    assert told.startswith("2 questions have no answer, and every") and told.endswith("--objective.no-answer True")
    (tmp_path / "x.json").write_text(json.dumps(squad(answers=[])))
    for changes, told in ({}, "1 questions have no answer"), ({"no_answer": True}, ""), ({"kinds": True}, ""):
        own = {"encode": lambda *_: [], "answers": lambda *_: [Answer("red", {})]}
        task = type("Empty", (Answers,), own)(model=Bert(), **changes)
        task, rows = task.bind_unchecked(Vocabulary.stand_in(300)), data.open(ByteTokenizer())
        answer_rows(Evaluation(task, {}, rows, data, 4))
        assert capsys.readouterr().out.startswith(told) if told else not capsys.readouterr().out
        rows = LabelledSource(ByteTokenizer(), {"train": rows.records["held_out"]}, True)
        assert any(line.startswith("1 questions") for line in task.remarks(rows, 64)) == bool(told)
        written = TextToText(model=T5(), kind=task, max_target=8).bind(Vocabulary.stand_in(300), 64)
        assert ("--objective.kind.no-answer" in written.remarks(rows, 64)[-1]) == bool(told)


def test_answers_that_reach_the_longest_are_counted():
    rows = [Record(str(i), f"x, line {i}", {"source": "a", "targets": [text]}, ("a",)) for i, text in
            enumerate(("short", "longer than this"))]
    task = TextToText(model=T5(), max_target=8).bind(Vocabulary.stand_in(300), 24)
    source = LabelledSource(ByteTokenizer(), {"train": rows}, True)
    assert task.remarks(source, 24) == ["1 of 2 answers reach --objective.max-target 8 and end there"]


def test_the_share_of_unknown_words_in_rows(tmp_path, monkeypatch):
    """It counts the tokens of the texts, without special ones, in the summary of the rows and in an evaluation."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]) + "\n")
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    task = Classification(model=Bert(max_positions=16, vocab_size=13), labels=("x", "y"))
    task = task.bind(tokenizer.vocabulary, 16)

    def opened(*texts):
        (tmp_path / "x.tsv").write_text("text\tlabel\n" + "".join(f"{text}\tx\n" for text in texts))
        source = TextRows(source=str(tmp_path / "x.tsv"), held_out=0.0).open(tokenizer, print)
        assert source.summary.endswith("0 held out")  # before the rows are encoded
        source.batches("train", 2, task.row_format(16), 0)
        return source

    assert opened("a b c d", "e f g h").summary.endswith("; 0.0% of the tokens are [UNK]")
    remark = "12.5% of the tokens are [UNK], such as 'zebra': the vocabulary does not suit this text"
    assert opened("a b c d", "e f zebra h").summary.endswith(f"; {remark}")
    lines = []
    monkeypatch.setattr(Classification, "answers", lambda *arguments: [])
    data = TextRows(dev=str(tmp_path / "x.tsv"), length=16)
    answer_rows(Evaluation(task, {}, data.open(tokenizer), data, 2), lines.append)
    assert lines == [remark]
    with pytest.raises(UserError, match=r"every token is \[UNK\], such as 'zebra', 'yak'; choose a tokenizer"):
        _ = opened("zebra", "yak zebra").summary
