"""Vocabulary training: SentencePiece, byte-level BPE, bytes or words, with the special tokens of every objective."""

from __future__ import annotations

import collections
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import sentencepiece
import tokenizers

from jaxlm.errors import UserError
from jaxlm.tokenizers import files, sentencepiece_json
from jaxlm.tokenizers.files import byte_of_char
from jaxlm.tokenizers.normalizer import NORMALIZERS, normalize
from jaxlm.tokenizers.tokenizer import Tokenizer, replace_surrogates
from jaxlm.tokenizers.vocabulary import SENTINELS, SYMBOL_NAMES

Kind = Literal["unigram", "bpe", "byte-bpe", "bytes", "words"]
Normalization = Literal["nmt_nfkc", "identity"]
CHARACTER_COVERAGE = 0.9995
"""Share of the text's characters that get a piece; bytes spell the others."""
# Ids 0 to 3 of byte-level BPE, as in RoBERTa (Liu et al. 2019), where <mask> is the last id.
_BYTE_BPE_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
# Every vocabulary has these characters, so that it can spell the name of a special token in a text.
_ASCII = "".join(map(chr, range(33, 127))) + sentencepiece_json.SPACE
# The name of a control symbol in the training text ends a piece and is never part of one.
_BOUNDARY = SYMBOL_NAMES["pad"]
# Excluded from the alphabet: the space, whose mark is in it, and characters that SentencePiece reserves or rejects.
_NO_PIECE = frozenset(" \t\n\0\u2585") | frozenset(map(chr, range(0xD800, 0xE000)))
# SentencePiece joins full stops that belong to a script to the words before them, so they change places with others.
_STOPS, _PARTNERS = "۔։።፧။។།༎", "".join(map(chr, range(0xE000, 0xE008)))
_FULL_STOPS = str.maketrans(_STOPS + _PARTNERS, _PARTNERS + _STOPS)
_CHUNK = 2048
# GPT-2's words, but combining marks and joiners stay with their letters and symbols: many scripts spell vowels so.
_BYTE_BPE_WORD = (r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}\p{M}\x{200C}\x{200D}]+| ?\p{N}+|"
                  r" ?[^\s\p{L}\p{M}\p{N}][^\s\p{L}\p{N}]*|\s+(?!\S)|\s+")
_WORDS = tokenizers.pre_tokenizers.BertPreTokenizer()  # at spaces and around each punctuation mark
MOST_WORDS = 20_000_000
"""Largest number of words that are counted at a time (word2vec.c: 21 million)."""
# Unigram training starts with this many candidates per piece. SentencePiece's default of a million takes four times as
# long for 8,192 pieces and 20 MB, and encodes similar text in 0.1 % fewer tokens at best.
_SEEDS = 8


def train_tokenizer(
    texts: Iterable[str] | Mapping[str, float],
    folder: str | os.PathLike[str],
    *,
    kind: Kind = "unigram",
    vocab_size: int = 8192,
    normalization: Normalization = "nmt_nfkc",
    symbols: Sequence[str] = (),
) -> Tokenizer:
    """Train a vocabulary and save it in `folder`, as `Tokenizer.save` does.

    The same texts and settings give the same model, byte for byte.

    Args:
        texts: documents or pieces of them. They are held in memory, so sample some ten megabytes of a large corpus
            (`jaxlm.data.parts.sample`). Or, for "words" alone, the counts of words (see `count_words`).
        folder: folder to write.
        kind: "unigram" or "bpe", both by SentencePiece; "byte-bpe", as in GPT-2 and RoBERTa, but with the combining
            marks of a word in it; "bytes", single bytes (258 ids); or "words", the most frequent words and punctuation
            marks (all others are [UNK]).
        vocab_size: total number of ids: 7 special tokens, 100 sentinels, 256 bytes, and the pieces of the text. A text
            that has fewer pieces gives a smaller vocabulary.
        normalization: "nmt_nfkc" (see `normalizer.normalize`) or "identity".
        symbols: names of further special tokens that an objective needs, such as "[R]".

    Raises:
        UserError: there is no text, or the special tokens, bytes and characters alone need a larger vocabulary.
    """
    if plain := [name for name in symbols if not re.fullmatch(r"\[[^\s\[\]]+\]|<[^\s<>]+>", name)]:
        raise UserError(f"the special token {plain[0]!r} has no brackets; write it like [R] or <r>.")
    if kind == "words":
        chunks = texts if isinstance(texts, Mapping) else count_words(texts, normalization)
    else:
        chunks = list(_chunks(_normalized(texts, normalization), keep_lines=kind in ("byte-bpe", "bytes")))
    if not chunks:
        raise UserError("there is no text to train a tokenizer on; check the source.")
    if kind in ("unigram", "bpe"):
        definition = _train_sentencepiece(chunks, kind, vocab_size, normalization, symbols)
    else:
        train = {"byte-bpe": _train_byte_bpe, "bytes": _byte_vocabulary, "words": _train_words}[kind]
        steps = None if normalization == "identity" else {"type": "Sequence", "normalizers": NORMALIZERS}
        definition = train(chunks, vocab_size, steps, symbols)
    tokenizer = Tokenizer(definition)
    tokenizer.save(folder)
    return tokenizer


