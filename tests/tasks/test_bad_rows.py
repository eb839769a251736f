"""Rows that cannot be used, and files of them."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from jaxlm.errors import UserError
from jaxlm.models.llama import Llama
from jaxlm.tasks.answers import AnswerRows
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice
from jaxlm.tasks.remarks import require_classes
from jaxlm.tasks.tagging import Tagging, TagRows
from jaxlm.tasks.text_to_text import PairRows, TextToText
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.data.stand_ins import ByteTokenizer
from tests.tasks.rows import CHOICE, STORY, TURN, read, squad


def test_more_choices_than_letters_are_refused_as_text(tmp_path):
    (row,) = read(ChoiceRows(), tmp_path, "x.jsonl", json.dumps(CHOICE | {"choices": ["a"] * 27, "label": 26}))
    with pytest.raises(UserError, match="line 1 has 27 choices; letters name only 26"):
        MultipleChoice().as_text(row)


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
    "unequal": (TagRows(), "x.jsonl", '{"tokens": ["a", "b"], "ner_tags": ["X"]}', "line 1: .* no two lists of one"),
    "no list": (TagRows(), "x.jsonl", '{"tokens": "a b", "ner_tags": "X Y"}', "line 1: .* no two lists of one"),
    "no tags": (TagRows(), "x.jsonl", '{"tokens": ["a"]}', "no column 'ner_tags'.*--data.tags-field, .*tag-column 0"),
    "answers": (AnswerRows(form="coqa"), "x.json", {"additional_answers": {"0": []}}, "x.json cannot be read"),
    "input": (AnswerRows(form="coqa"), "x.json", {"answers": [TURN | {"input_text": None}]},
              "story s, turn 1: answers.input_text is missing; it must be text; mend"),
    "span": (AnswerRows(form="coqa"), "x.json", {"answers": [TURN | {"span_text": []}]},
             "story s, turn 1: answers.span_text is \\[\\]; it must be text"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence(name, tmp_path):
    data, file, text, message = MISTAKES[name]
    text = text if isinstance(text, str) else json.dumps({"data": [STORY | text]})
    with pytest.raises(UserError, match=message):
        read(data, tmp_path, file, text)


ROW = {"text": "a", "other": "b", "label": "x", "source": "a", "target": "b", "id": "i"}
NOT_TEXT = {
    "list": (TextRows(), ROW | {"text": ["a", "b"]}, "line 1: the field 'text' is a list, not text"),
    "pair": (TextRows(text_pair_field="other"), ROW | {"other": {"a": 1}}, "'other' is an object, not text"),
    "bool": (TextRows(), ROW | {"text": True}, "line 1: the field 'text' is a boolean, not text"),
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
    "question": (AnswerRows(), squad(question=None), "question q: question is missing; it must be text"),
    "passage": (AnswerRows(), squad(context=["red house"]), r'q: context is \["red house"\]; it must be text'),
    "answer": (AnswerRows(), squad(answers=[{"text": None, "answer_start": 0}]), "q: answers.0.text is missing"),
    "turn": (AnswerRows(form="coqa"), {"data": [STORY | {"questions": [{"turn_id": 1, "input_text": None}]}]},
             "story s, turn 1: input_text is missing"),
    "story": (AnswerRows(form="coqa"), {"data": [STORY | {"story": None}]}, "turn 1: story is missing"),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_values_that_are_not_text_are_refused(name, tmp_path):
    data, row, message = NOT_TEXT[name]
    with pytest.raises(UserError, match=f"x.jsonl?, .*{message}"):
        read(data, tmp_path, "x.json" if isinstance(data, AnswerRows) else "x.jsonl", json.dumps(row))


def test_texts_may_be_numbers(tmp_path):
    text = json.dumps(squad(id=7, question=2.5, context=1990, answers=[{"text": 99, "answer_start": 1}]))
    (row,) = read(AnswerRows(), tmp_path, "x.json", text)
    assert (row.id, row.values["question"], row.values["passage"]) == ("7", "2.5", "1990")
    assert (row.values["answers"], row.values["text"]) == (["99"], "99")


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


def test_a_language_model_loss_needs_the_output_layer():
    """A task has no output parameters, such as the head of an untied Llama."""
    model = Llama(vocab_size=100, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4,
                  intermediate_size=8)
    with pytest.raises(UserError, match="lm_coefficient needs a decoder that predicts by its embeddings"):
        Classification(model=model, lm_coefficient=0.5).check(Vocabulary.stand_in(100), 16)
    tied = dataclasses.replace(model, tied_head=True)
    Classification(model=tied, lm_coefficient=0.5).check(Vocabulary.stand_in(100), 16)


def test_a_label_that_is_no_number(tmp_path):
    (row,) = read(TextRows(), tmp_path, "x.tsv", "text\tlabel\nred\tmany\n")
    with pytest.raises(UserError, match="line 2: the label 'many' is no number"):
        Classification(target="number").as_text(row)


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


def test_a_single_number_is_refused(tmp_path):
    text = "text\tlabel\n" + "".join(f"{word}\t3.5\n" for word in "abc")
    data, task = TextRows(source=str(tmp_path / "x.tsv")), Classification(target="number")
    rows = read(data, tmp_path, "x.tsv", text)
    listed = [rows[0]._replace(values=rows[0].values | {"label": [3.5]})]
    for kind in (task, TextToText(kind=task)):
        with pytest.raises(UserError, match=r"all 3 rows have the label 3.5, .*give rows of two numbers or more, or"):
            kind.with_labels_of(SimpleNamespace(records={"train": rows, "held_out": []}), data)
        with pytest.raises(UserError, match="has a list of labels"):
            kind.with_labels_of(SimpleNamespace(records={"train": listed, "held_out": []}), data)
    require_classes(task, read(data, tmp_path, "x.tsv", text + "d\t4\n"), data)


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
        ["1: the answer", '2: answers.0.answer_start is "2"; it must be an integer', "None: answers.0"]),
    "coqa": (lambda **data: AnswerRows(form="coqa", **data), "x.json", json.dumps({"data": [
        {"id": "s", "story": "red house", "questions": [{"turn_id": i, "input_text": "?"} for i in range(4)],
         "answers": [TURN, TURN | {"span_start": "0"}, TURN, None]}]}),
        ['turn 1: answers.span_start is "0"', "turn 3: answers is missing; it must be an object"]),
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
