"""Reading of files of rows, with and without labels, and refusals."""

from __future__ import annotations

import collections
import dataclasses
import json
import types
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlm.commands.evaluate import print_result
from jaxlm.config.presets import load_preset
from jaxlm.data.corpus import open_corpus
from jaxlm.data.labelled import EncodedExample, LabelledSource, Record, good_rows
from jaxlm.data.readers import Columns
from jaxlm.errors import UserError
from jaxlm.models.bert import Bert
from jaxlm.models.t5 import T5
from jaxlm.tasks.answers import AnswerRows, Answers, Window
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.evaluate import Evaluation, answer_rows, evaluate
from jaxlm.tasks.metrics import class_details
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice
from jaxlm.tasks.prompts import fill
from jaxlm.tasks.remarks import label_remarks, require_classes, row_remarks
from jaxlm.tasks.tables import read_table
from jaxlm.tasks.tagging import Tagging, TagRows
from jaxlm.tasks.text_to_text import PairRows, TextToText
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.data.stand_ins import ByteTokenizer

CHOICE = {"text": "a", "choices": [{"label": 0, "text": "b"}, {"label": 1, "text": "c"}], "label": 1}
TURN = {"input_text": "red", "span_start": 0, "span_text": "red"}
STORY = {
    "id": "s", "story": "red house", "questions": [{"turn_id": 1, "input_text": "?"}], "answers": [TURN],
    "additional_answers": {"0": [TURN]},
}


def read(data, folder, name, text):
    path = folder / name
    path.write_text(text)
    data.validate()
    return good_rows(data, str(path))[0]


WITHOUT_LABELS = {
    "text": (Classification(), TextRows(label_field=""), "x.tsv", "text\nred\n"),
    "number": (Classification(target="number"), TextRows(label_field=""), "x.tsv", "text\nred\n"),
    "choice": (MultipleChoice(), ChoiceRows(label_field=""), "x.jsonl", json.dumps(CHOICE)),
    "tags": (Tagging(), TagRows(tag_column=0), "x.conll", "red\nhouse\n"),
    "answers": (TextToText(), PairRows(target_field=""), "x.tsv", "source\nred\n"),
    "written": (TextToText(kind=MultipleChoice()), ChoiceRows(label_field=""), "x.jsonl", json.dumps(CHOICE)),
    "squad": (Answers(), AnswerRows(), "x.json", json.dumps(
        {"data": [{"paragraphs": [{"context": "red", "qas": [{"id": "q", "question": "?"}]}]}]})),
    "coqa": (Answers(kinds=True), AnswerRows(form="coqa"), "x.json", json.dumps({"data": [STORY | {"answers": None}]})),
}


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_rows_without_labels(name, tmp_path):
    task, *file = WITHOUT_LABELS[name]
    (row,) = read(file[0], tmp_path, *file[1:])
    assert task.gold(row) is None
    assert (task.texts(row) if isinstance(task, TextToText) else task.as_text(row))[1] == ""


@pytest.mark.parametrize(("data", "file", "texts"), [
    (TextRows(text_pair_field="other"), ("x.tsv", "text\tother\tlabel\nred\tblue\t1\n"), ("red", "blue")),
    (ChoiceRows(), ("x.jsonl", json.dumps(CHOICE)), ("a",)),
    (PairRows(), ("x.jsonl", '{"source": ["red", "house"], "target": ["old", "new"]}'), ("red house", "old", "new")),
    (AnswerRows(form="coqa"), ("x.json", json.dumps({"data": [STORY]})), ("red house",)),
    (AnswerRows(), WITHOUT_LABELS["squad"][2:], ("red",)),
    (TagRows(), ("x.conll", "red O\nhouse O\n"), ("red house",)),
])
def test_texts_by_which_rows_are_grouped(data, file, texts, tmp_path):
    (row,) = read(data, tmp_path, *file)
    assert row.texts == texts and row.document == ""