def count_words(texts: Iterable[str], normalization: Normalization) -> collections.Counter[str]:
    """Return the counts of the words and punctuation marks, of which rare ones are dropped above MOST_WORDS."""
    counts, least = collections.Counter(), 1
    for chunk in _chunks(_normalized(texts, normalization), keep_lines=False):
        counts.update(word for word, _ in _WORDS.pre_tokenize_str(chunk))
        least = drop_rare_words(counts, least)
    return counts


def drop_rare_words(counts: collections.Counter[str], least: int) -> int:
    """Drop the words with counts up to `least`, then `least` + 1 and so on, until there are at most MOST_WORDS.

    Returns:
        The next `least`, as in the ReduceVocab of word2vec.c.
    """
    while len(counts) > MOST_WORDS:
        for word in [word for word, count in counts.items() if count <= least]:
            del counts[word]
        least += 1
    return least


def _normalized(texts: Iterable[str], normalization: Normalization) -> Iterable[str]:
    texts = map(replace_surrogates, texts)
    return texts if normalization == "identity" else map(normalize, texts)


def _chunks(texts: Iterable[str], *, keep_lines: bool) -> Iterator[str]:
    """Cut texts into chunks of at most _CHUNK characters, preferably before a space, and skip blank ones.

    Without `keep_lines` every line is cut separately, and each cut drops its space, because SentencePiece's trainer
    prepends a mark to every line.
    """
    for text in texts:
        for line in [text] if keep_lines else text.split("\n"):
            start = 0
            while start < len(line):
                cut = len(line)
                if cut - start > _CHUNK:
                    cut = line.rfind(" ", start + 1, start + _CHUNK)
                    cut = cut if cut > start else start + _CHUNK
                if line[start:cut].strip(" \t\0"):
                    yield line[start:cut]
                start = cut + (not keep_lines and line[cut : cut + 1] == " ")


def _train_byte_bpe(
    chunks: list[str], vocab_size: int, normalizer: dict[str, Any] | None, symbols: Sequence[str]
) -> files.Definition:
    """Train with RoBERTa's layout: four special tokens, 256 bytes, merged pieces, other special tokens, <mask>."""
    last = [name for name in dict.fromkeys((*SENTINELS, *symbols)) if name not in (*_BYTE_BPE_FIRST, "<mask>")]
    last.append("<mask>")
    _require_size(vocab_size, len(_BYTE_BPE_FIRST) + len(last) + 256, "special tokens and bytes")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(_BYTE_BPE_WORD), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(last), special_tokens=list(_BYTE_BPE_FIRST), show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    model.train_from_iterator((chunk.encode("utf-8", "replace").decode() for chunk in chunks), trainer)
    content = json.loads(model.to_str())
    trained = content["model"]
    vocab = trained["vocab"] | {name: len(trained["vocab"]) + i for i, name in enumerate(last)}
    special = [*_BYTE_BPE_FIRST, *last]
    return files.byte_bpe(
        vocab, trained["merges"], special, files.guess_symbols(special), f"the byte-bpe vocabulary of {len(vocab)}",
        normalizer=normalizer, pre_tokenizer=content["pre_tokenizer"],
    )


def _byte_vocabulary(
    chunks: list[str], vocab_size: int, normalizer: dict[str, Any] | None, symbols: Sequence[str]
) -> files.Definition:
    """Return padding, </s> and the bytes: the ids of trax's character tokenizer and of reformer-enwik8."""
    special, alphabet = ["<pad>", "</s>", *symbols], byte_of_char()
    pieces = [*special[:2], *sorted(alphabet, key=alphabet.__getitem__), *special[2:]]
    _require_size(vocab_size, len(pieces), "special tokens and bytes")
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    roles = files.guess_symbols(special)
    return files.byte_bpe(vocab, [], special, roles, "the vocabulary of bytes", normalizer=normalizer)


