"""Tasks over a text with marked spans, and with linked entities for models that read them (ERNIE)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.labelled import Arrays, EncodedExample, LabelledData, Record, row_or_error
from jaxlm.data.mentions import Mention, Mentions, first_tokens
from jaxlm.data.readers import NUMBERS, json_object, open_text, read_lines
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.knowledge.entity_corruption import NONE
from jaxlm.knowledge.entity_vectors import ReadsEntities
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Constants, Line
from jaxlm.paths import reading
from jaxlm.tasks.base import text_arrays
from jaxlm.tasks.pooled import PooledTask
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params

Span = tuple[int, int]
"""First character, and last character + 1."""


@dataclasses.dataclass(frozen=True)
class MarkedRows(LabelledData):
    """Texts with marked spans and linked entities, from JSON: an array of objects, or an object a line.

    Entities are lists of name, start, end and, if a linker wrote them, score. Offsets count characters.
    """

    threshold: float = field(0.3, range="[0, inf)")
    """Score above which a linked entity is read."""

    def read(self, path: str) -> Iterator[Record | UserError]:
        for number, (place, row) in enumerate(_read_objects(path)):
            record = row if isinstance(row, UserError) else row_or_error(self._record, number, place, row)
            if record is not None:
                yield record

    def _record(self, number: int, place: str, row: Any) -> Record | None:
        if (found := self.record(row, place)) is None:
            return None
        values, text = found
        return Record(str(row.get("id", number)), place, values, (text,))

    def record(self, row: Any, place: str) -> tuple[dict[str, Any], str] | None:
        """Return the values of a row's `Record` and its text; None to skip the row."""
        raise NotImplementedError

    def linked(self, entities: Sequence[Any], text: str, place: str, name: str) -> list[tuple[str, int, int]]:
        """Return name, start and end of the entities above the threshold; those without a score are above."""
        found = [(*linked_entity(item, text, place, name), *item[3:4]) for item in entities]
        return [
            (entity, start, end) for entity, (start, end), *score in found
            if entity and start < end and (not score or score[0] > self.threshold)
        ]


