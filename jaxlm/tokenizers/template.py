"""Templates: the special tokens that a model family puts around one text or two."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxlm.tokenizers.vocabulary import Vocabulary


class EncodedText(NamedTuple):
    """One or two texts with their special tokens.

    Attributes:
        input_ids: token ids.
        segments: segment ids.
        part: 1 for tokens of the first text, 2 for those of the second, 0 for special tokens.
    """

    input_ids: Int[np.ndarray, " length"]
    segments: Int[np.ndarray, " length"]
    part: Int[np.ndarray, " length"]


@dataclasses.dataclass(frozen=True)
class Template:
    """Special tokens around the texts of a model family.

    Attributes:
        single: template of one text. Parts are separated by spaces; each is a role of the vocabulary ("cls"), a special
            token by name ("[START]") or id ("#0") or a text ($A, $B), with ":" and its segment id unless that is 0.
            Empty for no special tokens.
        pair: template of two texts; "cls $A sep $B:1 sep:1" for BERT.
        inputs: names of the model's input arrays.
        needs: roles that the tokenizer must have.
        padding_side: "right", or "left" for a model with [CLS] at the end.
        is_default: whether the tokenizer's own special tokens, if it has a template, stand in place of these.
    """

    single: str = ""
    pair: str = ""
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    needs: tuple[str, ...] = ()
    padding_side: str = "right"
    is_default: bool = False

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the special tokens without a role."""
        return tuple(dict.fromkeys(name for name, _ in parts(self.pair) if name.startswith("[")))

    def for_vocabulary(self, vocabulary: Vocabulary | None) -> Template:
        """Return the template with as many separators after the first of two texts as the tokenizer's own has.

        Two are RoBERTa's, which has no segments: a BERT with XLM-R's vocabulary reads both texts as the first segment.
        The template of a decoder without one is the tokenizer's, where that adds special tokens; see also `is_default`.
        """
        if vocabulary and vocabulary.single and (self.is_default or not self.single):
            return dataclasses.replace(self, single=vocabulary.single, pair=vocabulary.pair, needs=())
        count = vocabulary.separators if vocabulary else 0
        pair = self.pair.replace("$A sep sep", "$A sep").replace("$A sep", "$A" + " sep" * count)
        pair = pair.replace(":1", "") if count == 2 else pair
        return dataclasses.replace(self, pair=pair) if count else self

    def num_symbols(self, pair: bool) -> int:
        """Return the number of special tokens around one text, or around two."""
        return sum(not name.startswith("$") for name, _ in parts(self.pair if pair else self.single))

    def before(self, vocabulary: Vocabulary) -> list[int]:
        """Return the ids of the special tokens before a text."""
        names = itertools.takewhile(lambda name: not name.startswith("$"), (name for name, _ in parts(self.single)))
        return [symbol_id(vocabulary, name) for name in names]

    def build(self, vocabulary: Vocabulary, first: np.ndarray, second: np.ndarray | None = None) -> EncodedText:
        """Return the row of one text, or of two, from their ids."""
        pieces = []
        for name, segment in parts((self.single or "$A") if second is None else self.pair):
            if name.startswith("$"):
                ids, part = (first, 1) if name == "$A" else (second, 2)
            else:
                ids, part = np.array([symbol_id(vocabulary, name)]), 0
            pieces.append((np.asarray(ids), np.full(len(ids), segment), np.full(len(ids), part)))
        return EncodedText(*(np.concatenate(arrays).astype(np.int32) for arrays in zip(*pieces, strict=True)))


def parts(sequence: str) -> list[tuple[str, int]]:
    """Split `single` or `pair` into (name, segment id)."""
    split = (part.partition(":") for part in sequence.split())
    return [(name, int(segment or 0)) for name, _, segment in split]


def symbol_id(vocabulary: Vocabulary, name: str) -> int:
    """Return the id of a role ("cls") or of a special token ("[START]"); raise UserError if there is none."""
    if name.startswith("["):
        return vocabulary.id(name)
    if name.startswith("#"):
        return int(name[1:])
    vocabulary.require(name, purpose="a row of this model")
    return getattr(vocabulary, name)