@pytest.mark.parametrize("mark", ["-DOCSTART- -X- O\n\n", "# newdoc id = a\n# sent_id = 1\n"])
def test_sentences_know_their_document(mark, tmp_path):
    rows = read(TagRows(), tmp_path, "x.conll", f"{mark}a O\n\nb O\n\n{mark}c O\n")
    assert [row.document for row in rows] == ["1", "1", "2"]


def test_a_conversation_with_and_without_answers(tmp_path):
    """The turns before a question have answers only if the file has them."""
    turns = {"questions": [{"turn_id": i, "input_text": f"q{i}?"} for i in range(4)], "answers": [TURN] * 4}
    story = {name: value for name, value in (STORY | turns).items() if name != "additional_answers"}
    bare = {name: value for name, value in story.items() if name != "answers"}
    for history, asked, answered in (
        (0, "q3?", "q3?"), (2, "q1? q2? q3?", "q1? red q2? red q3?"),
        (9, "q0? q1? q2? q3?", "q0? red q1? red q2? red q3?"),
    ):
        data = AnswerRows(form="coqa", history=history)
        rows = read(data, tmp_path, "x.json", json.dumps({"data": [bare]}))
        assert [row.id for row in rows] == ["s:0", "s:1", "s:2", "s:3"]
        assert rows[3].values["question"] == asked and rows[3].values["answers"] is None
        own = read(data, tmp_path, "x.json", json.dumps({"data": [story]}))[3].values
        assert own == {"question": answered, "passage": "red house", "answers": ["red"], "start": 0, "text": "red",
                       "kind": "span"}


@pytest.mark.parametrize(("data", "file"), [
    (ChoiceRows(), ("x.jsonl", json.dumps({"text": " ", "choices": ["", ""], "label": 0}))),
    (ChoiceRows(), ("x.jsonl", json.dumps(
        {"text": "", "choices": [{"label": name, "text": ""} for name in "AB"], "label": "A"}))),
    (AnswerRows(), ("x.json", json.dumps(
        {"data": [{"paragraphs": [{"context": "", "qas": [{"id": "q", "question": " ", "answers": []}]}]}]}))),
])
def test_rows_of_empty_texts_are_left_out(data, file, tmp_path):
    """Names, places and kinds of answers are no texts."""
    assert read(data, tmp_path, *file) == []


def test_a_label_is_compared_as_text(tmp_path):
    (row,) = read(ChoiceRows(), tmp_path, "x.jsonl", json.dumps(CHOICE))
    assert MultipleChoice().gold(row) == 1


def test_choices_have_the_names_of_the_data(tmp_path):
    choices = [{"label": "A", "text": "b"}, {"label": "B", "text": "c"}]
    (row,) = read(ChoiceRows(), tmp_path, "x.jsonl", json.dumps(CHOICE | {"choices": choices, "label": "B"}))
    task = MultipleChoice()
    answer = task.answer(row, [(EncodedExample(0, {}), {"logits": np.array([0.0, 1.0])})])
    assert (answer.prediction, task.gold(row), task.as_text(row)[1]) == ("B", "B", "B")
    assert [task.from_text(row, text) for text in ("A", "C", "", "AB")] == ["A", None, None, None]


def test_more_choices_than_letters_are_refused_as_text(tmp_path):
    (row,) = read(ChoiceRows(), tmp_path, "x.jsonl", json.dumps(CHOICE | {"choices": ["a"] * 27, "label": 26}))
    with pytest.raises(UserError, match="line 1 has 27 choices; letters name only 26"):
        MultipleChoice().as_text(row)


