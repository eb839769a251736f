"""Prompts and answers of text-to-text tasks, as T5's preprocessors write them."""

from __future__ import annotations

import json

import pytest

from jaxlm.config.presets import load_preset
from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.tasks.classification import Classification

ONE, TWO = "One {text}, isn't it?", "Two  (or 2.5)!"


@pytest.mark.parametrize(("preset", "labels", "prompt"), [
    ("cola", {"0": "unacceptable", "1": "acceptable"}, f"cola sentence: {ONE}"),
    ("sst2", {"0": "negative", "1": "positive"}, f"sst2 sentence: {ONE}"),
    ("mrpc", {"0": "not_equivalent", "1": "equivalent"}, f"mrpc sentence1: {ONE} sentence2: {TWO}"),
    ("qqp", {"0": "not_duplicate", "1": "duplicate"}, f"qqp question1: {ONE} question2: {TWO}"),
    ("mnli", dict.fromkeys(["entailment", "neutral", "contradiction"]), f"mnli hypothesis: {TWO} premise: {ONE}"),
    ("qnli", dict.fromkeys(["entailment", "not_entailment"]), f"qnli question: {ONE} sentence: {TWO}"),
    ("rte", dict.fromkeys(["entailment", "not_entailment"]), f"rte sentence1: {ONE} sentence2: {TWO}"),
    ("stsb", {"0": "0.0", "5.000": "5.0", "3.25": "3.2", "2.1": "2.0", "2.3": "2.4", "4.499": "4.4", "0.7": "0.8"},
     f"stsb sentence1: {ONE} sentence2: {TWO}"),
])
def test_prompts_of_t5(preset, labels, prompt):
    """The strings were made by the functions of t5.data.preprocessors (`glue`, `stsb`) from the same rows."""
    task = load_preset(f"configs/tasks/{preset}.py").objective
    for label, word in labels.items():
        row = Record("0", "x, line 1", {"text": ONE, "text_pair": TWO, "label": label}, ())
        assert task.as_text(row) == (prompt, word or label)
        assert task.from_text(row, word or label) == (float(word) if preset == "stsb" else label)
    assert task.from_text(row, "neither") == (-1.0 if preset == "stsb" else "neither")


def test_questions_of_t5(tmp_path):
    """The strings of `squad`; an answer that repeats the passage gets its spaces back."""
    passage = "In the U.S., the\tpresident (since 1990-1991) was A.B. O'Neil.\nHe said: \"fine\"…  über 5%!"
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": passage, "qas": [{
        "id": "1", "question": "Who's  the U.S. president?",
        "answers": [{"text": "A.B. O'Neil", "answer_start": passage.index("A.B")}]}]}]}]}))
    preset = load_preset("configs/tasks/squad.py")
    (row,) = preset.data.read(str(tmp_path / "a.json"))
    assert preset.objective.as_text(row) == (
        "question: Who ' s the U . S . president ? context: In the U . S . , the president ( since 1990 - 1991 ) was "
        "A . B . O ' Neil . He said : \" fine \" … über 5 % ! ", "A . B . O ' Neil"
    )
    for written, answer in (("A . B . O ' Neil", "A.B. O'Neil"), ("1990 - 1991", "1990-1991"), ("", ""),
                            ("the president", "the\tpresident"), ("no ( one )", "no ( one )"), ("unanswerable", ""),
                            ("President was", "President was"), ("p resident", "p resident")):
        assert preset.objective.from_text(row, written) == answer


@pytest.mark.parametrize(("preset", "line", "prompt", "answer"), [
    ("summarise", json.dumps({"source": ["A  story.", "It ends."], "target": ["Story."]}),
     "summarize: A  story. It ends.", "Story."),
    ("translate", "That is good.\tC'est bon.", "translate English to French: That is good.", "C'est bon."),
])
def test_pairs_of_t5(preset, line, prompt, answer, tmp_path):
    """The strings of `summarize` and `translate`."""
    preset = load_preset(f"configs/tasks/{preset}.py")
    path = tmp_path / ("a.jsonl" if line.startswith("{") else "a.tsv")
    path.write_text(line + "\n")
    (row,) = preset.data.read(str(path))
    assert preset.objective.texts(row) == (prompt, answer)


def test_label_words_that_are_none():
    with pytest.raises(UserError, match="'positive', which is not LABEL=WORD"):
        Classification(label_words=("positive",))
