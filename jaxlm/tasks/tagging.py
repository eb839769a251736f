"""Tagging of words (parts of speech, named entities): the classifier reads the first piece of each word."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, Example, LabelledData, Record
from jaxlm.data.readers import read_lines
from jaxlm.errors import UserError
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task
from jaxlm.tasks.rows import input_arrays, input_padding, synthetic_inputs
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

UNASKED = -1
"""The label of tokens that begin no word."""


@dataclasses.dataclass(frozen=True)
class TagRows(LabelledData):
    """Sentences of words with tags, from CoNLL or CoNLL-U: one word a line, columns separated by tabs, or by spaces,
    a blank line between sentences. Lines with "-DOCSTART-", comments, and in CoNLL-U the ranges ("3-4") and empty words
    ("8.1"), are no words. A comment begins with "# " before a sentence; where spaces separate the columns, it is told
    from the word "#" by another number of columns than other lines have, or by "# key = value". "-DOCSTART-" and
    "# newdoc" begin a document."""

    word_column: int = 1
    """Place of the word in a line, from 1."""

    tag_column: int = 2
    """Place of the tag in a line, from 1; 0 for a file whose tags are to be predicted."""

    has_ids: bool = False
    """Whether the first column numbers the words, as in CoNLL-U."""

    def validate(self) -> None:
        super().validate()
        if self.word_column < 1 or self.tag_column < 0:
            raise UserError(
                f"--data.word-column is {self.word_column} and --data.tag-column {self.tag_column}; columns count from "
                "1, and a tag column of 0 is for a file without tags."
            )

    def read(self, path: str) -> Iterator[Record]:
        words: list[str] = []
        tags: list[str] = []
        number, start, document = 0, "", 0
        wanted, form = max(self.word_column, self.tag_column), _form_of_words(path)

        def sentence() -> Record:
            values = {"words": words, "tags": tags if self.tag_column else None}
            return Record(str(number), start, values, (" ".join(words),), str(document) if document else "")

        for place, line in read_lines(path):
            if _is_blank(line):
                if words:
                    yield sentence()
                    number, words, tags = number + 1, [], []
                continue
            columns = _columns(line)
            if line.startswith("-DOCSTART-") or (not words and _is_comment(line, form)):
                document += line.startswith(("-DOCSTART-", "# newdoc"))
                continue
            if self.has_ids and not columns[0].isdecimal():
                if not re.fullmatch(r"#.*|[0-9]+[-.][0-9]+", columns[0]):
                    raise UserError(
                        f"{place} begins with {columns[0]!r}, not with a word's number as in CoNLL-U; mend the "
                        "line, or give --data.has-ids False and the columns of the word and its tag."
                    )
                continue
            if len(columns) < wanted:
                raise UserError(
                    f"{place} has {len(columns)} columns, but the word stands in {self.word_column} and its tag in "
                    f"{self.tag_column}; choose with --data.word-column and --data.tag-column (0: without tags)."
                )
            start = start if words else place
            words.append(columns[self.word_column - 1])
            tags.append(columns[self.tag_column - 1])
        if words:
            yield sentence()


def _is_blank(line: str) -> bool:
    return not line.strip(" \t\r\n")


def _columns(line: str) -> list[str]:
    """No other white space separates columns: a no-break space is part of a word."""
    line = line.rstrip("\r\n")
    return line.split("\t") if "\t" in line else [column for column in line.split(" ") if column]


def _form(line: str) -> tuple[bool, int]:
    """(whether tabs separate the columns, how many there are)."""
    return "\t" in line, len(_columns(line))


def _form_of_words(path: str) -> tuple[bool, int] | None:
    """The form of the first line that can be no comment."""
    words = (line for _, line in read_lines(path) if not _is_blank(line) and not line.startswith(("#", "-DOCSTART-")))
    return next(map(_form, words), None)


def _is_comment(line: str, form: tuple[bool, int] | None) -> bool:
    """Whether a line before a sentence is a comment. form: of the lines that are words."""
    return line.startswith("# ") and ("\t" in line or _form(line) != form or _columns(line)[2:3] == ["="])


@dataclasses.dataclass(frozen=True)
class TagEncoder:
    """A sentence's words inside a template, cut where they are too many; see `jaxlm.data.labelled.RowEncoder`. Arrays:
    input_ids, token_type_ids, attention_mask, labels int32 [length], the label at the first piece of each word, -1
    elsewhere."""

    template: Template
    vocabulary: Vocabulary
    labels: tuple[str, ...]

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Example]:
        # Each word behind a space, as in a text: in byte-level and SentencePiece vocabularies that is another piece.
        flat = [(" " if i and tokenizer.is_byte_level else "") + word for row in records
                for i, word in enumerate(row.values["words"])]
        pieces = iter(tokenizer.encode_arrays(flat))
        unknown = np.array([max(self.vocabulary.unk, 0)], np.int32)
        room = length - self.template.num_symbols(False)
        number_of = {label: place for place, label in enumerate(self.labels)}
        examples = []
        for number, row in enumerate(records):
            words = [next(pieces) for _ in row.values["words"]]
            words = [word if len(word) else unknown for word in words]  # of characters that the vocabulary drops
            ids = np.concatenate(words)[:room]
            labels = np.full(len(ids), UNASKED, np.int32)
            tags = row.values["tags"] or [self.labels[0]] * len(words)  # any, where they are to be predicted
            for place, tag in zip(np.cumsum([0, *map(len, words[:-1])]), tags, strict=True):
                if tag not in number_of:
                    raise UserError(
                        f"{row.place}: the tag {tag!r} of that sentence does not occur in the training rows; mend or "
                        "remove the sentence."
                    )
                if place < len(ids):
                    labels[place] = number_of[tag]
            made = self.template.build(self.vocabulary, ids)
            placed = np.full(len(made.input_ids), UNASKED, np.int32)
            placed[made.part == 1] = labels
            examples.append(Example(number, input_arrays(made) | {"labels": placed}))
        return examples

    def fill(self, vocabulary: Vocabulary) -> dict[str, int]:
        return input_padding(vocabulary) | {"labels": UNASKED}

    def synthetic(self, rows: int, length: int, vocabulary: Vocabulary) -> Arrays:
        return synthetic_inputs((rows, length), vocabulary) | {"labels": np.zeros((rows, length), np.int32)}


@dataclasses.dataclass(frozen=True)
class Tagging(Task):
    """loss = mean cross-entropy of the tag over all words."""

    metric: Literal["accuracy", "entities"] = "accuracy"
    """What is reported beside accuracy: nothing, or precision, recall and F1 of whole entities in IOB2 tags."""

    name = "tagging"
    pools = False
    longest_text = 256

    @property
    def encoder(self) -> TagEncoder:
        assert self.vocabulary is not None, "bind the objective to a vocabulary first"
        return TagEncoder(self.template, self.vocabulary, self.labels)

    @property
    def filler(self) -> str:
        """The tag of a word that got none."""
        return "O" if "O" in self.labels else self.labels[0]

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        found = self.labels or tuple(sorted({tag for row in records for tag in row.values["tags"] or ()}))
        return dataclasses.replace(self, labels=found)

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        logits = self.token_logits(params, example, key if train else None)
        labels = example["labels"]
        weights = (labels >= 0).astype(jnp.float32) * self.weights(example)[:, None]
        return {
            "task_loss": Term.of(cross_entropy(logits, jnp.maximum(labels, 0)), weights, 1.0),
            "accuracy": Term.of(jnp.argmax(logits, axis=-1) == labels, weights),
        }

    def predict(self, params: Params, example: Arrays) -> Arrays:
        return {"tags": jnp.argmax(self.token_logits(params, example, None), axis=-1)}

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        (line,) = super().describe(batch, example, row)
        labels = np.asarray(example["labels"][row])[: len(line.ids)]
        marks = ["target" if label >= 0 else mark for label, mark in zip(labels, line.marks, strict=True)]
        tags = " ".join(self.labels[label] for label in labels if label >= 0)
        return [line._replace(marks=marks), Line(f"tags {tags}", [], [])]

    def answers(
        self, records: Sequence[Record], examples: Sequence[Example], outputs: Sequence[Arrays]
    ) -> list[Answer]:
        found = []
        for record, example, output in zip(records, examples, outputs, strict=True):
            asked = example.arrays["labels"]
            tags = [self.labels[tag] for tag in output["tags"][: len(asked)][asked >= 0]]
            rest = len(record.values["words"]) - len(tags)  # words beyond `length`
            found.append(Answer(tags + [self.filler] * rest, {}))
        return found

    def as_text(self, record: Record) -> tuple[str, str]:
        return " ".join(record.values["words"]), " ".join(record.values["tags"] or ())

    def from_text(self, record: Record, text: str) -> Any:
        count = len(record.values["words"])
        return (text.split() + [self.filler] * count)[:count]

    def gold(self, record: Record) -> Any:
        return record.values["tags"]

    def without_unseen_label(self, record: Record) -> Record:
        is_seen = set(record.values["tags"] or ()) <= set(self.labels)
        return record if is_seen else record._replace(values=record.values | {"tags": None})

    def score(self, records: Sequence[Record], answers: Sequence[Answer]) -> dict[str, float]:
        predictions, gold = [a.prediction for a in answers], [self.gold(row) for row in records]
        words = metrics.accuracy([t for row in predictions for t in row], [t for row in gold for t in row])
        return {"accuracy": words} | (metrics.entity_f1(predictions, gold) if self.metric == "entities" else {})
