"""The vocabulary of a tokenizer: its size, special tokens, word starts and sentence ends.

This module does not import jax, so that processes that only tokenize start fast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.errors import UserError

SYMBOL_NAMES = {
    "pad": "[PAD]", "unk": "[UNK]", "bos": "<s>", "eos": "</s>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]",
}
"""Role → special token of vocabularies trained by jaxlm, in the order of their ids."""
SENTINELS = tuple(f"<extra_id_{k}>" for k in reversed(range(100)))
"""The sentinels that follow; `<extra_id_0>` has the highest id, as in T5."""


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Size, special tokens, word starts and sentence ends of a tokenizer.

    Attributes:
        size: number of ids, including special tokens.
        special: bool [size], true for control symbols and sentinels, not for [UNK].
        word_start: bool [size], true for tokens that start a word (for whole-word masking).
        sentence_end: bool [size], true for punctuation that ends a sentence.
        ngram_start: bool [size], true for tokens that start a word of an n-gram; None for those of `word_start`. In
            SentencePiece vocabularies, ALBERT's rule holds: digits, apostrophes, single punctuation marks and pieces
            with a letter beyond A to Z also start a word.
        pad, unk, cls, sep, mask, bos, eos: ids of special tokens; -1 for a missing one.
        sentinel: id of the first sentinel, `<extra_id_0>`; sentinel k has the id `sentinel + sentinel_step · k`.
        sentinel_step: -1 for T5's descending order, 1 for an ascending one.
        num_sentinels: number of sentinels.
        preserve_rows: whether an imported model keeps all rows of its embedding, even unused ones.
        symbols: name → id of every special token, including those of an objective ("[R]").
        separators: number of separators between two texts; 0 for that of the model's family.
        single, pair: special tokens around one text and two, for a decoder; empty for those of the model's family.
        name: name for error messages.
        num_bytes: int64 [size], UTF-8 bytes of the normalized text that each id stands for, 0 for special tokens and
            [UNK]; None in a stand-in.
        pieces: the piece of each id, as in the vocabulary file; empty in a stand-in.
        is_stand_in: whether the vocabulary is synthetic, with nothing but its size in common with the real one.
    """

    size: int
    special: np.ndarray
    word_start: np.ndarray
    sentence_end: np.ndarray
    ngram_start: np.ndarray | None = None
    pad: int = -1
    unk: int = -1
    cls: int = -1
    sep: int = -1
    mask: int = -1
    bos: int = -1
    eos: int = -1
    sentinel: int = -1
    sentinel_step: int = -1
    num_sentinels: int = 0
    preserve_rows: bool = False
    symbols: Mapping[str, int] = dataclasses.field(default_factory=dict)
    separators: int = 0
    single: str = ""
    pair: str = ""
    name: str = "the tokenizer"
    num_bytes: np.ndarray | None = dataclasses.field(default=None, repr=False)
    pieces: Sequence[str] = dataclasses.field(default=(), repr=False)
    is_stand_in: bool = False

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        values = [getattr(self, item.name) for item in dataclasses.fields(self)]
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else repr(v) for v in values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self._key == other._key

    def __hash__(self) -> int:  # jit reuses a compiled step for an equal vocabulary
        return hash(self._key)

    @functools.cached_property
    def random_ids(self) -> tuple[int, int]:
        """Range of the random replacements of masked-language modelling: first id, and last id + 1.

        As in BERT's original code, it includes the special tokens. A vocabulary with sentinels, which published
        vocabularies of masked models lack, uses `text_ids` instead.
        """
        return self.text_ids if self.num_sentinels else (0, self.size)

    @functools.cached_property
    def text_ids(self) -> tuple[int, int]:
        """Longest range of ids without special tokens and [UNK]: first id, and last id + 1."""
        is_symbol = self.special | (np.arange(self.size) == self.unk)
        edges = np.flatnonzero(np.diff(is_symbol, prepend=True, append=True))
        return max(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True), key=lambda run: run[1] - run[0])

    def require(self, *symbols: str, purpose: str) -> None:
        """Raise UserError unless every role in `symbols` ("mask", "sep", "sentinel", ...) has a token."""
        missing = [symbol for symbol in symbols if getattr(self, symbol) < 0]
        if missing:
            names = ", ".join(SYMBOL_NAMES.get(symbol, "<extra_id_0>") for symbol in missing)
            role = missing[0]
            named = "" if role == "sentinel" else f"name its token in tokenizer_config.json ({role}_token), "
            raise UserError(
                f"{self.name} has no {names}, which {purpose} needs; {named}choose a tokenizer that has it, or train "
                "one with `jaxlm tokenizer train`, which adds every symbol."
            )

    def id(self, symbol: str) -> int:
        """Return the id of the special token `symbol`, such as "[R]"; raise UserError if there is none."""
        if symbol not in self.symbols:
            raise UserError(
                f"{self.name} has no special token {symbol}; choose a tokenizer that has it, or train one with "
                f"`jaxlm tokenizer train --symbols '{symbol}'`."
            )
        return self.symbols[symbol]

    def rows(self, configured: int, multiple: int = 1) -> int:
        """Return the number of embedding rows.

        Args:
            configured: rows in the model's configuration. They are kept if they hold every id with fewer than 128 rows
                to spare, since published embeddings are often padded, or with `preserve_rows`.
            multiple: otherwise, the vocabulary size is rounded up to a multiple of this.
        """
        spare = configured - self.size
        if spare >= 0 and (spare < 128 or self.preserve_rows):
            return configured
        return -(-self.size // multiple) * multiple

    @classmethod
    def stand_in(cls, size: int, symbols: Sequence[str] = ()) -> Vocabulary:
        """Return a synthetic vocabulary for uses that need only shapes (plans, benchmarks, parameter counts).

        It has the layout of `jaxlm tokenizer train`: `SYMBOL_NAMES`, `SENTINELS`, then `symbols`, then text.
        """
        sentinels = SENTINELS[-min(len(SENTINELS), size - 16):] if size > 16 else ()
        names = (*SYMBOL_NAMES.values(), *sentinels, *symbols)
        special = (np.arange(size) < len(names)) & (np.arange(size) != 1)
        return cls(
            size=size, special=special, word_start=~special, sentence_end=np.zeros(size, bool),
            **{role: token_id for token_id, role in enumerate(SYMBOL_NAMES)},
            sentinel=6 + len(sentinels), num_sentinels=len(sentinels),
            symbols={name: token_id for token_id, name in enumerate(names)}, name=f"a stand-in vocabulary of {size}",
            is_stand_in=True,
        )
