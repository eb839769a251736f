"""What a model family puts around its texts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxlm.tokenizers.vocabulary import Vocabulary


class Row(NamedTuple):
    """One or two texts with the symbols around them.

    input_ids, segments: int32 [length]. part: int32 [length], 1 at tokens of the first text, 2 at those of the second,
    0 at symbols.
    """

    input_ids: Int[np.ndarray, " length"]
    segments: Int[np.ndarray, " length"]
    part: Int[np.ndarray, " length"]


@dataclasses.dataclass(frozen=True)
class Template:
    """What a model family expects around its texts.

    single, pair: parts separated by spaces, each a role of the vocabulary ("cls"), a symbol by name ("[START]") or a
        text ($A, $B), with ":" and its segment id if that is not 0; pair is "cls $A sep $B:1 sep:1" for BERT. Empty:
        nothing stands around a text.
    inputs: names of the arrays that the model takes.
    needs: roles that the tokenizer must have.
    padding_side: "left" for a model whose [CLS] stands at the end.
    """

    single: str = ""
    pair: str = ""
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    needs: tuple[str, ...] = ()
    padding_side: str = "right"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the symbols that no role has."""
        return tuple(dict.fromkeys(name for name, _ in parts(self.pair) if name.startswith("[")))

    def num_symbols(self, pair: bool) -> int:
        """How many symbols stand around one text, or two."""
        return sum(not name.startswith("$") for name, _ in parts(self.pair if pair else self.single))

    def build(self, vocabulary: Vocabulary, first: np.ndarray, second: np.ndarray | None = None) -> Row:
        """The row of one text, or of two, given their ids."""
        pieces = []
        for name, segment in parts((self.single or "$A") if second is None else self.pair):
            if name.startswith("$"):
                ids, part = (first, 1) if name == "$A" else (second, 2)
            else:
                ids, part = np.array([symbol_id(vocabulary, name)]), 0
            pieces.append((np.asarray(ids), np.full(len(ids), segment), np.full(len(ids), part)))
        return Row(*(np.concatenate(arrays).astype(np.int32) for arrays in zip(*pieces, strict=True)))


def parts(sequence: str) -> list[tuple[str, int]]:
    """(name, segment id) of each part of `single` or `pair`."""
    split = (part.partition(":") for part in sequence.split())
    return [(name, int(segment or 0)) for name, _, segment in split]


def symbol_id(vocabulary: Vocabulary, name: str) -> int:
    """The id of a role ("cls") or of a symbol by name ("[START]"). UserError where there is none."""
    if name.startswith("["):
        return vocabulary.id(name)
    vocabulary.require(name, purpose="a row of this model")
    return getattr(vocabulary, name)