def _read_objects(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a JSON file: the items of an array, or the object or error of each line."""
    with open_text(path) as stream:
        is_array = stream.read(64).lstrip().startswith("[")
    if not is_array:
        yield from ((place, row_or_error(json_object, line, place)) for place, line in read_lines(path) if line.strip())
        return
    with reading(path), open_text(path) as stream:
        rows = json.load(stream)
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def linked_entity(item: Any, text: str, place: str, name: str) -> tuple[str, Span]:
    """Return name and span of an entity in its form as a list; raise UserError for another form."""
    if not isinstance(item, list) or len(item) < 3 or not all(type(score) in NUMBERS for score in item[3:4]):
        raise UserError(f"{place}: the field {name!r} has {str(item)[:60]}, not a list of name, start, end and score.")
    return str(item[0] or ""), span_of(item[1], item[2], text, place)


def span_of(start: Any, end: Any, text: str, place: str) -> Span:
    """Return a span, which may be empty; raise UserError if it is not one of the text."""
    if not (type(start) is type(end) is int and 0 <= start <= end <= len(text)):
        raise UserError(
            f"{place}: {start!r} to {end!r} is no span of its text of {len(text):,} characters; fix or remove the row."
        )
    return start, end


def mark_spans(text: str, spans: Sequence[tuple[Span, str]], mentions: Sequence[Mention]) -> tuple[str, Mentions]:
    """Insert `mark` and a space before each span, a space and `mark` after it, and move the mentions along.

    The official code of ERNIE moves the start of an entity by rules of its own, which are off by up to 4 characters at
    the marks; here a mention keeps its characters.
    """
    # At the same place a span ends before another begins.
    marks = sorted(
        place for (start, end), mark in spans for place in ((end, 0, f" {mark}"), (start, 1, f"{mark} "))
    )
    pieces, last = [], 0
    for place, _, mark in marks:
        pieces += [text[last:place], mark]
        last = place
    moved = tuple(
        Mention(
            mention.start + sum(len(mark) for place, _, mark in marks if place <= mention.start),
            mention.end + sum(len(mark) for place, _, mark in marks if place < mention.end), mention.entity,
        )
        for mention in mentions
    )
    return "".join([*pieces, text[last:]]), moved


def _fingerprint(constants: Constants) -> str:
    """Return a hash of the arrays."""
    facts = hashlib.sha256()
    for leaf in jax.tree.leaves(constants):
        facts.update(np.ascontiguousarray(leaf))
    return facts.hexdigest()


@dataclasses.dataclass(frozen=True)
class MarkedTask(ReadsEntities, PooledTask):
    """A task whose classifier reads a text with marked spans.

    The arrays of a row: input_ids, token_type_ids, attention_mask int32 [length]; label; and for a model that reads
    entities `entities` int32 [length], the entity of the mention that begins at each token, -1 for none.
    """

    entities_fingerprint: str = field("", weights=True)
    """Hash of the entities' names and vectors; set when training begins."""

    @property
    def padding(self) -> dict[str, int]:
        return super().padding | {"entities": NONE}

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        task = super().with_labels(records, names)
        if not self.model.entity_width:
            return task
        return dataclasses.replace(task, entities_fingerprint=_fingerprint(self.entity_table()))

    def spans(self, record: Record) -> list[tuple[Span, str]]:
        """Return the marked spans with their marks."""
        raise NotImplementedError

    def marked(self, record: Record) -> tuple[str, Mentions]:
        """Return the text with its marks, and the mentions in it."""
        mentions = [Mention(start, end, entity) for entity, start, end in record.values["entities"]]
        return mark_spans(record.values["text"], self.spans(record), mentions)

    def as_text(self, record: Record) -> tuple[str, str]:
        return self.marked(record)[0], ", ".join(self.label_names(record))

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        texts = [self.marked(record) for record in records]
        reads_entities, numbers = self.model.entity_width > 0, {}
        if reads_entities:
            numbers = {name: number for number, name in enumerate(self.entity_names())}
        room, examples = length - self.template.num_symbols(False), []
        encoded = tokenizer.encode_with_offsets([text for text, _ in texts])
        for number, (record, (_, mentions), (ids, offsets)) in enumerate(zip(records, texts, encoded, strict=True)):
            row = self.template.build(self.vocabulary, ids[:room])
            arrays = text_arrays(row) | {"label": self.label(record)}
            if reads_entities:
                entities = np.full(len(ids), NONE, np.int32)
                known = tuple(mention for mention in mentions if mention.entity in numbers)
                for token, name in first_tokens(offsets, known):
                    entities[token] = numbers[name]
                arrays["entities"] = np.full(len(row.input_ids), NONE, np.int32)
                arrays["entities"][row.part == 1] = entities[:room]
            examples.append(EncodedExample(number, arrays))
        return examples

    def synthetic(self, rows: int, length: int) -> Arrays:
        batch = super().synthetic(rows, length)
        return batch | ({"entities": np.zeros((rows, length), np.int32)} if self.model.entity_width else {})

    def inputs(self, example: Arrays) -> Inputs:
        return self.entity_inputs(example)

    def row_logits(self, params: Params, x: Float[Array, "batch texts hidden"]) -> Float[Array, "batch classes"]:
        return self.classify(params, x[:, 0])

    def prediction_constants(self) -> Constants:
        constants = self.entity_table()
        if constants and self.entities_fingerprint not in ("", _fingerprint(constants)):
            raise UserError(
                f"the vectors in {self.entities} have changed since the model was trained with them; bring the old "
                "ones back, or give their place with --objective.entities."
            )
        return constants

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        line, label = super().describe(batch, example, row)
        if "entities" not in example:
            return [line, label]
        entities = np.asarray(example["entities"][row])[: len(line.ids)]
        marks = ["span" if entity >= 0 else mark for entity, mark in zip(entities, line.marks, strict=True)]
        names = (f"entity {self.entity_name(entity)}" for entity in entities[entities >= 0])
        return [line._replace(marks=marks), *(Line(name, [], []) for name in names), label]
