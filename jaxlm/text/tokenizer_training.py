"""Trains a SentencePiece vocabulary with every special symbol that the objectives of the lineage need."""

from __future__ import annotations

import io
import math
import os
import random
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import sentencepiece
from etils import epath

from jaxlm.errors import UserError
from jaxlm.text import sentencepiece_json, tokenizer_files
from jaxlm.text.tokenizer import Tokenizer

NUM_SENTINELS = 100
# The order is that of Vocabulary.stand_in: `<extra_id_0>` has the highest id of its block.
CONTROL_SYMBOLS = ("[CLS]", "[SEP]", "[MASK]", *(f"<extra_id_{k}>" for k in reversed(range(NUM_SENTINELS))))
_FIRST_SYMBOLS = {"pad": "[PAD]", "unk": "[UNK]", "bos": "<s>", "eos": "</s>"}
SYMBOLS = _FIRST_SYMBOLS | {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# Alphabet that every vocabulary has, so that a symbol's name in a text is always spelt out in characters.
_ASCII = "".join(map(chr, range(33, 127)))
_CHUNK = 2048
_reserved = re.compile("|".join(map(re.escape, (*SYMBOLS.values(), *CONTROL_SYMBOLS))) + "|<0x[0-9A-F]{2}>")


def train_tokenizer(
    texts: Iterable[str],
    folder: str | os.PathLike[str],
    *,
    kind: Literal["unigram", "bpe"] = "unigram",
    vocab_size: int = 8192,
    max_bytes: int = 20_000_000,
    character_coverage: float = 0.9995,
    seed: int = 0,
) -> Tokenizer:
    """Trains a vocabulary, saves it in `folder` (in the form of `Tokenizer.save`) and returns it.

    texts: whole documents; read once. If they are more than `max_bytes` in UTF-8, a sample of their lines is used,
        drawn evenly over all of them.
    kind: "unigram" (language-model pieces) or "bpe" (merged pairs).
    vocab_size: number of ids in all: 7 symbols, 100 sentinels, 256 bytes, and the text's pieces.
    character_coverage: share of the characters of the text that get a piece; the others are spelt in bytes.
    The same texts and settings give the same model, byte for byte.
    Raises UserError if there is no text, or the vocabulary is larger or smaller than the text supports.
    """
    if kind not in ("unigram", "bpe"):
        raise UserError(f"a tokenizer's kind is unigram or bpe, not {kind!r}.")
    if not 0.98 <= character_coverage <= 1:
        raise UserError(f"character_coverage is {character_coverage}, but must lie between 0.98 and 1.")
    folder = epath.Path(folder)
    if (folder / tokenizer_files.MARKER).exists():
        raise UserError(f"{folder} holds a tokenizer already; choose another folder, or remove it first.")
    lines = _sample(_lines(texts), max_bytes, seed)
    if not lines:
        raise UserError("there is no text to train a tokenizer on; check the source.")
    model = _train(lines, kind, vocab_size, character_coverage)
    definition = tokenizer_files.Definition(
        tokenizer_files.SENTENCEPIECE, model, SYMBOLS, f"the {kind} vocabulary of {vocab_size}"
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
            if line[start:].strip():
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


def _train(lines: list[str], kind: str, vocab_size: int, character_coverage: float) -> bytes:
    first_piece = len(_FIRST_SYMBOLS) + len(CONTROL_SYMBOLS) + 256
    if vocab_size <= first_piece + len(_ASCII):
        raise UserError(
            f"a vocabulary of {vocab_size} leaves no room for text beside {first_piece} symbols and bytes; "
            f"ask for at least {first_piece + len(_ASCII) + 1}, better a few thousand."
        )
    output = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # A symbol's name must not become a piece of text beside the symbol.
            sentence_iterator=(
                _reserved.sub(lambda m: m[0][0] + " " + m[0][1:], line).encode("utf-8", "replace").decode()
                for line in lines
            ),
            model_writer=output, model_type=kind, vocab_size=vocab_size, character_coverage=character_coverage,
            **{f"{role}_id": number for number, role in enumerate(_FIRST_SYMBOLS)},
            **{f"{role}_piece": piece for role, piece in _FIRST_SYMBOLS.items()},
            control_symbols=list(CONTROL_SYMBOLS), byte_fallback=True, required_chars=_ASCII,
            normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            max_sentence_length=8 * _CHUNK, minloglevel=2,
            # The sums of the threads depend on their number, so it is part of the recipe.
            num_threads=8,
        )
    except Exception as error:
        raise _explained(error, kind, vocab_size) from error
    proto = sentencepiece_json.parse(output.getvalue())
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


def _explained(error: Exception, kind: str, vocab_size: int) -> Exception:
    message = str(error)
    if limit := re.search(r"value <= (\d+)", message):
        return UserError(
            f"the text supports a {kind} vocabulary of at most {limit[1]}, not {vocab_size}; "
            f"ask for {limit[1]} or fewer, or train on more text."
        )
    if limit := re.search(r"required_chars\D*(\d+) vs (\d+)", message):
        return UserError(
            f"the text has too many different characters for a vocabulary of {vocab_size}; "
            f"ask for more than {limit[2]}, or lower character_coverage."
        )
    return error
