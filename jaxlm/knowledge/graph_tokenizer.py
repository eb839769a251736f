"""Tokenizer of a knowledge graph, in which each piece is the whole name of an entity or a relation.

Ids 0, 1, … are the entities; the relations follow as special tokens in angle brackets, then [UNK].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from jaxlm.errors import UserError
from jaxlm.tokenizers.files import json_definition
from jaxlm.tokenizers.sentencepiece_json import added_token
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import SYMBOL_NAMES, Vocabulary


class GraphSize(NamedTuple):
    """Number of entities and of relations of a knowledge graph."""

    entities: int
    relations: int

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Self:
        """Return the size of the graph of a `graph_tokenizer`."""
        relations = int(vocabulary.special.sum())
        return cls(vocabulary.size - relations - 1, relations)


def graph_tokenizer(entities: Sequence[str], relations: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of these names."""
    if not entities or not relations:
        raise UserError("a knowledge graph needs entities and relations, and there are none; check --data.source.")
    special = [f"<{name}>" for name in relations]
    vocab: dict[str, int] = {}
    for piece in (*entities, *special, SYMBOL_NAMES["unk"]):
        if piece in vocab:
            raise UserError(f"the name {piece!r} stands for two things; an entity must not be named like a relation in "
                            f"angle brackets or like {SYMBOL_NAMES['unk']}.")
        vocab[piece] = len(vocab)
    return Tokenizer(json_definition(
        {
            "version": "1.0", "normalizer": None, "pre_tokenizer": None, "decoder": None,
            "added_tokens": [added_token(vocab[piece], piece) for piece in special],
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": SYMBOL_NAMES["unk"]},
        },
        {"unk": SYMBOL_NAMES["unk"]}, f"the vocabulary of {len(entities):,} entities and {len(relations):,} relations",
    ))


def graph_names(vocabulary: Vocabulary) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the entities and of the relations, in the order of their ids."""
    size = GraphSize.of(vocabulary)
    relations = vocabulary.pieces[size.entities : size.entities + size.relations]
    return tuple(vocabulary.pieces[: size.entities]), tuple(piece[1:-1] for piece in relations)
