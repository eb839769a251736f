"""Pretraining text with mentions of entities."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator

import numpy as np

from jaxlm.data.base import RowFormat
from jaxlm.data.parts import Reader
from jaxlm.data.readers import Piece
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
            return Reader(self.text_field, self.entities_field)
        with reading(self.entity_names):
            return LinkingReader(self.text_field, "", self.entity_names, json.dumps(file_state(self.entity_names)))

    def check_store(self, store: Store) -> None:
        if not store.has_entities:
            raise UserError(
                f"{self.source} has no mention of an entity; give .jsonl with a field {self.entities_field!r}, or a "
                "table of names that occur in it with --data.entity-names."
            )


@dataclasses.dataclass(frozen=True)
class LinkingReader(Reader):
    """Reader that finds mentions by a table of names."""

    names: str = ""
    """The table."""
    state: str = ""
    """Its state, see `jaxlm.paths.file_state`."""

    def read(self, source: str, start: int = 0, end: int | None = None) -> Iterator[Piece]:
        linker = _linker(self.names, self.state)
        for piece in super().read(source, start, end):
            yield piece._replace(mentions=tuple(linker.link(piece.text)))


@functools.lru_cache(maxsize=1)
def _linker(names: str, state: str) -> Linker:
    return Linker(names)
