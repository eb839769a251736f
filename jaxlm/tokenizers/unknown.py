"""[UNK] and bytes of characters in tokenized text: their shares, and the words that became [UNK]."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlm.errors import UserError
from jaxlm.tokenizers.files import byte_of_char
from jaxlm.tokenizers.tokenizer import Tokenizer

NUM_WORDS = 5
"""Largest number of words that are shown, and of texts that are searched for them."""


MOST = 0.05
"""Share of [UNK], or of bytes, above which a vocabulary does not suit a text."""


@functools.lru_cache(maxsize=2)
def byte_pieces(tokenizer: Tokenizer) -> np.ndarray:
    """Return the mask of the ids that are parts of characters, by which text is spelt in bytes: bool [vocabulary].

    They are the bytes above 127 of SentencePiece's byte fallback, and incomplete UTF-8 in a byte-level BPE. There are
    none in a vocabulary of bytes alone, where they are no fallback.
    """
    pieces = [piece if not special else "" for piece, special in
              zip(tokenizer.vocabulary.pieces, tokenizer.vocabulary.special, strict=True)]
    if not tokenizer.is_byte_level:
        return np.array([bool(re.fullmatch("<0x[89A-F][0-9A-F]>", piece)) for piece in pieces])
    table, is_part = byte_of_char(), np.zeros(len(pieces), bool)
    for number, piece in enumerate(pieces if max(map(len, pieces)) > 1 else ()):
        try:
            bytes(table.get(char, 0) for char in piece).decode()
        except UnicodeDecodeError:
            is_part[number] = True
    return is_part


def describe_bytes(counts: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return a remark about tokens that are bytes of characters, of the count of each id; "" up to `MOST` of them."""
    share = counts[byte_pieces(tokenizer)].sum() / max(1, counts.sum())
    what = "bytes of characters that the vocabulary lacks, which does not suit this text"
    return f"{share:.1%} of the tokens are {what}" if share > MOST else ""


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

    Args:
        counts: count of each id in the text.
        unk: id of [UNK], or -1.
        words: result of `unknown_words`.
        source: name of the text.

    Raises:
        UserError: every token is [UNK].
    """
    if unk < 0 or not counts.any():
        return ""
    share = counts[unk] / counts.sum()
    such = f", such as {', '.join(map(repr, words))}" if words else ""
    if share == 1:
        raise UserError(f"{source}: every token is [UNK]{such}; choose a tokenizer or a model of this language.")
    remark = f"{such}: the vocabulary does not suit this text" if share > MOST else ""
    return f"{share:.1%} of the tokens are [UNK]{remark}"


def summarize_unknown(tokenizer: Tokenizer, rows: Sequence[tuple[np.ndarray, Sequence[str]]]) -> str:
    """Return the remarks about rows of a task, given the ids of each, of any shape, and the texts that they encode."""
    v, ids = tokenizer.vocabulary, np.concatenate([np.zeros(0, np.int32), *(ids.ravel() for ids, _ in rows)])
    counts = np.where(v.special, 0, np.bincount(ids, minlength=v.size))
    texts = (text for row, row_texts in rows if v.unk in row for text in row_texts)
    unknown = describe_unknown(counts, v.unk, unknown_words(tokenizer, texts), "the rows")
    return "; ".join(filter(None, [unknown, describe_bytes(counts, tokenizer)]))
