"""Extension of a vocabulary by the words of a new text that cost the most pieces.

Old ids stay. Each kind of vocabulary gets a word so that its model finds it, not as an added token, which would also be
cut out of the inside of longer words:

* WordPiece takes the longest piece that matches, so a new word also changes longer words that begin with it.
* Unigram takes the path with the highest score, so a word gets the score of its old path and a small bonus for each
  old piece, so that it goes before a path with another new word.
* BPE joins pairs, so a word gets the merges that join its old pieces, and the pieces in between. They rank after all
  old merges: a text is cut as before, and then its pieces are joined.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from jaxlm.errors import UserError
from jaxlm.tokenizers.sentencepiece_json import SPACE
from jaxlm.tokenizers.tokenizer import Tokenizer, replace_surrogates

MIN_COUNT = 5
"""Smallest number of occurrences of a new word; a row that is trained less often stays the mean of its pieces."""
# Added to the score of each old piece of a word: far above rounding, far below what parts most other segmentations.
_BONUS = 0.01
_byte = re.compile(r"<0x([0-9A-F]{2})>")

Pieces = tuple[int, ...]


class Extension(NamedTuple):
    """A vocabulary with new words.

    Attributes:
        tokenizer: the tokenizer with the words.
        pieces: old ids of the pieces of each new id, in the order of the new ids.
        words: the words, as pieces of the vocabulary, those that cost most first.
    """

    tokenizer: Tokenizer
    pieces: tuple[Pieces, ...]
    words: tuple[str, ...]


class WordModel:
    """The words of texts, as the model of a tokenizer sees them, and their pieces.

    Words are normalized and carry their mark of a space. Those without a letter are left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the model of `tokenizer`."""
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.to_json(), ensure_ascii=False))
        self.content: dict[str, Any] = json.loads(self._backend.to_str())
        splits = [step for step in [self._backend.pre_tokenizer] if step]
        if not tokenizer.is_byte_level and self.content["model"]["type"] != "WordPiece":  # SentencePiece reads lines
            words = tokenizers.Regex(rf"{SPACE}?[\p{{L}}\p{{M}}\p{{N}}]+")
            splits.append(tokenizers.pre_tokenizers.Split(words, "isolated"))
        self._splitter = tokenizers.pre_tokenizers.Sequence(splits)

    def count(self, texts: Iterable[str]) -> collections.Counter[str]:
        """Count the words of texts."""
        counts: collections.Counter[str] = collections.Counter()
        for text in map(replace_surrogates, texts):
            text = self._backend.normalizer.normalize_str(text) if self._backend.normalizer else text
            for word, (start, end) in self._splitter.pre_tokenize_str(text):
                if word in counts or any(map(str.isalpha, text[start:end])):
                    counts[word] += 1
        return counts

    def pieces(self, word: str) -> tuple[tuple[str, ...], Pieces]:
        """Return the pieces of a word and their ids."""
        tokens = self._backend.model.tokenize(word)
        return tuple(token.value for token in tokens), tuple(token.id for token in tokens)

    def mean_pieces(self, counts: Mapping[str, int]) -> float:
        """Return the mean number of pieces of a counted word."""
        return sum(n * len(self.pieces(word)[1]) for word, n in counts.items()) / max(1, sum(counts.values()))


def changed_share(old: WordModel, new: WordModel, counts: Mapping[str, int]) -> float:
    """Return the share of counted words that have other pieces in `new` than in `old`."""
    changed = sum(n for word, n in counts.items() if old.pieces(word)[1] != new.pieces(word)[1])
    return changed / max(1, sum(counts.values()))


def extend_tokenizer(tokenizer: Tokenizer, counts: Mapping[str, int], num_words: int) -> Extension:
    """Add the words with the largest count · (pieces − 1).

    Words that occur fewer than `MIN_COUNT` times are left out, as are those with [UNK], whose row says nothing about
    them, and in a BPE those with characters spelled in bytes by name ("<0xE3>").

    A BPE also gets the pieces between a word and its old pieces. `counts` are those of `WordModel.count`.
    """
    old = WordModel(tokenizer)
    model, known = old.content["model"], {*map(tokenizer.piece, range(len(tokenizer)))}
    if model["type"] not in ("WordPiece", "Unigram", "BPE") or model.get("merges") == []:
        raise UserError(f"{tokenizer.vocabulary.name} has whole words or bytes and no pieces of words, so it cannot be "
                        "extended; choose a model with WordPiece, unigram or BPE.")
    is_bpe, suffix = model["type"] == "BPE", model.get("end_of_word_suffix") or ""
    found: dict[str, tuple[int, Sequence[str], Pieces]] = {}
    for word, count in counts.items():
        pieces, ids = old.pieces(word) if count >= MIN_COUNT else ((), ())
        is_spelled, word = not is_bpe or "".join(pieces) == word + suffix, word + suffix
        if len(ids) > 1 and tokenizer.vocabulary.unk not in ids and is_spelled and word not in known:
            found[word] = count * (len(ids) - 1), pieces, ids
    words = sorted(found, key=lambda word: (-found[word][0], word))[:num_words]
    if not words:
        raise UserError(f"the text has no word of several pieces that occurs {MIN_COUNT} times, so there is nothing to "
                        "add; give a larger text with --data.source.")
    new = {word: found[word][2] for word in words}
    if model["type"] != "Unigram":  # `tokenizers` would move added tokens that the model lacks behind the new words
        model["vocab"] |= {token["content"]: token["id"] for token in old.content["added_tokens"]}
    if is_bpe:
        new = _add_bpe(model, len(tokenizer), {word: found[word][1:] for word in words})
    elif model["type"] == "WordPiece":
        model["vocab"] |= {word: len(tokenizer) + i for i, word in enumerate(words)}
    else:
        _add_unigram(model["vocab"], new, [tokenizer.piece(i) for i in range(len(model["vocab"]), len(tokenizer))])
    return Extension(tokenizer.with_json(old.content), tuple(new.values()), tuple(words))


def _add_unigram(vocab: list[list[Any]], words: Mapping[str, Pieces], added_tokens: Sequence[str]) -> None:
    """Append words, with the ids of their old pieces, to the list of pieces and scores of a `tokenizer.json`.

    The list has a place for every id, so first for added tokens, which the model itself must not find.
    """
    lowest = min(score for _, score in vocab)
    # `tokenizers` gives a character that it spells in bytes the score of an unknown one, 10 below the lowest (its
    # K_UNK_PENALTY). The bytes 0x80 to 0xBF continue a character.
    score = [lowest - 10 if (byte := _byte.fullmatch(piece)) and not "80" <= byte[1] < "C0" else
             0.0 if byte else score for piece, score in vocab]
    vocab += [[name, lowest * (len(name) + 1)] for name in added_tokens]
    vocab += [[word, sum(score[i] + _BONUS for i in ids)] for word, ids in words.items()]


def _add_bpe(model: dict[str, Any], size: int, words: Mapping[str, tuple[Sequence[str], Pieces]]) -> dict[str, Pieces]:
    """Add merges and pieces to the model of a `tokenizer.json`.

    `words` maps a new word to its old pieces and their ids; `size` is the first new id.

    Returns:
        New piece → ids of its old pieces, in the order of the new ids.
    """
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    parts = {word: list(pieces) for word, (pieces, _) in words.items()}
    old_pieces = {piece: (i,) for pieces, ids in words.values() for piece, i in zip(pieces, ids, strict=True)}
    places = collections.defaultdict(set)  # pair → words that have it
    for word, pieces in parts.items():
        for pair in itertools.pairwise(pieces):
            places[pair].add(word)
    new: dict[str, Pieces] = {}

    def entry(pair: tuple[str, str]) -> tuple[int, Any, tuple[str, str]]:
        """Order by frequency, then by the pair, the largest first."""
        return -len(places[pair]), [[*(-ord(char) for char in piece), 1] for piece in pair], pair

    frequent = [entry(pair) for pair in places]
    heapq.heapify(frequent)
    while frequent:  # as in the training of a BPE, but every word counts once, which saves pieces
        count, _, pair = heapq.heappop(frequent)
        if not count or count != -len(places[pair]):  # its number has changed since
            continue
        ranks[pair], piece = len(ranks), "".join(pair)
        old_pieces[piece] = old_pieces[pair[0]] + old_pieces[pair[1]]
        if piece not in model["vocab"]:
            model["vocab"][piece], new[piece] = size + len(new), old_pieces[piece]
        changed = set()
        for word in list(places[pair]):
            changed.update(itertools.pairwise(parts[word]))
            for other in itertools.pairwise(parts[word]):
                places[other].discard(word)
            for other in itertools.pairwise(_merge(parts[word], ranks)):
                places[other].add(word)
            changed.update(itertools.pairwise(parts[word]))
        for other in changed:
            heapq.heappush(frequent, entry(other))
    model["merges"] = [list(pair) for pair in ranks]
    return new


def _merge(pieces: list[str], ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    """Return the pieces after all merges, the lowest rank first."""
    while found := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(pieces)) if pair in ranks]:
        i = min(found)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces
