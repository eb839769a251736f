"""[UNK] in tokenized text: its share, and the words that became it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import Tokenizer

NUM_WORDS = 5
"""Largest number of words that are shown, and of texts that are searched for them."""


def unknown_words(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return different words, or parts of words, that become [UNK] in the first texts."""
    words: dict[str, None] = {}
    for text in itertools.islice(texts, NUM_WORDS):
        ids, offsets = tokenizer.encode_with_offsets([text])[0]
        words |= dict.fromkeys(text[start:end].strip()[:30] for start, end in offsets[ids == tokenizer.vocabulary.unk])
    return list(words)[:NUM_WORDS]


def describe_unknown(counts: np.ndarray, unk: int, words: Sequence[str], source: str) -> str:
    """Return the share of [UNK] for a summary, above 5 % with examples.

    It is empty without tokens, and for a vocabulary without [UNK].
    """
    if unk < 0 or not counts.any():
        return ""
    share = counts[unk] / counts.sum()
    such = f", such as {', '.join(map(repr, words))}" if words else ""
    if share == 1:
        raise UserError(f"{source}: every token is [UNK]{such}; choose a tokenizer or a model of this language.")
    remark = f"{such}: the vocabulary does not suit this text" if share > 0.05 else ""
    return f"{share:.1%} of the tokens are [UNK]{remark}"


def summarize_unknown(tokenizer: Tokenizer, rows: Sequence[tuple[np.ndarray, Sequence[str]]]) -> str:
    """Return `describe_unknown` of rows of a task: the ids of each, of any shape, and the texts that they encode."""
    v, ids = tokenizer.vocabulary, np.concatenate([np.zeros(0, np.int32), *(ids.ravel() for ids, _ in rows)])
    counts = np.where(v.special, 0, np.bincount(ids, minlength=v.size))
    texts = (text for row, row_texts in rows if v.unk in row for text in row_texts)
    return describe_unknown(counts, v.unk, unknown_words(tokenizer, texts), "the rows")
