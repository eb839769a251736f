"""Pretraining text with mentions of entities."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from jaxlm.data.base import RowFormat
from jaxlm.data.mentions import Mention, Mentions
from jaxlm.data.parts import Reader
from jaxlm.data.readers import Columns, Piece
from jaxlm.data.store import Store
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.knowledge.linker import Linker
from jaxlm.paths import file_state, reading
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

_SYNTHETIC_ENTITIES = 256
_SYNTHETIC_SHARE = 1 / 16


@dataclasses.dataclass(frozen=True)
class LinkedText(TextData):
    """Text whose mentions of entities are known, or found by a table of names; see `TextData`.

    Each token at which a mention begins has the mention's entity. The token store holds entities by their names, so
    that one store serves any knowledge graph (`--objective.entities`). The rows leave out entities that a graph lacks.
    """

    entities_field: str = "entities"
    """Name of the field of mentions in .jsonl: a list of {"start": 0, "end": 5, "id": "Q90"}, in characters."""
    entity_names: str = field("", resumable=True)
    """Table of names by which mentions are found instead, lines `entity<TAB>name<TAB>alias…`: at each word the longest
    name, in any case (see jaxlm/knowledge/linker.py)."""

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> TokenBatch:
        """Return full rows with a mention at one in 16 tokens; see `jaxlm.data.base.Data`."""
        batch, draw = super().synthetic(rows, row_format, vocabulary), np.random.default_rng(1)
        entities = draw.integers(0, _SYNTHETIC_ENTITIES, batch.tokens.shape, np.int32)
        return batch._replace(entities=np.where(draw.random(entities.shape) < _SYNTHETIC_SHARE, entities, -1))

    @property
    def reader(self) -> Reader:
        if not self.entity_names:
            return EntityReader(self.text_field, self.entities_field)
        with reading(self.entity_names):
            return LinkingReader(self.text_field, self.entity_names, json.dumps(file_state(self.entity_names)))

    def check_store(self, store: Store) -> None:
        if not store.has_entities:
            raise UserError(
                f"{self.source} has no mention of an entity; give .jsonl with a field {self.entities_field!r}, or a "
                "table of names that occur in it with --data.entity-names."
            )


@dataclasses.dataclass(frozen=True)
class EntityReader(Reader):
    """Reader of a column of mentions, which tables lack."""

    entities_field: str = "entities"
    """Name of the column."""
    has_mentions: ClassVar[bool] = True

    @property
    def columns(self) -> Columns:
        return super().columns._replace(optional=[self.entities_field])

    def mentions(self, values: Mapping[str, Any], text: str, place: str) -> Mentions:
        return read_mentions(values.get(self.entities_field), text, place, self.entities_field)


@dataclasses.dataclass(frozen=True)
class LinkingReader(Reader):
    """Reader that finds mentions by a table of names."""

    names: str = ""
    """The table."""
    state: str = ""
    """Its state, see `jaxlm.paths.file_state`."""
    has_mentions: ClassVar[bool] = True

    def read(self, source: str, start: int = 0, end: int | None = None) -> Iterator[Piece]:
        linker = _linker(self.names, self.state)
        for piece in super().read(source, start, end):
            yield piece._replace(mentions=tuple(linker.link(piece.text)))


@functools.lru_cache(maxsize=1)
def _linker(names: str, state: str) -> Linker:
    return Linker(names)


def read_mentions(value: Any, text: str, place: str, name: str) -> Mentions:
    """Return the mentions that a JSON object has in its field `name`: objects with `start`, `end` and `id`.

    Args:
        value: value of the field; None for none.
        text: the text. Offsets count its characters (Unicode code points).
        place: place of the object, for messages.
        name: name of the field, for messages.

    Raises:
        UserError: the value is anything else, or a span is empty or outside the text.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise UserError(f"{place}: the field {name!r} is not a list of mentions; each is an object {_FORM}.")
    return tuple(_mention(item, text, place, name) for item in value)


_FORM = '{"start": 0, "end": 5, "id": "Q90"}, in characters'


def _mention(item: Any, text: str, place: str, name: str) -> Mention:
    try:
        mention = Mention(item["start"], item["end"], str(item["id"]))
        is_span = type(mention.start) is type(mention.end) is int and 0 <= mention.start < mention.end <= len(text)
    except (KeyError, TypeError):
        is_span = False
    if not is_span:
        raise UserError(
            f"{place}: the field {name!r} has {str(item)[:80]}, which is no span of the text of {len(text):,} "
            f"characters; write it as {_FORM}."
        )
    return mention
