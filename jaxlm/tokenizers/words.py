"""Encoding of published SentencePiece models word by word: each word is given to `tokenizers`, which is slow, once.

The ids of a text are those of its words, one after the other, if

* no piece has a space in it but at its beginning, where each word has one, and a space alone is a piece: so no piece
  crosses the beginning of a word, and no unknown characters are joined across it;
* the scores are multiples of a power of 2 such that `tokenizers` adds them up in float64 without rounding: so what
  stands before a word decides no tie. BPE adds up no scores;
* normalization does not reach across spaces. Its steps in `sentencepiece_json` look at the next character, and at the
  beginning and the end of a text. So a word is encoded between two others, whose ids have to stay as they are, and its
  first and last characters have to be ones that those steps leave alone.

Other texts and those with other words are encoded as a whole.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.tokenizers.sentencepiece_json import SPACE, to_tokenizer_json

_KEPT = 1 << 18  # words, in some 50 MB
_NEW = 0.5  # share of new words in the characters of texts above which these are encoded as a whole
_TOGETHER = 1024  # new words in a text
_UNKNOWN = 10  # what `tokenizers` subtracts from the lowest score for an unknown character
_SPACES = "\n\t\r\u00a0\u2009\u202f\u3000"
"""Characters that most models make a space."""
_JOINING = ("Lm", "Sk")
"""Unicode categories, beside marks, with characters that join the one before them."""


def longest_text(proto: Any) -> float:
    """Return the number of characters up to which the ids of a text are those of its words; 0 for none."""
    names = [piece.piece for piece in proto.pieces]
    is_bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
    has_symbols = any(piece.type == piece.USER_DEFINED for piece in proto.pieces)
    has_inner = any(
        " " in name or SPACE in name[1:] or (len(name) > 1 and not set(_SPACES).isdisjoint(name)) for name in names
    )
    if has_inner or SPACE not in names or not proto.normalizer_spec.add_dummy_prefix or (is_bpe and has_symbols):
        return 0
    if is_bpe:
        return np.inf
    scores = np.array([score for _, score in to_tokenizer_json(proto)["model"]["vocab"]])
    bits = next((k for k in range(53) if not (scores * 2.0**k % 1).any()), 53)
    charsmap = proto.normalizer_spec.precompiled_charsmap
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return 2.0 ** (53 - bits) / (abs(scores).max() + _UNKNOWN) / max(1, *map(len, replacements))


class WordEncoder:
    """Encoder of texts by their words, of which it keeps the ids."""

    def __init__(
        self, encode: Callable[[Sequence[str]], list[np.ndarray]], pieces: Sequence[str], longest: float
    ) -> None:
        """Store the encoder of whole texts, the pieces by id, and the result of `longest_text`."""
        self._encode, self._longest = encode, longest
        self._begins = np.array([piece.startswith(SPACE) for piece in pieces])
        probes = ["a", "a a", "  a  a  ", *(f"a{char}a" for char in _SPACES)]
        self._other, two, apart, *joined = (ids.tobytes() for ids in encode(probes))
        self._none = b"" if apart == two else None  # what stands between two spaces
        self._spaces = [char for char, ids in zip(_SPACES, joined, strict=True) if ids == two]
        self._ids: dict[str, bytes | None] = {}  # of words; None if theirs may be others in a text

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text: int32 [tokens]."""
        if len(self._ids) > _KEPT or not self._ids:
            self._ids = {"": self._none}
        kept = self._ids  # another thread may begin anew
        words = [self._split(text) if len(text) <= self._longest else None for text in texts]
        new = [word for word in set(itertools.chain.from_iterable(filter(None, words))) if word not in kept]
        if sum(map(len, new)) > _NEW * sum(map(len, texts)):
            return self._encode(texts)
        usual = {word for word in new if word.replace("\n", "").isprintable()}
        kept.update(self._new_words(list(usual), _TOGETHER))
        kept.update(self._new_words([word for word in new if word not in usual], 1))
        known = [[None] if own is None else [kept[word] for word in own] for own in words]
        whole = iter(self._encode([text for text, ids in zip(texts, known, strict=True) if None in ids]))
        return [next(whole) if None in ids else np.frombuffer(b"".join(ids), np.int32) for ids in known]

    def _split(self, text: str) -> list[str]:
        for char in self._spaces:
            text = text.replace(char, " ")
        return text.split(" ")

    def _new_words(self, words: Sequence[str], count: int) -> Iterator[tuple[str, bytes | None]]:
        """Yield words with their ids; `count` of them are encoded in one text."""
        groups = [words[start : start + count] for start in range(0, len(words), count)]
        texts = [f"a {' a '.join(group)} a" for group in groups]
        for group, text, ids in zip(groups, texts, self._encode(texts), strict=True):
            places = np.append(np.flatnonzero(self._begins[ids]), len(ids)) * ids.itemsize
            data = ids.tobytes()
            found = [data[start:end] for start, end in itertools.pairwise(places.tolist())]
            is_alike = [own == self._other for own in found]  # with a word "a" alone between the others
            expected = [True, *itertools.chain.from_iterable((word == "a", True) for word in group)]
            if len(text) <= self._longest and is_alike == expected:
                yield from zip(group, (own if _is_apart(word) else None for word, own in
                                       zip(group, found[1::2], strict=True)), strict=True)
            elif count > 1:
                yield from self._new_words(group, count // 32)
            else:
                yield group[0], None


def _is_apart(word: str) -> bool:
    """Return whether no step of the normalization looks from the word at a space, or end of a text, around it."""
    word = word.replace("\n", "-")  # a line feed joins no character
    if word.isascii() and word.isprintable():
        return True
    first, last = map(unicodedata.category, (word[0], word[-1]))
    return SPACE not in word and last[0] not in "CZ" and first[0] not in "CMZ" and first not in _JOINING