@pytest.mark.parametrize(("kind", "prediction"), list(enumerate(["house", "yes", "no", "unknown"])))
def test_the_best_span_is_kept_beside_another_answer(kind, prediction, tmp_path):
    (row,) = read(AnswerRows(form="coqa"), tmp_path, "x.json", json.dumps({"data": [STORY]}))
    window = Window(2, 0, np.array([[0, 3], [4, 9]]), np.array([True, True]))
    output = {"start": np.array([-9.0, 0, 0, 5]), "end": np.array([-9.0, 0, 0, 5]), "kind": np.eye(4)[kind]}
    answer = Answers(kinds=True, no_answer=True).answer(row, [(EncodedExample(0, {}, window), output)])
    assert answer == (prediction, {"best": "house", "null": -28.0})
    nothing = Window(2, 0, np.zeros((0, 2), int), np.zeros(0, bool))
    assert Answers().answer(row, [(EncodedExample(0, {}, nothing), output)]).prediction == ""


CONLL = {
    "spaces": (TagRows(), "# id = 7\n#Monday O\n1\u00a0000  N \r\n\n# O\n# X\n \t\n# a comment\n-DOCSTART- O\nend O\n"),
    "tabs": (TagRows(), "# newdoc\n# a\tb\n#Monday\tO\n1\u00a0000\tN\r\n\n#\tO\n# O\tX\n\n# newpar\nend\tO\n"),
    "ids": (
        TagRows(word_column=2, tag_column=3, has_ids=True),
        "# text = a\tb\n1\t#Monday\tO\n2\t1\u00a0000\tN\n\n1\t#\tO\n#\n2-3\t_\t_\n2\t#\tX\n\n# newpar\n1\tend\tO\n",
    ),
}


@pytest.mark.parametrize("name", CONLL)
def test_words_and_comments_of_conll(name, tmp_path):
    """Only tabs or spaces separate columns, and a sentence may begin with the word "#"."""
    rows = read(CONLL[name][0], tmp_path, "x.conll", CONLL[name][1])
    hashes = ["#", "# O"] if name == "tabs" else ["#", "#"]
    assert [row.values["words"] for row in rows] == [["#Monday", "1\u00a0000"], hashes, ["end"]]
    assert [row.values["tags"] for row in rows] == [["O", "N"], ["O", "X"], ["O"]]


def test_a_long_field(tmp_path):
    """It is longer than the limit of Python's csv module."""
    (row,) = read(TextRows(label_field=""), tmp_path, "x.csv", "text\n" + "a " * 100_000 + "\n")
    assert len(row.values["text"]) == 200_000


