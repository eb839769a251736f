"""Tagging of words (parts of speech, named entities): the classifier reads the first piece of each word."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data import arrow_source
from jaxlm.data.labelled import Arrays, EncodedExample, LabelledData, Record, row_or_error
from jaxlm.data.readers import Columns, read_lines
from jaxlm.data.rows import kind_of
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import NO_LABEL, Answer, Task, text_arrays
from jaxlm.tasks.tables import TableRow, read_table
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params

BLANK = " \t\r\n"


@dataclasses.dataclass(frozen=True)
class TagRows(LabelledData):
    """Sentences of words with tags, from CoNLL or CoNLL-U, or from rows that have a list of each.

    Rows are those of JSON, .parquet, `tfds:` and `hf:`. Other files have one word per line, in columns separated by
    tabs or by spaces, and a blank line between sentences. Comments, lines with "-DOCSTART-", and in CoNLL-U ranges
    ("3-4") and empty words ("8.1") are skipped. A comment begins with "# " before a sentence. Between spaces it differs
    from the word "#" by its number of columns, or is "# key = value". "-DOCSTART-" and "# newdoc" begin a document.
    """

    label_flag = "--data.tag-column"

    word_column: int = field(1, range="[1, inf)")
    """Place of the word in a line, from 1."""
    tag_column: int | None = field(None, range="[0, inf)")
    """Place of the tag in a line, from 1; None: the last column; 0 for a file whose tags are to be predicted."""
    has_ids: bool = False
    """Whether the first column numbers the words, as in CoNLL-U."""
    words_field: str = "tokens"
    """Column of the list of words, in rows."""
    tags_field: str = "ner_tags"
    """Column of the list of tags, in rows; it is not read if `tag_column` is 0."""

    def read(self, path: str) -> Iterator[Record | UserError]:
        return self._rows(path) if kind_of(path) in ("json", "parquet", "tfds", "hf") else self._sentences(path)

    def _rows(self, path: str) -> Iterator[Record | UserError]:
        fields = [self.words_field, *([] if self.tag_column == 0 else [self.tags_field])]
        columns = Columns(fields, "Choose columns with --data.words-field and --data.tags-field, or, for rows without "
                                  "tags, --data.tag-column 0")
        tags = arrow_source.open_dataset(path, columns).features.get(self.tags_field) if path[:3] == "hf:" else None
        names = dict(enumerate(getattr(getattr(tags, "feature", None), "names", ())))
        for number, row in enumerate(read_table(path, columns)):
            yield row if isinstance(row, UserError) else row_or_error(self._record, str(number), row, names)

    def _record(self, name: str, row: TableRow, names: Mapping[int, str]) -> Record:
        """Return the record of a row; `names` are those of tags that are class numbers."""
        words, tags = (row.values.get(field) for field in (self.words_field, self.tags_field))
        if not (isinstance(words, list) and (tags is None or (isinstance(tags, list) and len(tags) == len(words)))):
            raise UserError(f"{row.place}: {self.words_field!r} and {self.tags_field!r} are no two lists of one "
                            "length; give a list of words and one with the tag of each.")
        texts = row.texts(self.words_field)
        if names and tags and set(tags) == {-1}:  # as in test sets of `hf:` without tags
            tags = None
        tags = tags and [names.get(tag, text) for tag, text in zip(tags, row.labels(self.tags_field), strict=True)]
        return Record(name, row.place, {"words": texts, "tags": tags}, (" ".join(texts),))

    def _sentences(self, path: str) -> Iterator[Record | UserError]:
        layout = next(map(_layout, _word_lines(path)), None)
        tag_column = max(2, layout[1] if layout else 0) if self.tag_column is None else self.tag_column
        number = document = 0
        for is_blank, block in itertools.groupby(read_lines(path), lambda item: not item[1].strip(BLANK)):
            words: list[tuple[str, str, str]] = []  # place, word and tag
            error: UserError | None = None
            for place, line in () if is_blank else block:
                if line.startswith("-DOCSTART-") or (not words and _is_comment(line, layout)):
                    document += line.startswith(("-DOCSTART-", "# newdoc"))
                elif isinstance(found := row_or_error(self._word, place, _columns(line), tag_column), UserError):
                    error = error or found
                else:
                    words += found
            if error:
                yield error
                number += 1
            elif words:
                (start, *_), texts, tags = words[0], [word for _, word, _ in words], [tag for *_, tag in words]
                values = {"words": texts, "tags": tags if tag_column else None}
                yield Record(str(number), start, values, (" ".join(texts),), str(document or ""))
                number += 1

    def _word(self, place: str, columns: list[str], tag_column: int) -> list[tuple[str, str, str]]:
        """Return [(place, word, tag)] of a line, or [] for a line without a word."""
        if self.has_ids and not columns[0].isdecimal():
            if re.fullmatch(r"#.*|[0-9]+[-.][0-9]+", columns[0]):
                return []
            raise UserError(
                f"{place} begins with {columns[0]!r}, not with a word's number as in CoNLL-U; fix the line, or give "
                "--data.has-ids False and the columns of the word and its tag."
            )
        if len(columns) < max(self.word_column, tag_column):
            raise UserError(
                f"{place} has {len(columns)} columns, but the word stands in {self.word_column} and its tag in "
                f"{tag_column}; choose with --data.word-column and --data.tag-column (0: without tags)."
            )
        return [(place, columns[self.word_column - 1], columns[tag_column - 1])]


def _word_lines(path: str) -> Iterator[str]:
    """Yield the lines that certainly hold words: they do not begin with "#"."""
    return (line for _, line in read_lines(path) if line.strip(BLANK) and not line.startswith(("#", "-DOCSTART-")))


def _columns(line: str) -> list[str]:
    # No other white space separates columns: a no-break space is part of a word.
    line = line.rstrip("\r\n")
    return line.split("\t") if "\t" in line else [column for column in line.split(" ") if column]


def _layout(line: str) -> tuple[bool, int]:
    """Return whether tabs separate the columns, and the number of columns."""
    return "\t" in line, len(_columns(line))


def _is_comment(line: str, layout: tuple[bool, int] | None) -> bool:
    """Return whether a line before a sentence is a comment, given the layout of the lines with words."""
    return line.startswith("# ") and ("\t" in line or _layout(line) != layout or _columns(line)[2:3] == ["="])


@dataclasses.dataclass(frozen=True)
class Tagging(Task):
    """loss = mean cross-entropy of the tag over all words.

    The arrays of a sentence, which is truncated to the sequence length: input_ids, token_type_ids, attention_mask,
    labels int32 [length]. The label of a word is at its first token; other tokens have NO_LABEL.
    """

    metric: Literal["auto", "accuracy", "entities"] = field("auto", resumable=True)
    """Metrics besides accuracy: none, or precision, recall and F1 of whole entities in the scheme of the tags (IOB1,
    IOB2, IOE1, IOE2, IOBES, BILOU); auto: entities if the tags are of one."""

    name = "tagging"
    use_pooling = False
    longest_text = 256
    gold_value = "tags"

    @property
    def filler(self) -> str:
        """Tag of a word without a prediction."""
        return "O" if "O" in self.labels else self.labels[0]

    def label_names(self, record: Record) -> Sequence[str]:
        return record.values["tags"] or ()

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        task = super().with_labels(records, names)
        task.score([], [])  # raises UserError for tags that the metric cannot read, before training
        return task

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        # As in running text: in vocabularies that begin no text with a space, a word after one has other tokens.
        apart, alone = map(list, tokenizer.encode_arrays(["a a", "a"]))
        space = " " if apart != 2 * alone else ""
        tokens = iter(tokenizer.encode_arrays([
            (space if place else "") + word for record in records for place, word in enumerate(record.values["words"])
        ]))
        unknown = np.array([max(self.vocabulary.unk, 0)], np.int32)
        room = length - self.template.num_symbols(False)
        examples = []
        for number, record in enumerate(records):
            words = [ids if len(ids) else unknown for ids in itertools.islice(tokens, len(record.values["words"]))]
            labels = np.full(sum(map(len, words)), NO_LABEL, np.int32)
            tags = self.label_names(record) or [self.labels[0]] * len(words)  # any label if there is none
            labels[np.cumsum([0, *map(len, words[:-1])])] = [self.label_number(record, tag) for tag in tags]
            row = self.template.build(self.vocabulary, np.concatenate(words)[:room])
            arrays = text_arrays(row) | {"labels": np.full(len(row.input_ids), NO_LABEL, np.int32)}
            arrays["labels"][row.part == 1] = labels[:room]
            examples.append(EncodedExample(number, arrays))
        return examples

    def synthetic(self, rows: int, length: int) -> Arrays:
        return super().synthetic(rows, length) | {"labels": np.zeros((rows, length), np.int32)}

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        logits = self.token_logits(params, example, key if train else None)
        labels = example["labels"]
        weights = (labels >= 0).astype(jnp.float32) * self.weights(example)[:, None]
        return {
            "task_loss": Term.of(cross_entropy(logits, jnp.maximum(labels, 0)), weights, 1.0),
            "accuracy": Term.of(jnp.argmax(logits, axis=-1) == labels, weights),
        }

    def token_logits(
        self, params: Params, example: Arrays, key: jax.Array | None
    ) -> Float[Array, "batch length outputs"]:
        """Return the logits of each token in float32; a key turns dropout on."""
        return self.classify(params, self.token_states(params, example, key))

    def predict(self, params: Params, example: Arrays) -> Arrays:
        return {"tags": jnp.argmax(self.token_logits(params, example, None), axis=-1)}

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        (line,) = super().describe(batch, example, row)
        labels = np.asarray(example["labels"][row])[: len(line.ids)]
        marks = ["target" if label >= 0 else mark for label, mark in zip(labels, line.marks, strict=True)]
        tags = " ".join(self.labels[label] for label in labels if label >= 0)
        return [line._replace(marks=marks), Line(f"tags {tags}", [], [])]

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        ((example, output),) = parts
        is_word = example.arrays["labels"] >= 0
        tags = [self.labels[tag] for tag in output["tags"][: len(is_word)][is_word]]
        missing = len(record.values["words"]) - len(tags)  # words beyond the sequence length
        return Answer(tags + [self.filler] * missing, {"unread": missing} if missing else {})

    def details(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return `unread`, the number of words beyond the sequence length, if there are any."""
        unread = sum(answer.scores.get("unread", 0) for answer in answers)
        return {"unread": unread} if unread else {}

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        """Return the F1 of whole entities first, by which --sweep chooses, if tags mark entities."""
        predictions = [answer.prediction for answer in answers]
        words = metrics.accuracy(list(itertools.chain(*predictions)), list(itertools.chain(*golds)))
        tags = {*self.labels, *itertools.chain(*golds)}
        has_entities = self.metric == "entities" or (self.metric == "auto" and metrics.entity_schemes(tags))
        found = metrics.entity_f1(predictions, golds, self.labels) if has_entities else {}
        return {name: found[name] for name in ("f1",) if found} | {"accuracy": words} | found

    def as_text(self, record: Record) -> tuple[str, str]:
        return " ".join(record.values["words"]), " ".join(record.values["tags"] or ())

    def from_text(self, record: Record, text: str) -> list[str]:
        count = len(record.values["words"])
        return (text.split() + [self.filler] * count)[:count]
