"""Rows with several labels: read, refused, learnt, evaluated with the chosen threshold, exported."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

from jaxlm.cli import main
from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.runs.load import load_run
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.text_to_text import TextToText
from tests.tasks.support import finetune, result, sentences
from tests.tasks.test_rows import read


def test_several_labels_of_a_row(tmp_path):
    """A list, or a text with a separator, in which nothing is no label; null is not known."""
    texts = [" x | y", "", "|", "x", "y|x"]
    rows = read(TextRows(label_separator="|"), tmp_path, "x.tsv", "text\tlabel\n" + "".join(f"a\t{t}\n" for t in texts))
    found = [row.values["label"] for row in rows]
    assert found == [["x", "y"], [], [], ["x"], ["y", "x"]] and all(row.is_labelled for row in rows)
    lines = [json.dumps({"text": "a", "label": label}) for label in (["x", 2], [], None, "x, y")]
    rows = read(TextRows(label_separator=","), tmp_path, "x.jsonl", "\n".join(lines))
    assert [row.values["label"] for row in rows] == [["x", "2"], [], None, ["x", "y"]]
    task = Classification(target="labels").with_labels(rows)
    assert task.labels == ("2", "x", "y")
    assert [task.label(row).tolist() for row in rows] == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert [task.gold(row) for row in rows] == [["x", "2"], [], None, ["x", "y"]]
    assert task.without_unseen_label(rows[0]) is rows[0]
    assert dataclasses.replace(task, labels=("x",)).without_unseen_label(rows[0]).values["label"] is None
    words = dataclasses.replace(task, label_words=("x=good",))
    for row, text in zip(rows, ("good, 2", "", "", "good, y"), strict=True):
        assert words.as_text(row)[1] == text and words.from_text(row, text) == (task.gold(row) or [])


def test_a_label_with_a_comma_needs_a_word_where_a_model_writes_labels(tmp_path):
    data = TextRows(source="x.jsonl")
    lines = [json.dumps({"text": "a", "label": label}) for label in (["Food, Drinks"], ["x"])]
    source = SimpleNamespace(records={"train": read(data, tmp_path, "x.jsonl", "\n".join(lines)), "held_out": []})
    kind = Classification(target="labels")
    with pytest.raises(UserError, match=r"'Food, Drinks' has one inside; give it a word with --objective.kind"):
        TextToText(kind=kind).with_labels_of(source, data)
    worded = dataclasses.replace(kind, label_words=("Food, Drinks=food",))
    assert TextToText(kind=worded).with_labels_of(source, data).label_texts == ["food", "x"]


@pytest.mark.parametrize(("target", "label", "message"), [
    ("class", ["x"], "here has a list of labels; --objective.target labels"),
    ("number", ["1"], "here has a list of labels; --objective.target labels"),
    ("labels", "x|y", "here: the label 'x|y' is no list; name what separates labels with --data.label-separator"),
])
def test_labels_of_another_target_are_refused(target, label, message):
    row, task = Record("1", "here", {"text": "a", "label": label}, ("a",)), Classification(target=target, labels=("x",))
    for read_label in (task.gold, task.label):
        with pytest.raises(UserError, match=re.escape(message)):
            read_label(row)


def test_a_threshold_is_for_several_labels():
    with pytest.raises(UserError, match="several labels per row"):
        Classification(threshold=0.3)


@pytest.mark.slow
def test_several_labels(models, tmp_path, capsys):
    """The threshold is chosen on the held-out rows, stored in the run, and exported; both forms of rows are one."""
    texts = [f"{text} {'cat' * (i % 2)} {'red' * (i % 3 == 0)}" for i, text in enumerate(sentences(40))]
    labels = [[word for word in ("cat", "red") if word in text.split()] for text in texts]
    assert [] in labels and ["cat", "red"] in labels
    table, lines = tmp_path / "rows.tsv", tmp_path / "rows.jsonl"
    table.write_text("text\tlabel\n" + "".join(
        f"{text}\t{'|'.join(names)}\n" for text, names in zip(texts, labels, strict=True)))
    lines.write_text("".join(
        json.dumps({"text": text, "label": names}) + "\n" for text, names in zip(texts, labels, strict=True)))
    flags = ["--objective.target", "labels", "--train.steps", "6", "--train.batch-size", "16"]
    assert finetune("classify", table, models("bert"), tmp_path / "run", *flags, "--data.label-separator", "|") == 0
    printed = capsys.readouterr()
    first = json.loads(printed.out)
    threshold = first["threshold"]
    assert 0 < threshold < 1 and f"Chosen on the 4 held-out rows: threshold {threshold:g}" in printed.err
    assert set(first["classes"]) == {"cat", "red"} and "confusion" not in first
    assert {"micro_f1", "macro_f1", "accuracy"} <= first["metrics"].keys()
    assert load_run(tmp_path / "run").objective.threshold == threshold
    assert finetune("classify", lines, models("bert"), tmp_path / "lists", *flags) == 0
    assert result(capsys)["metrics"] == first["metrics"]

    # A finished run keeps the choice, and any other rows are answered with it.
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert result(capsys) == first
    out = tmp_path / "answers.jsonl"
    assert main(["evaluate", str(tmp_path / "run"), "--data.source", str(table), "--predictions", str(out)]) == 0
    assert f"threshold {threshold:g}:" in capsys.readouterr().out
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["gold"] for answer in answers] == labels
    assert all(answer["prediction"] == [name for name, score in answer["scores"].items() if score > threshold]
               for answer in answers)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    found = []
    for model, source in ((tmp_path / "run", table), (tmp_path / "exported", lines)):
        assert main(["evaluate", str(model), "--data.source", str(source), "--data.length", "64", "--json"]) == 0
        found.append(result(capsys))
    assert found[0] == found[1] and found[0]["threshold"] == threshold
    # A threshold of the user's is kept.
    own = ["--objective.threshold", "0.125"]
    assert main(["evaluate", str(tmp_path / "run"), "--data.source", str(table), "--json", *own]) == 0
    assert result(capsys)["threshold"] == 0.125
    assert finetune("classify", lines, models("bert"), tmp_path / "own", *flags, *own) == 0
    assert result(capsys)["threshold"] == 0.125 == load_run(tmp_path / "own").objective.threshold
    # More steps choose again.
    flags[3] = "8"
    assert finetune("classify", lines, models("bert"), tmp_path / "lists", *flags) == 0
    again = result(capsys)["threshold"]
    assert load_run(tmp_path / "lists").objective.threshold == again != threshold
    # Other parameters than it was chosen for do without.
    found = [load_run(f"{tmp_path / 'lists'}@{steps}").objective.threshold for steps in ("8", "6", "last2")]
    assert found == [again, 0.0, 0.0]