MISTAKES = {
    "text": (TextRows(text_field=""), "x.tsv", "text\tlabel\na\tb\n", "the name of a column is empty"),
    "choices": (ChoiceRows(choices_fields=""), "x.jsonl", json.dumps(CHOICE), "the name of a column is empty"),
    "same choices": (ChoiceRows(), "x.jsonl", json.dumps(CHOICE | {"choices": [{"label": "A", "text": "b"}] * 2}),
                     "two choices have the same label"),
    "no names": (TextRows(), "x.csv", "It was long. " * 9 + ",x\n", "it has 'It was long. It was long. It was long. I'"
                 ", 'x'. Choose .*without a line of names, a column's name is its place, from 1"),
    "separator": (TextRows(), "x.tsv", "text|label\n", r"it has 'text\|label'"),
    "source": (PairRows(source_field=""), "x.tsv", "source\ttarget\na\tb\n", "the name of a column is empty"),
    "word": (TagRows(word_column=0), "x.conll", "red\tX\n", "word_column is 0"),
    "ids": (TagRows(has_ids=True), "x.conllu", "#c\n1-2\ta\n1\tX\n1.1\tb\nred\tX\n", "line 5 begins with 'red'"),
    "answers": (AnswerRows(form="coqa"), "x.json", {"additional_answers": {"0": []}}, "x.json cannot be read"),
    "input": (AnswerRows(form="coqa"), "x.json", {"answers": [TURN | {"input_text": None}]},
              "story s, turn 1: the field 'input_text' is null or missing, not text"),
    "span": (AnswerRows(form="coqa"), "x.json", {"answers": [TURN | {"span_text": []}]},
             "story s, turn 1: the field 'span_text' is a list, not text"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence(name, tmp_path):
    data, file, text, message = MISTAKES[name]
    text = text if isinstance(text, str) else json.dumps({"data": [STORY | text]})
    with pytest.raises(UserError, match=message):
        read(data, tmp_path, file, text)


def squad(context="red house", **changes):
    question = {"id": "q", "question": "?", "answers": [{"text": "red", "answer_start": 0}]} | changes
    return {"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]}


def test_white_space_around_questions_and_answers_is_not_read(tmp_path):
    """Byte-level vocabularies have tokens of it: it would fill up the question, and be a word of the answer."""
    changes = {"question": " \n ?", "answers": [{"text": " red ", "answer_start": 1}, {"text": " ", "answer_start": 0}]}
    (row,) = read(AnswerRows(), tmp_path, "x.json", json.dumps(squad("a red house", **changes)))
    assert row.values | {"passage": ""} == {
        "question": "?", "passage": "", "answers": [" red ", " "], "start": 2, "text": "red", "kind": "span",
    }
    story = STORY | {"story": "a red house", "answers": [{"input_text": "yes", "span_start": 1, "span_text": " red "}]}
    (row,) = read(AnswerRows(form="coqa"), tmp_path, "y.json", json.dumps({"data": [story]}))
    assert (row.values["start"], row.values["text"], row.values["kind"]) == (2, "red", "yes")


ROW = {"text": "a", "other": "b", "label": "x", "source": "a", "target": "b", "id": "i"}
NOT_TEXT = {
    "list": (TextRows(), ROW | {"text": ["a", "b"]}, "line 1: the field 'text' is a list, not text"),
    "pair": (TextRows(text_pair_field="other"), ROW | {"other": {"a": 1}}, "'other' is an object, not text"),
    "bool": (TextRows(), ROW | {"text": True}, "line 1: the field 'text' is true or false, not text"),
    "label": (TextRows(), ROW | {"label": {}}, "line 1: the field 'label' is an object, not text"),
    "labels": (TextRows(), ROW | {"label": ["x", ["y"]]}, "line 1: the field 'label' is a list, not text"),
    "id": (TextRows(id_field="id"), ROW | {"id": []}, "line 1: the field 'id' is a list, not text"),
    "choice": (ChoiceRows(), CHOICE | {"choices": ["a", None]}, "line 1: the field 'choices' is null"),
    "no text": (ChoiceRows(), CHOICE | {"choices": [{"label": 0}, {"label": 1}]}, "'choices' is null or missing, not"),
    "name": (ChoiceRows(), CHOICE | {"choices": [{"text": "a", "label": []}] * 2}, "'choices.label' is a list"),
    "right": (ChoiceRows(), CHOICE | {"label": {}}, "line 1: the field 'label' is an object, not text"),
    "context": (ChoiceRows(), CHOICE | {"text": ["a"]}, "line 1: the field 'text' is a list, not text"),
    "source": (PairRows(), ROW | {"source": ["a", ["b"]]}, "line 1: the field 'source' is a list, not text"),
    "target": (PairRows(), ROW | {"target": ["a", None]}, "line 1: the field 'target' is null"),
    "question": (AnswerRows(), squad(question=None), "question q: the field 'question' is null"),
    "passage": (AnswerRows(), squad(context=["red house"]), "question q: the field 'context' is a list, not text"),
    "answer": (AnswerRows(), squad(answers=[{"text": None, "answer_start": 0}]), "q: the field 'text' is null"),
    "turn": (AnswerRows(form="coqa"), {"data": [STORY | {"questions": [{"turn_id": 1, "input_text": None}]}]},
             "story s, turn 1: the field 'input_text' is null"),
    "story": (AnswerRows(form="coqa"), {"data": [STORY | {"story": None}]}, "turn 1: the field 'story' is null"),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_values_that_are_not_text_are_refused(name, tmp_path):
    data, row, message = NOT_TEXT[name]
    with pytest.raises(UserError, match=f"x.jsonl?, .*{message}"):
        read(data, tmp_path, "x.json" if isinstance(data, AnswerRows) else "x.jsonl", json.dumps(row))


def test_texts_may_be_numbers_and_labels_booleans(tmp_path):
    (row,) = read(TextRows(id_field="id"), tmp_path, "x.jsonl", json.dumps({"text": 12.5, "label": False, "id": 3}))
    assert (row.id, row.values) == ("3", {"text": "12.5", "label": "False"})
    (row,) = read(PairRows(), tmp_path, "x.jsonl", json.dumps({"source": ["a", 1], "target": [True, 2]}))
    assert row.values == {"source": "a 1", "targets": ["True", "2"]}


def test_a_blank_label_is_none(tmp_path):
    rows = read(TextRows(), tmp_path, "x.tsv", "text\tlabel\na\t\nb\t \nc\tx\n")
    assert [row.values["label"] for row in rows] == [None, None, "x"]
    fields = ChoiceRows(choices_fields="b,c")
    rows = read(fields, tmp_path, "x.tsv", "text\tb\tc\tlabel\na\tb\tc\t\na\tb\tc\t1\n")
    assert [row.values["label"] for row in rows] == [None, 1]


def test_rows_of_squad_are_those_of_its_json(tmp_path):
    """A row per question as the library `datasets` has it, in every format that it writes."""
    datasets = pytest.importorskip("datasets")
    context, rows = "the red house", []
    for number, words in enumerate((["red"], ["house", "red house"], [])):
        starts = [context.index(word) for word in words]
        rows.append({"id": f"q{number}", "title": "t", "context": context, "question": f"which {number}",
                     "answers": {"text": words, "answer_start": starts}})
    nested = [row | {"answers": [dict(zip(row["answers"], pair, strict=True))
                                 for pair in zip(*row["answers"].values(), strict=True)]} for row in rows]
    expected = read(AnswerRows(), tmp_path, "x.json", json.dumps(
        {"data": [{"paragraphs": [{"context": context, "qas": nested}]}]}))
    assert len(expected) == 3 and expected[1].values["answers"] == ["house", "red house"]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_json(tmp_path / "lines.jsonl")
    for name, value in (("array.json", rows), ("list.json", nested)):
        (tmp_path / name).write_text(json.dumps(value, indent=1))
    for name in ("rows.parquet", "lines.jsonl", "array.json", "list.json", "hf:saved"):
        path = f"hf:{tmp_path / 'saved'}" if name == "hf:saved" else str(tmp_path / name)
        found, _ = good_rows(AnswerRows(), path)
        assert [row._replace(place="") for row in found] == [row._replace(place="") for row in expected]
    rows[1]["answers"]["answer_start"].pop()
    with pytest.raises(UserError, match=r"bad.jsonl cannot be read \(zip"):
        read(AnswerRows(), tmp_path, "bad.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"no column 'question'; it has 'text'.*Give SQuAD's .json"):
        datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "other.parquet")
        list(AnswerRows().read(str(tmp_path / "other.parquet")))


def test_an_array_of_json_is_rows(tmp_path):
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    lines = read(TextRows(), tmp_path, "x.jsonl", "\n".join(map(json.dumps, rows)))
    for indent in (None, 1):
        found = read(TextRows(), tmp_path, "x.json", json.dumps(rows, indent=indent))
        assert [row.values for row in found] == [row.values for row in lines]
    data = TextRows(source=str(tmp_path / "x.json"), held_out=0.0)
    (tmp_path / "x.json").write_text(json.dumps([*rows, "c", {"text": "d"}]))
    with pytest.raises(UserError, match=r"(?s)row 3: expected a JSON object, found str.*row 4: there is no column"):
        data.open(ByteTokenizer(), print)
    (tmp_path / "x.json").write_text("[\n" + json.dumps(rows[0]) + "\n" + json.dumps(rows[1]) + "\n]")
    with pytest.raises(UserError, match=r"x.json cannot be read .* line 3 "):
        data.open(ByteTokenizer(), print)


def test_quotes_of_a_tsv_are_those_of_csv_if_all_columns_agree(tmp_path):
    """pandas.DataFrame.to_csv(sep="\\t"); GLUE's files are unquoted."""
    pandas = pytest.importorskip("pandas")
    texts = ['a "string" of words', '"q"', "plain"]
    data, remark = TextRows(source=str(tmp_path / "x.tsv"), held_out=0.0), f"Quotes around columns of {tmp_path}/x.tsv"
    for quoting in (0, 1):  # where necessary, everywhere
        table = pandas.DataFrame({"text": texts, "label": ["x", "y", "x"]})
        table.to_csv(data.source, sep="\t", index=False, quoting=quoting)
        source = data.open(ByteTokenizer(), print)
        assert [row.values["text"] for row in source.records["train"]] == texts and remark in source.summary
        corpus = open_corpus(data.source)
        assert corpus.remark.startswith(remark) and [piece.text for piece in corpus.pieces()] == texts
    for text in ('"a', '"a" b', 'a "b"', '"', '"a "b""'):
        lines = ["text\tlabel", '"whole"\tx', f"{text}\ty"]
        (tmp_path / "x.tsv").write_text("\n".join(lines))
        is_quoted = text == 'a "b"'
        assert (remark in data.open(ByteTokenizer(), print).summary) == is_quoted
        found = [row.values["text"] for row in good_rows(data, data.source)[0]]
        assert found == ["whole" if is_quoted else '"whole"', text]


def test_rows_that_are_also_trained_on_are_counted(tmp_path):
    """Whatever their labels; the same file is refused."""
    (tmp_path / "x.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    (tmp_path / "y.tsv").write_text("text\tlabel\na\ty\nc\ty\nb\ty\n")
    data = TextRows(source=str(tmp_path / "x.tsv"), dev=str(tmp_path / "y.tsv"))
    shared = f"2 of 3 rows of {data.dev} are also in {data.source}, which is trained on"
    assert data.open(ByteTokenizer(), print).summary.endswith(shared)
    (tmp_path / "link.tsv").symlink_to(tmp_path / "x.tsv")
    for dev in (data.source, str(tmp_path / "link.tsv")):
        with pytest.raises(UserError, match=r"--data.dev is the file of --data.source, .*x.tsv, which is trained on"):
            dataclasses.replace(data, dev=dev).open(ByteTokenizer(), print)


def test_a_file_without_rows(tmp_path):
    (tmp_path / "x.tsv").write_text("text\tlabel\n")
    (tmp_path / "y.tsv").write_text("text\tlabel\nred\tX\n")
    files = {"source": str(tmp_path / "y.tsv"), "dev": str(tmp_path / "x.tsv")}
    for fields, words in ((files, "evaluate on"), ({"source": files["dev"], "dev": files["source"]}, "train on")):
        with pytest.raises(UserError, match=f"x.tsv has no rows to {words}"):
            TextRows(**fields).open(None)


@pytest.mark.parametrize("field", ["both_orders", "lm_coefficient"])
def test_options_of_a_classifier_are_refused_for_text_to_text(field):
    with pytest.raises(UserError, match=f"{field} is for a classifier"):
        TextToText(kind=Classification(**{field: True})).bind(Vocabulary.stand_in(100), 64)


def test_a_label_that_is_no_number(tmp_path):
    (row,) = read(TextRows(), tmp_path, "x.tsv", "text\tlabel\nred\tmany\n")
    with pytest.raises(UserError, match="line 2: the label 'many' is no number"):
        Classification(target="number").as_text(row)


class Canned:
    """Task that answers class or tag 1 to everything, without a model."""

    def run(self, params, source, length, batch_size):
        examples = source.examples("held_out", self, length)
        return [{"logits": np.eye(2)[1], "tags": np.ones(length, int)} for _ in examples]


CLASSES = "text\tlabel\na\ty\nb\t\nc\tnew\nd\tx\ne\ty\n"
SENTENCES = "a y\nb x\n\nc y\nd new\n"


@pytest.mark.parametrize(("data", "file", "text", "message"), [
    (TextRows(), "x.csv", "id,text,label,stars\n1,a,X,good\n1,b,X,bad\n",
     r"all 2 rows have the label 'X', .* another column with --data.label-field\."),
    (TextRows(text_field="1", label_field="2"), "x.tsv", "a\tX\nb\tX\n",
     r"label 'X', .*classes or more, or another column"),
    (TextRows(), "x.jsonl", '{"text": "a", "label": 1, "lang": "en"}\n{"text": "b", "label": 1, "lang": "de"}\n',
     r"label '1', .*--data.label-field"),
    (TagRows(tag_column=2), "x.conll", "a X B\nb X I\n\n# c\nc X B\n",
     r"label 'X', .*--data.tag-column"),
])
def test_a_single_class_is_refused(data, file, text, message, tmp_path):
    data, kind = dataclasses.replace(data, source=str(tmp_path / file)), Tagging if "conll" in file else Classification
    rows = read(data, tmp_path, file, text)
    for task in (kind(), TextToText(kind=kind())):
        with pytest.raises(UserError, match=message):
            task.with_labels_of(SimpleNamespace(records={"train": rows, "held_out": []}), data)
    other = rows[1]._replace(values=rows[1].values | {kind.gold_value: ["B"] if kind is Tagging else "B"})
    require_classes(kind(), [rows[0], other], data)
    require_classes(MultipleChoice(), rows, data)  # has no classes


@pytest.mark.parametrize(("columns", "tags"), [("a X NN O\nb X VB B\n", ["O", "B"]), ("a\tO\nb\tB\n", ["O", "B"])])
def test_the_last_column_of_conll_is_the_tag(columns, tags, tmp_path):
    (row,) = read(load_preset("configs/tasks/tag.py").data, tmp_path, "x.conll", f"-DOCSTART- O\n\n{columns}")
    assert row.values == {"words": ["a", "b"], "tags": tags}
    with pytest.raises(UserError, match="line 1 has 1 columns, but the word stands in 1 and its tag in 2"):
        read(TagRows(), tmp_path, "y.conll", "a\nb\n")


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


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_of_csv_is_detected(separator, tmp_path):
    text = f'text{separator}"a,b;c;d\te"{separator}label\n"red, white; blue\t!"{separator}0{separator}flag\n'
    (row,) = read(TextRows(), tmp_path, "x.csv", text)
    assert row.values == {"text": "red, white; blue\t!", "label": "flag"}


BAD_ROWS = {
    "columns": (TextRows, "x.tsv", "text\tlabel\na\tx\nb\nc\td\te\nd\tx\n", ["line 3 has 1", "line 4 has 3"]),
    "json": (TextRows, "x.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n{\n{"text": null, "label": 2}\n'
             '{"text": "d", "label": 1}\n', ["line 2: there is no column 'label'", "line 3: this is not JSON"]),
    "choices": (ChoiceRows, "x.jsonl", json.dumps(CHOICE) + '\n{"text": "a", "choices": ["b"], "label": 0}\n'
                '{"text": "a", "choices": ["b", "c", "d"], "label": 0}\n' + json.dumps(CHOICE),
                ["line 2: 'choices' holds no list of two", "line 3 has 3 choices, the rows before 2"]),
    "tags": (TagRows, "x.conll", "red X\nhouse\n\nblue X\n\na\nb\n\nd X\n", ["line 2 has 1", "line 6 has 1"]),
    "squad": (AnswerRows, "x.json", json.dumps({"data": [{"paragraphs": [{"context": "red house", "qas": [
        {"id": str(place), "question": "?", "answers": [{"text": "red", "answer_start": place}]}
        for place in (0, 1, "2", None, 0)]}]}]}),
        ["1: the answer", "2: the field 'answer_start' is text, not a whole number", "None: the field 'answer_start'"]),
    "coqa": (lambda **data: AnswerRows(form="coqa", **data), "x.json", json.dumps({"data": [
        {"id": "s", "story": "red house", "questions": [{"turn_id": i, "input_text": "?"} for i in range(4)],
         "answers": [TURN, TURN | {"span_start": "0"}, TURN, None]}]}),
        ["turn 1: the field 'span_start' is text", "turn 3: expected a JSON object, found null"]),
    "no label": (TextRows, "x.csv", "text,label\ngood,x\nbad,\nworse\nfine,y\n",
                 ["line 3 has no label; fill it in, name the column that has it, or, if rows have several labels or "
                  "none of them, give --data.label-separator", "line 4 has 1 column instead"]),
    "quotes": (TextRows, "x.csv", 'text,label\n"red ""house"",\nblue",x\n"a" b,x\n"c",y\ne,"x', [
        "line 4 cannot be split into columns (',' expected after '\"'); double the quotes", "line 6 cannot be split"]),
    "carriage returns": (TextRows, "x.tsv", "text\tlabel\na\tx\nb\rc\ty\nd\ty\n", ["line 3 cannot be split"]),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named_together_or_left_out(name, tmp_path):
    kind, file, text, messages = BAD_ROWS[name]
    (tmp_path / file).write_text(text, newline="")
    data = kind(source=str(tmp_path / file), held_out=0.0)
    with pytest.raises(UserError, match=rf"{file}: {len(messages)} of .* rows cannot be used") as error:
        data.open(ByteTokenizer(), print)
    shown = str(error.value).splitlines()[1:]
    assert len(shown) == len(messages) and all(text in line for text, line in zip(messages, shown, strict=True))
    opened = dataclasses.replace(data, skip_bad_rows=True).open(ByteTokenizer(), print)
    num_null = text.count('"text": null')
    assert len(opened.records["train"]) == 2 and f"; {len(messages) + num_null} left out, which" in opened.summary


def test_a_quote_that_swallows_lines_is_refused(tmp_path):
    """Otherwise --data.skip-bad-rows would lose any number of good rows."""
    with pytest.raises(UserError, match="line 2 cannot be split into columns"):
        read(TextRows(skip_bad_rows=True), tmp_path, "x.csv", 'text,label\n"a,x\nb,y\nc,x\nd,"y"\n')


@pytest.mark.parametrize("file", ["x.csv", "x.jsonl"])
def test_null_is_the_same_in_every_format(file, tmp_path):
    """A row without text is left out, a label is missing, and one text of two may be."""
    rows = [("a", "b", "x"), ("", "", "x"), ("", "d", "y"), (None, None, None), ("e", None, "")]
    lines = [json.dumps(dict(zip(("text", "other", "label"), row, strict=True))) for row in rows]
    if file == "x.csv":
        lines = ["text,other,label", *(",".join(value or "" for value in row) for row in rows)]
    (tmp_path / file).write_text("\n".join(lines))
    found, num_skipped = good_rows(TextRows(text_pair_field="other"), str(tmp_path / file))
    assert [tuple(row.values.values()) for row in found] == [("a", "x", "b"), ("", "y", "d"), ("e", None, "")]
    assert num_skipped == 2
    table = read_table(str(tmp_path / file), Columns(["other"], ""))
    assert [fill("{other}.", row) for row in table] == ["b.", ".", "d.", ".", "."]


def test_at_most_ten_bad_rows_are_shown_and_a_file_of_bad_rows_is_refused(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("text\tlabel\ngood\tx\n" + "bad\n" * 25)
    with pytest.raises(UserError, match="25 of 26 rows") as error:
        TextRows(source=str(path)).open(ByteTokenizer(), print)
    assert str(error.value).count("column instead") == 10 and str(error.value).endswith("and 15 more")
    with pytest.raises(UserError, match="is of no known kind"):
        TextRows(source=str(tmp_path)).open(ByteTokenizer(), print)
    path.write_text("text\tlabel\n" + "bad\n" * 25)
    with pytest.raises(UserError, match="line 2 has 1 column instead"):
        TextRows(source=str(path), skip_bad_rows=True).open(ByteTokenizer(), print)


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
