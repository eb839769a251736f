"""Rows of each format, and a reader of them."""

from __future__ import annotations

from jaxlm.data.labelled import good_rows

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


def squad(context="red house", **changes):
    question = {"id": "q", "question": "?", "answers": [{"text": "red", "answer_start": 0}]} | changes
    return {"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]}
