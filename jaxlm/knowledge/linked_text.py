"""Pretraining text with mentions of entities."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np

from jaxlm.data.base import RowFormat
from jaxlm.data.corpus import Corpus, open_corpus
from jaxlm.data.fingerprint import Survey, file_state
from jaxlm.data.readers import Piece
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.knowledge.linker import Linker
from jaxlm.paths import reading
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report, TokenBatch

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

    def _corpus(self) -> Corpus:
        if not self.entity_names:
            return open_corpus(self.source, self.text_field, self.entities_field)
        corpus = super()._corpus()
        with reading(self.entity_names):
            state = json.dumps([self.entity_names, *file_state(self.entity_names)])

        def pieces() -> Iterator[Piece]:
            linker = Linker(self.entity_names)  # read only if the text is
            for piece in corpus.pieces():
                yield piece._replace(mentions=tuple(linker.link(piece.text)))

        return dataclasses.replace(corpus, parts=(pieces,), stats=(*corpus.stats, state))

    def _survey(self, corpus: Corpus, report: Report) -> Survey:
        text = super()._survey(corpus, report)
        if not text.mentions:
            raise UserError(
                f"{self.source} has no mention of an entity; give .jsonl with a field {self.entities_field!r}, or a "
                "table of names that occur in it with --data.entity-names."
            )
        return text
