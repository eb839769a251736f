"""Questions of SQuAD: its own JSON, or one row per question, as the library `datasets` and TFDS have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxlm.data.readers import Columns, open_text
from jaxlm.data.rows import kind_of, read_objects, read_rows
from jaxlm.errors import UserError
from jaxlm.paths import reading

_ANSWERS = ("answers.text", "answers.answer_start")
"""Columns of the answers after `Dataset.flatten`."""
_COLUMNS = Columns(
    ["question", "context"], "Give SQuAD's JSON, or rows with these columns and answers", ["id", "answers", *_ANSWERS]
)


def squad_questions(source: str) -> Iterator[tuple[str, dict[str, Any], Any] | UserError]:
    """Yield (place, question, context) with the fields of SQuAD's JSON, and an error for a row that cannot be read.

    Args:
        source: SQuAD's JSON; or rows with `question`, `context` and `answers`, which has lists `text` and
            `answer_start`: a dataset (`hf:`, `tfds:`), .parquet, JSON lines or a JSON array, also under "data".

    Raises:
        UserError: The source cannot be read.
    """
    for number, row in enumerate(_rows(source)):
        if isinstance(row, UserError) or isinstance(row[1], UserError):
            yield row if isinstance(row, UserError) else row[1]
        elif "paragraphs" in row[1]:
            for paragraph in row[1]["paragraphs"]:
                for question in paragraph["qas"]:
                    yield f"{source}, question {question.get('id')}", question, paragraph["context"]
        else:
            try:
                yield row[0], {"id": str(number)} | row[1] | _answers(*row), row[1].get("context")
            except UserError as error:
                yield error


def _rows(source: str) -> Iterator[tuple[str, Any] | UserError]:
    """Yield (place, article or question)."""
    if kind_of(source) in ("hf", "tfds", "parquet"):
        yield from read_rows(source, _COLUMNS)
        return
    with reading(source), open_text(source) as stream:
        text = stream.read()
    try:
        is_lines = "question" in json.loads(text.lstrip().partition("\n")[0])
    except ValueError:  # an object or an array of several lines
        is_lines = False
    if is_lines:
        yield from read_objects(source)
        return
    with reading(source):
        data = json.loads(text)
        data = data["data"] if isinstance(data, dict) else data
    yield from ((f"{source}, row {number}", row) for number, row in enumerate(data, 1))


def _answers(place: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of a row as a list of objects; {} if they are that already, or unknown."""
    lists = row.get("answers")
    if all(name in row for name in _ANSWERS):
        lists = {name.removeprefix("answers."): row[name] for name in _ANSWERS}
    if not isinstance(lists, dict):
        return {}
    texts, starts = lists.get("text"), lists.get("answer_start")
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise UserError(f"{place}: answers needs as many 'answer_start' as 'text', in lists; fix or remove the row.")
    return {"answers": [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]}