def _train_words(
    counts: Mapping[str, float], vocab_size: int, normalizer: dict[str, Any] | None, symbols: Sequence[str]
) -> files.Definition:
    """Return the special tokens, then the words by frequency, equally frequent ones in alphabetical order."""
    special = list(dict.fromkeys((*SYMBOL_NAMES.values(), *SENTINELS, *symbols)))
    words = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
    _require_size(vocab_size, len(special) + 1, "special tokens and one word")
    pieces = [*special, *words][:vocab_size]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=SYMBOL_NAMES["unk"]))
    model.pre_tokenizer = _WORDS
    model.add_special_tokens(special)
    parts = json.loads(model.to_str()) | {"normalizer": normalizer}
    return files.json_definition(parts, SYMBOL_NAMES, f"the vocabulary of {len(pieces)} words")


def _require_size(vocab_size: int, least: int, parts: str) -> None:
    """Raise UserError for a vocabulary smaller than the parts that it must have."""
    if vocab_size < least:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small for the {least} {parts}; set --data.vocab-size to "
            f"{2 * least} or more, or spell words in characters with {least}."
        )


def _train_sentencepiece(
    lines: list[str], kind: str, vocab_size: int, normalization: str, symbols: Sequence[str]
) -> files.Definition:
    """Train with the layout of `Vocabulary.stand_in`, then 256 bytes and the pieces."""
    lines = [line.translate(_FULL_STOPS) for line in lines]
    alphabet = _replace_rare_characters(lines)
    first = dict(itertools.islice(SYMBOL_NAMES.items(), 4))  # SentencePiece's own; a symbol of an objective may be one
    control = [name for name in dict.fromkeys((*SYMBOL_NAMES.values(), *SENTINELS, *symbols))
               if name not in first.values()]
    least = len(first) + len(control) + 256 + len(alphabet)
    _require_size(vocab_size, least, "special tokens, bytes and characters of this text")
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=output, model_type=kind, vocab_size=vocab_size,
        hard_vocab_limit=False,  # a text without so many pieces gives a smaller vocabulary
        **{f"{role}_id": token_id for token_id, role in enumerate(first)},
        **{f"{role}_piece": piece for role, piece in first.items()},
        control_symbols=control, required_chars=alphabet, byte_fallback=True, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        max_sentence_length=8 * _CHUNK, seed_sentencepiece_size=min(1_000_000, _SEEDS * max(vocab_size, 8192)),
        # The number of threads changes the order of summation, so it is fixed for reproducible scores.
        num_threads=8, minloglevel=2,
    )
    proto = sentencepiece_json.parse(output.getvalue())
    proto.normalizer_spec.name = sentencepiece_json.LINES[normalization]
    text_pieces = [piece for piece in proto.pieces if piece.type == 1]
    for piece in text_pieces:
        piece.piece = piece.piece.translate(_FULL_STOPS)
    if kind == "unigram":  # round the scores so that float32 adds them exactly: see sentencepiece_json
        largest = (10 - min(piece.score for piece in text_pieces)) * sentencepiece_json.EXACT
        step = 2.0 ** (math.ceil(math.log2(largest)) - 24)
        for piece in text_pieces:
            piece.score = round(piece.score / step) * step
    model = proto.SerializeToString(deterministic=True)
    return files.Definition(files.SENTENCEPIECE, model, SYMBOL_NAMES, f"the {kind} vocabulary of {len(proto.pieces)}")


def _replace_rare_characters(lines: list[str]) -> str:
    """Replace all characters outside the vocabulary's alphabet by boundaries, in place, and return the alphabet.

    SentencePiece's own `character_coverage` would also drop characters of `required_chars`.
    """
    counts = collections.Counter(itertools.chain.from_iterable(lines))
    total = sum(count for char, count in counts.items() if char == " " or char not in _NO_PIECE)
    covered = counts[" "]
    alphabet = set(_ASCII)
    for char, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= CHARACTER_COVERAGE * total:
            break
        if char not in _NO_PIECE:
            alphabet.add(char)
            covered += count
    others = str.maketrans({char: _BOUNDARY for char in counts if char not in alphabet and char != " "})
    for i, line in enumerate(lines):
        lines[i] = line.translate(others)
    # A line of boundaries keeps the alphabet below full coverage, where SentencePiece would stop counting.
    lines += [_BOUNDARY * 100] * (1 + total // 10_000_000)
    return "".join(sorted(alphabet))
