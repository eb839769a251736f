"""Trains a SentencePiece vocabulary with every special symbol that the objectives of the lineage need."""

from __future__ import annotations

import collections
import io
import math
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import sentencepiece
from etils import epath

from jaxlm.errors import UserError
from jaxlm.tokenizers import files, sentencepiece_json
from jaxlm.tokenizers.tokenizer import Tokenizer

NUM_SENTINELS = 100
# The order is that of Vocabulary.stand_in: `<extra_id_0>` has the highest id of its block.
CONTROL_SYMBOLS = ("[CLS]", "[SEP]", "[MASK]", *(f"<extra_id_{k}>" for k in reversed(range(NUM_SENTINELS))))
_FIRST_SYMBOLS = {"pad": "[PAD]", "unk": "[UNK]", "bos": "<s>", "eos": "</s>"}
SYMBOLS = _FIRST_SYMBOLS | {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# In every vocabulary, so that a symbol's name in a text can always be spelt out in characters.
_ASCII = "".join(map(chr, range(33, 127))) + sentencepiece_json.SPACE
# The name of a control symbol in the training text ends a piece, and is part of none.
_BOUNDARY = _FIRST_SYMBOLS["pad"]
# Never in the alphabet: the space (its mark is), and what SentencePiece keeps for itself or cannot hold.
_NO_PIECE = frozenset(" \t\n\0\u2585") | frozenset(map(chr, range(0xD800, 0xE000)))
_CHUNK = 2048
# Unigram training starts from this many candidates for each piece. SentencePiece's million is four times as slow for
# 8,192 pieces of 20 MB, and codes other text of the same kind in 0.1 % fewer tokens at best.
_SEEDS = 8


def train_tokenizer(
    texts: Iterable[str],
    folder: str | os.PathLike[str],
    *,
    kind: Literal["unigram", "bpe"] = "unigram",
    vocab_size: int = 8192,
    max_bytes: int = 20_000_000,
    character_coverage: float = 0.9995,
    symbols: Sequence[str] = (),
    seed: int = 0,
) -> Tokenizer:
    """Trains a vocabulary, saves it in `folder` (in the form of `Tokenizer.save`) and returns it.

    texts: whole documents; read once. If they are more than `max_bytes` in UTF-8, a sample of their lines is used,
        drawn evenly over all of them.
    kind: "unigram" (language-model pieces) or "bpe" (merged pairs).
    vocab_size: number of ids in all: 7 symbols, 100 sentinels, 256 bytes, and the text's pieces.
    symbols: names of further special symbols, such as "[R]", for an objective that needs them.
    character_coverage: share of the characters of the text that get a piece; the others are spelt in bytes.
    The same texts and settings give the same model, byte for byte.
    Raises UserError if there is no text, or the vocabulary is larger or smaller than the text supports.
    """
    if kind not in ("unigram", "bpe"):
        raise UserError(f"a tokenizer's kind is unigram or bpe, not {kind!r}.")
    if not 0.98 <= character_coverage <= 1:
        raise UserError(f"character_coverage is {character_coverage}, but must lie between 0.98 and 1.")
    folder = epath.Path(folder)
    if (folder / files.MARKER).exists():
        raise UserError(f"{folder} holds a tokenizer already; choose another folder, or remove it first.")
    lines = _sample(_lines(texts), max_bytes, seed)
    if not lines:
        raise UserError("there is no text to train a tokenizer on; check the source.")
    control = list(dict.fromkeys((*CONTROL_SYMBOLS, *symbols)))
    model = _train(lines, kind, vocab_size, character_coverage, control)
    definition = files.Definition(
        files.SENTENCEPIECE, model, SYMBOLS, f"the {kind} vocabulary of {vocab_size}"
    )
    tokenizer = Tokenizer(definition)
    tokenizer.save(folder)
    return tokenizer


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines of at most about _CHUNK characters, cut before spaces where there are any."""
    for text in texts:
        for line in text.split("\n"):
            start = 0
            while len(line) - start > _CHUNK:
                cut = line.rfind(" ", start + 1, start + _CHUNK)
                cut = cut if cut > start else start + _CHUNK
                yield line[start:cut]
                # The trainer sets a mark before each line, in place of this space.
                start = cut + (line[cut : cut + 1] == " ")
            if line[start:].strip(" \t\0"):
                yield line[start:]


def _sample(lines: Iterable[str], max_bytes: int, seed: int) -> list[str]:
    """All lines, or an even sample of them, in order, of at most max_bytes."""
    draw = random.Random(seed).random
    kept: list[tuple[float, str]] = []
    share, size = 1.0, 0
    for line in lines:
        chance = draw()
        if chance >= share:
            continue
        kept.append((chance, line))
        size += len(line.encode("utf-8", "replace"))
        while size > max_bytes:
            share /= 2
            kept = [(c, text) for c, text in kept if c < share]
            size = sum(len(text.encode("utf-8", "replace")) for _, text in kept)
    return [line for _, line in kept]


def _train(
    lines: list[str], kind: str, vocab_size: int, character_coverage: float, control: list[str]
) -> bytes:
    alphabet, lines = _spell(lines, character_coverage)
    fixed = len(_FIRST_SYMBOLS) + len(control) + 256
    needed = fixed + len(alphabet)
    if vocab_size < needed:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small for {fixed} symbols and bytes and the "
            f"{len(alphabet)} characters of the text; ask for at least {needed}, better a few thousand"
            + (", or lower character_coverage." if len(alphabet) > len(_ASCII) else ".")
        )
    try:
        model = _run_trainer(lines, kind, vocab_size, alphabet, control)
    except RuntimeError as error:
        raise _explained(error, lines, kind, vocab_size, alphabet, control) from error
    proto = sentencepiece_json.parse(model)
    proto.normalizer_spec.name = sentencepiece_json.LINES
    if kind == "unigram":
        usual = [piece.score for piece in proto.pieces if piece.type == 1]
        # Exact sums: a segment's score is at most that of as many unknown characters, and float32 holds 24 bits.
        largest = (10 - min(usual)) * sentencepiece_json.SEGMENT_LIMIT
        step = 2.0 ** (math.ceil(math.log2(largest)) - 24)
        for piece in proto.pieces:
            if piece.type == 1:
                piece.score = round(piece.score / step) * step
    return proto.SerializeToString(deterministic=True)


def _spell(lines: list[str], character_coverage: float) -> tuple[str, list[str]]:
    """The alphabet of the vocabulary, and the lines with boundaries in place of all other characters.

    SentencePiece's own count stops at the coverage even within the characters that it is told to keep.
    """
    counts: collections.Counter[str] = collections.Counter()
    for line in lines:
        counts.update(line)
    total, covered = counts.total(), counts[" "]
    alphabet = set(_ASCII)
    for char, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= character_coverage * total:
            break
        if char not in _NO_PIECE:
            alphabet.add(char)
            covered += count
    others = str.maketrans({char: _BOUNDARY for char in counts if char not in alphabet and char != " "})
    # The last line makes sure that the alphabet stays short of covering all, at which the count would stop as well.
    spelt = [line.translate(others) for line in lines]
    return "".join(sorted(alphabet)), [*spelt, *[_BOUNDARY * 100] * (1 + total // 10_000_000)]


def _run_trainer(lines: list[str], kind: str, vocab_size: int, alphabet: str, control: list[str]) -> bytes:
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=output, model_type=kind, vocab_size=vocab_size,
        **{f"{role}_id": number for number, role in enumerate(_FIRST_SYMBOLS)},
        **{f"{role}_piece": piece for role, piece in _FIRST_SYMBOLS.items()},
        control_symbols=control, byte_fallback=True, required_chars=alphabet, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        max_sentence_length=8 * _CHUNK, seed_sentencepiece_size=min(1_000_000, _SEEDS * max(vocab_size, 8192)),
        # The sums of the threads depend on their number, so it is part of the recipe.
        num_threads=8, minloglevel=2,
    )
    return output.getvalue()


def _explained(
    error: RuntimeError, lines: list[str], kind: str, vocab_size: int, alphabet: str, control: list[str]
) -> Exception:
    message, size = str(error), vocab_size
    # The trainer's own limit is an estimate, so it is tried before it is named.
    while (limit := re.search(r"value <= (\d+)", message)) and int(limit[1]) < size:
        size = int(limit[1])
        try:
            _run_trainer(lines, kind, size, alphabet, control)
        except RuntimeError as again:
            message = str(again)
            continue
        return UserError(
            f"the text supports a {kind} vocabulary of at most {size}, not {vocab_size}; "
            f"ask for {size} or fewer, or train on more text."
        )
    if size < vocab_size:
        return UserError(f"there is too little text to train a vocabulary of {vocab_size}; give more of it.")
    return error
