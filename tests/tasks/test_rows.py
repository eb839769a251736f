"""Reading of files of rows, with and without labels."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxlm.config.presets import load_preset
from jaxlm.data.corpus import open_corpus
from jaxlm.data.labelled import EncodedExample, LabelledSource, Record, good_rows
from jaxlm.data.readers import Columns
from jaxlm.errors import UserError
from jaxlm.evaluation.prompts import fill
from jaxlm.knowledge.entity_typing import EntityTyping
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.tasks import answers, text_to_text
from jaxlm.tasks.answers import AnswerRows, Answers, Window, _end_of_marks
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice
from jaxlm.tasks.tables import read_table
from jaxlm.tasks.tagging import Tagging, TagRows
from jaxlm.tasks.text_to_text import PairRows, TextToText
from jaxlm.tokenizers.training import train_tokenizer
from tests.data.stand_ins import EOS, ByteTokenizer
from tests.tasks.rows import CHOICE, STORY, TURN, read, squad

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


@pytest.mark.parametrize(("kind", "rows", "prompt"), [
    (None, {}, "{source}"), (Classification(), {}, "sentence: {text}"), (Tagging(), {}, "{words}"),
    (Classification(), {"text_pair_field": "b"}, "sentence1: {text} sentence2: {text_pair}"),
    (Classification(target="labels", prompt="rte {text_pair}: {text}"), {}, "rte {text_pair}: {text}"),
    (Classification(target="number", prompt="x {text}"), {"text_pair_field": "b"}, "x {text}"),
    (MultipleChoice(), {}, "choices: (A) {choice} (B) … context: {text}"),
    (MultipleChoice(), {"question_field": "q"}, "question: {question} choices: (A) {choice} (B) … context: {text}"),
    (Answers(), {"form": "coqa"}, "question: {question} context: {passage}"),
    (EntityTyping(), {}, ""),
])
def test_the_prompt_of_a_model_card(kind, rows, prompt):
    task = TextToText(model=T5(), kind=kind, prefix="p ")
    assert task.prompt_form(rows)[0].strip() == (prompt and f"p {prompt}")


def test_half_an_emoji_becomes_one_character(tmp_path):
    """UTF-8 holds no unpaired surrogate, and JSON does; places in a text stay."""
    (row,) = read(TextRows(), tmp_path, "x.jsonl", '{"text": "nice \\ud83d!", "label": "x"}\n')
    assert row.values["text"] == "nice \ufffd!"
    question = {"id": "1", "question": "\\ud83d?", "answers": [{"text": "\\ud83d b", "answer_start": 2}]}
    text = json.dumps({"data": [{"paragraphs": [{"context": "a \\ud83d b", "qas": [question]}]}]}).replace("\\\\", "\\")
    (row,) = read(AnswerRows(), tmp_path, "x.json", text)
    assert (row.values["passage"], row.values["text"], row.values["start"]) == ("a \ufffd b", "\ufffd b", 2)


def test_an_answer_of_coqa_is_found_in_its_evidence_whatever_its_case():
    """Lower-case İ has two characters."""
    assert answers._coqa_span("ali", "In İstanbul, Ali lives", 5) == (18, "Ali", "span")
    assert answers._coqa_span("he", "The boy said he left", 5) == (18, "he", "span")  # no part of a word, if it can be
    assert answers._coqa_span("京", "在北京", 5) == (7, "京", "span")


@pytest.mark.parametrize(("kind", "values", "written"), [
    (Classification(labels=("คำถาม", "คำตอบ")), {"text": "x", "label": "คำถาม"}, "คำถาม"),
    (Classification(labels=("0", "1"), label_words=("0=คำถาม", "1=คำตอบ")), {"text": "x", "label": "1"}, "คำตอบ"),
    (Classification(target="labels", labels=("คำถาม", "น้ำ")), {"text": "x", "label": ["น้ำ", "คำถาม"]}, "น้ำ, คำถาม"),
    (Answers(), {"passage": "x น้ำท่วม y", "question": "?", "answers": ["y", "น้ำท่วม"]}, "น้ำท่วม"),
    (None, {"source": "x", "targets": ["คำตอบ！"]}, "คำตอบ!"),
])
def test_written_answers_are_right_as_the_vocabulary_spells_them(kind, values, written, tmp_path, monkeypatch):
    """NFKC takes Thai ำ apart and makes ！ a plain mark, so that no model writes them."""
    tokenizer = train_tokenizer(["คำถาม คำตอบ น้ำท่วม"] * 9, tmp_path / "t", kind="bpe", vocab_size=500)
    assert tokenizer.spelled(written) == tokenizer.decode(tokenizer.encode(written)) != written
    task = TextToText(model=T5(), kind=kind).bind(tokenizer.vocabulary, 128)
    source = LabelledSource(tokenizer, {"held_out": [Record("1", "", values, ("x",))] * 2}, True)
    monkeypatch.setattr(text_to_text, "generate", lambda *_, **options: [tokenizer.encode(written)] * 2)
    found = task.score_rows({}, source, 128, 2)
    assert found[next(name for name in ("accuracy", "exact_match") if name in found)] == 1


@pytest.mark.parametrize("model", [Gpt2(), T5()])
def test_answers_are_the_labels_of_their_tokens(model):
    """Of a decoder, the tokens before them have the weights; the end symbol is the last label, of long answers too."""
    tokenizer = ByteTokenizer()
    task = TextToText(model=model, max_target=5).bind_unchecked(tokenizer.vocabulary)
    pairs = [("red house", "old"), ("red " * 40, "x"), ("red", ""), ("red", "very old")]
    records = [Record("", "", {"source": source, "targets": [target]}, ()) for source, target in pairs]
    for (source, target), one in zip(pairs, task.encode(records, tokenizer, 40), strict=True):
        text, answer = tokenizer.encode_arrays([source, target])
        labels, ids, weights = [*answer[:4], EOS], one.arrays["input_ids"], one.arrays["weights"]
        prompt, ids = one.notes.tolist(), ids.tolist()
        assert prompt[: len(text)][:20] == text.tolist()[:20] and len(ids) <= 40 and one.arrays["attention_mask"].all()
        if task.is_decoder:
            assert len(weights) == len(ids) and ids == prompt + labels and set(weights) == {0, 1}
            assert [label for label, weight in zip(ids[1:], weights[:-1], strict=True) if weight] == labels
        else:
            assert one.arrays["targets"][weights > 0].tolist() == labels and len(weights) == 5
            assert ids == prompt and ids[-1] == EOS


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
        assert own == {"question": answered, "passage": "red house", "answers": ["red"], "start": 0,
                       "text": "red", "kind": "span"}


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


def test_the_letter_of_a_choice_without_a_name(tmp_path):
    """As RACE has it."""
    data = ChoiceRows(choices_fields="options", label_field="answer")
    row = {"text": "a", "options": ["b", "c", "d"]}
    for label, number in ("B", 1), ("1", 1), (2, 2), (None, None):
        (found,) = read(data, tmp_path, "x.jsonl", json.dumps(row | {"answer": label}))
        assert found.values["label"] == number and MultipleChoice().gold(found) == number
    for row["answer"] in "D", "AB", "b":
        with pytest.raises(UserError, match="is none of the choices 0, 1, 2"):
            read(data, tmp_path, "x.jsonl", json.dumps(row))
    row |= {"answer": "B", "options": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]}
    with pytest.raises(UserError, match="is none of the choices x, y"):
        read(data, tmp_path, "x.jsonl", json.dumps(row))


@pytest.mark.parametrize(("kind", "prediction"), list(enumerate(["house", "yes", "no", "unknown"])))
def test_the_best_span_is_kept_beside_another_answer(kind, prediction, tmp_path):
    (row,) = read(AnswerRows(form="coqa"), tmp_path, "x.json", json.dumps({"data": [STORY]}))
    window = Window(2, 0, np.array([[0, 3], [4, 9]]), np.array([True, True]))
    output = {"start": np.array([-9.0, 0, 0, 5]), "end": np.array([-9.0, 0, 0, 5]), "kind": np.eye(4)[kind]}
    answer = Answers(kinds=True, no_answer=True).answer(row, [(EncodedExample(0, {}, window), output)])
    assert answer == (prediction, {"best": "house", "null": -28.0})
    for threshold, text in (-28.0, "house"), (-28.5, ""):
        task = Answers(no_answer=True, null_threshold=threshold)
        assert task.answer(row, [(EncodedExample(0, {}, window), output)]) == (text, {"best": "house", "null": -28.0})
    with pytest.raises(UserError, match=r"null_threshold is for SQuAD 2\.0"):
        Answers(null_threshold=1.0)
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
    rows = read(PairRows(), tmp_path, "y.tsv", "source\ttarget\na\t\nb\t0\n")
    assert [row.values["targets"] for row in rows] == [None, ["0"]]


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
    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [-1, 1]}, classes).save_to_disk(tmp_path / "classes")
    assert [row.values["label"] for row in TextRows().read(f"hf:{tmp_path / 'classes'}")] == [None, "1"]
    rows[1]["answers"]["answer_start"].pop()
    with pytest.raises(UserError, match=r"bad.jsonl cannot be read \(zip"):
        read(AnswerRows(), tmp_path, "bad.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"no column 'question'; it has 'text'.*Give SQuAD's .json"):
        datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "other.parquet")
        list(AnswerRows().read(str(tmp_path / "other.parquet")))


def test_tags_of_words_are_rows_of_two_lists(tmp_path):
    """As the library `datasets` has them, with class numbers and their names, in every format that it writes."""
    datasets = pytest.importorskip("datasets")
    names = ["O", "B-ORG", "I-ORG"]
    rows = {"tokens": [["EU", "rejects"], ["New", "EU", "plan"]], "ner_tags": [[1, 0], [0, 1, 2]]}
    tags = datasets.List(datasets.ClassLabel(names=names))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": tags})
    data = datasets.Dataset.from_dict(rows, features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_json(tmp_path / "lines.jsonl")
    for path in (f"hf:{tmp_path / 'saved'}", str(tmp_path / "rows.parquet"), str(tmp_path / "lines.jsonl")):
        found, _ = good_rows(TagRows(), path)
        assert [row.values["words"] for row in found] == rows["tokens"]
        shown = names if path.startswith("hf:") else ["0", "1", "2"]
        assert [row.values["tags"] for row in found] == [[shown[tag] for tag in tags] for tags in rows["ner_tags"]]
    untagged = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[-1, -1]]}, features)
    untagged.save_to_disk(tmp_path / "untagged")
    assert [row.values["tags"] for row in TagRows().read(f"hf:{tmp_path / 'untagged'}")] == [None]
    (record,) = read(TagRows(tag_column=0, words_field="w"), tmp_path, "x.json", '[{"w": ["EU", 1], "ner_tags": "?"}]')
    assert record.values == {"words": ["EU", "1"], "tags": None} and record.texts == ("EU 1",)


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


@pytest.mark.parametrize(("columns", "tags"), [("a X NN O\nb X VB B\n", ["O", "B"]), ("a\tO\nb\tB\n", ["O", "B"])])
def test_the_last_column_of_conll_is_the_tag(columns, tags, tmp_path):
    (row,) = read(load_preset("configs/tasks/tag.py").data, tmp_path, "x.conll", f"-DOCSTART- O\n\n{columns}")
    assert row.values == {"words": ["a", "b"], "tags": tags}
    with pytest.raises(UserError, match="line 1 has 1 columns, but the word stands in 1 and its tag in 2"):
        read(TagRows(), tmp_path, "y.conll", "a\nb\n")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_of_csv_is_detected(separator, tmp_path):
    text = f'text{separator}"a,b;c;d\te"{separator}label\n"red, white; blue\t!"{separator}0{separator}flag\n'
    (row,) = read(TextRows(), tmp_path, "x.csv", text)
    assert row.values == {"text": "red, white; blue\t!", "label": "flag"}


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


@pytest.mark.parametrize(("text", "end", "found"), [
    ("Ha\u0300 N", 2, 3), ("ভালো", 3, 4), ("각\u1100\u1161\u11a8 x", 2, 4), ("abc", 2, 2), ("ab", 2, 2),
])
def test_an_answer_ends_after_the_marks_of_its_last_character(text, end, found):
    """`tokenizers` aligns a character that NFC composes with the first of its parts."""
    assert _end_of_marks(text, end) == found
