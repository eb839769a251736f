"""Conversion of a SentencePiece model to the `tokenizer.json` of the `tokenizers` library, which Transformers reads.

Vocabularies trained by jaxlm start every line with the word-start mark, and normalize the text first or leave it as
it is. SentencePiece encodes text here, because it is five times as fast for a unigram vocabulary (1.56 against 0.30
million tokens/s on one core of a shared x86 server); `tokenizers` encodes it after an export. Both give the same ids:

* Unigram scores are multiples of a power of 2 so large that float32 (SentencePiece) adds them over EXACT characters as
  exactly as float64 (`tokenizers`). Both libraries walk the lattice in the same order and keep the first of equal
  paths, so that they also agree on ties.
* SentencePiece gets texts in segments of about EXACT characters, cut at the end of a word. No piece crosses a cut.

Published models are encoded by `tokenizers` alone, where it is possible word by word (`jaxlm.tokenizers.words`): with
their scores, SentencePiece's rounding would decide ties by what stands before a word. A model of which the conversion
gives other ids than SentencePiece is refused.
"""

from __future__ import annotations

import base64
import functools
import importlib
import os
import random
import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

from jaxlm.errors import UserError
from jaxlm.tokenizers.normalizer import NORMALIZERS

SPACE = "▁"
LINES = {"identity": "jaxlm_lines", "nmt_nfkc": "jaxlm_lines_nmt_nfkc"}
"""Normalization → the rule name in models trained by jaxlm, which tells them from published ones."""
EXACT = 4096
WORD_END = re.compile(f"(?<=[^ {SPACE}\\n])[ \\n]")
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = range(1, 6)
_SEPARATOR, _PRIVATE = "\uffff", 0x10F000
_line_start = re.compile("\\n(?=[^\\n])")
_ODD_TEXTS = (
    "", "  two  spaces,\ttabs \r\n\n lines\n", "\x01a\u00a0b\u3000c \u200bd\ufeff", "\uff46\uff54 \ufb01 \u2460 \u00bd",
    "\uff8a\uff9f \u304b\u3099 \u1100\u1161\u11a8 e\u0301a\u0323\u0302 \ufb01\u0301", "\u6f22 \U0001f642\u6f22 <unk>",
)


def _import_messages() -> Any:
    """Import SentencePiece's messages under any protobuf.

    Their file asks for protobuf 7, of which it needs nothing; Apache Beam has no protobuf above 6.
    """
    name = "TEMPORARILY_DISABLE_PROTOBUF_VERSION_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        return importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    finally:
        os.environ.pop(name)
        os.environ.update({name: before} if before else {})


sp = _import_messages()


def parse(model: bytes) -> Any:
    """Return the ModelProto in `model`; raise an exception unless it is a unigram or BPE model of known options."""
    proto = sp.ModelProto.FromString(model)
    trainer = proto.trainer_spec
    is_known = trainer.model_type in (sp.TrainerSpec.UNIGRAM, sp.TrainerSpec.BPE)
    if not is_known or all(piece.type != _UNKNOWN for piece in proto.pieces):
        raise ValueError("it is not a SentencePiece model of type unigram or BPE")
    for option, is_set in {
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces=false": not proto.normalizer_spec.escape_whitespaces,
        "unused pieces": any(piece.type == _UNUSED for piece in proto.pieces),
    }.items():
        if is_set:
            raise UserError(f"a SentencePiece model with {option} has no equal in Transformers; train one without it.")
    return proto


def probes(pieces: Sequence[str]) -> list[str]:
    """Return texts to compare two encoders of a vocabulary: odd ones, and up to 1,000 texts of eight random pieces."""
    drawn = random.Random(0).sample(pieces, min(8000, len(pieces)))
    return [*_ODD_TEXTS, *("".join(drawn[i : i + 8]).replace(SPACE, " ") for i in range(0, len(drawn), 8))]


def is_trained_here(proto: Any) -> bool:
    """Return whether jaxlm trained the model."""
    return proto.normalizer_spec.name in LINES.values()


def is_normalized(proto: Any) -> bool:
    """Return whether jaxlm trained the model on the output of `normalize`."""
    return proto.normalizer_spec.name == LINES["nmt_nfkc"]


def symbol_pieces(proto: Any) -> list[str]:
    """Return the special tokens: control symbols and the unknown symbol."""
    return [piece.piece for piece in proto.pieces if piece.type in (_CONTROL, _UNKNOWN)]


def arrange_pieces(proto: Any, head: Sequence[str], special: Collection[str]) -> None:
    """Move the special tokens `head` to the first ids, and append those of `special` that the model lacks."""
    found = {piece.piece: piece for piece in proto.pieces}
    pieces = [found.get(x) or sp.ModelProto.SentencePiece(piece=x) for x in dict.fromkeys((*head, *found, *special))]
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    for piece in proto.pieces:
        if piece.type != _UNKNOWN and piece.piece in {*head, *special}:
            piece.type = _CONTROL


def prefix_lines(text: str) -> str:
    """Insert a space before the text and before each further line that is not empty."""
    return " " + _line_start.sub("\n ", text) if text else ""


def added_token(token_id: int, content: str, *, lstrip: bool = False) -> dict[str, Any]:
    """Return a special token as a `tokenizer.json` has it."""
    return {
        "id": token_id, "content": content, "single_word": False, "lstrip": lstrip, "rstrip": False,
        "normalized": False, "special": True,
    }


def to_tokenizer_json(proto: Any) -> dict[str, Any]:
    """Return the model as a `tokenizer.json` without post-processor, its special tokens as added tokens."""
    pipeline = _lines_pipeline if is_trained_here(proto) else _published_pipeline
    normalizers, splits, decoders = pipeline(proto)
    if prefix := proto.normalizer_spec.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special = [
        added_token(token_id, piece.piece, lstrip=piece.type == _CONTROL)
        for token_id, piece in enumerate(proto.pieces) if piece.type in (_CONTROL, _UNKNOWN)
    ]
    # Metaspace prepends nothing to a text that already starts with its mark. So the first one prepends a plain space,
    # and the second one turns it into a mark.
    marks = [
        {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, "split": False}
        for replacement, scheme in ((" ", "first" if prefix else "never"), (SPACE, "never"))
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": marks + splits},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            _replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *decoders,
        ]},
        "model": (_unigram if proto.trainer_spec.model_type == sp.TrainerSpec.UNIGRAM else _bpe)(proto),
    }


Steps = list[dict[str, Any]]


def _lines_pipeline(proto: Any) -> tuple[Steps, Steps, Steps]:
    """Return the normalizers, splits and decoders of a model trained by jaxlm.

    They do what `normalize` and `prefix_lines` do.
    """
    normalizers = [
        *(NORMALIZERS if is_normalized(proto) else ()),
        _replace({"Regex": _line_start.pattern}, "\n "), _replace({"String": " "}, SPACE),
    ]
    words = _split(f"{SPACE}*[^{SPACE}\\n]+|{SPACE}+|\\n", "Isolated")
    return normalizers, [words], [_replace({"String": "\n "}, "\n")]


def _published_pipeline(proto: Any) -> tuple[Steps, Steps, Steps]:
    spec = proto.normalizer_spec
    normalizers: Steps = []
    if charsmap := spec.precompiled_charsmap:
        # `Precompiled` changes a letter together with its marks, and may lose them. A separator keeps them apart, and
        # what Unicode composes is composed before; after it, half-width kana. SentencePiece does not reorder marks.
        compose = [{"type": "NFC"}] if "nfkc" in spec.name else []
        normalizers = [
            *(NORMALIZERS[:1] if "nmt" in spec.name and spec.remove_extra_whitespaces else []),
            *([_replace({"Regex": _fixed_order()}, _SEPARATOR)] if compose else []), *compose,
            _replace({"Regex": r"(?<!\A)(?=[\p{M}\x{200c}\x{200d}\n])"}, _SEPARATOR),
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
            *compose, _replace({"String": _SEPARATOR}, ""),
        ]
    # SentencePiece does not normalize user-defined symbols, so others stand for those that would change.
    normalize = tokenizers.normalizers.Precompiled(charsmap).normalize_str if charsmap else str
    user = sorted((piece.piece for piece in proto.pieces if piece.type == _USER), key=len, reverse=True)
    changed = [piece for piece in user if SPACE not in piece and normalize(piece) != piece]
    normalizers[:0] = [_replace({"String": piece}, chr(_PRIVATE + i)) for i, piece in enumerate(changed)]
    shown = [_replace({"String": chr(_PRIVATE + i)}, piece) for i, piece in enumerate(changed)]
    if not spec.remove_extra_whitespaces:
        return [*normalizers, _replace({"String": " "}, SPACE), *shown], _splits(proto, user), []
    ends = ("" if spec.add_dummy_prefix else r"\A +|") + rf"[ {SPACE}]+\z"
    normalizers += [_replace({"Regex": " {2,}"}, " "), *shown, _replace({"Regex": ends}, "")]
    return normalizers, _splits(proto, user), []


@functools.cache
def _fixed_order() -> str:
    """Return a regex of the places where NFC would compose or exchange what SentencePiece leaves as it is.

    SentencePiece composes a letter only with all of its marks, in their canonical order. So the places are between a
    composed letter, or a mark that composes with none, and any mark, and before a mark of a smaller combining class.
    """
    marks = {chr(code): number for code in range(0x300, 0x1F000) if (number := unicodedata.combining(chr(code)))}
    decomposed = {chr(code): unicodedata.normalize("NFD", chr(code)) for code in range(0xC0, 0x1F000)}
    composed = {char for char, parts in decomposed.items()
                if parts[-1] in marks and unicodedata.normalize("NFC", parts) == char != parts}
    composing = {decomposed[char][-1] for char in composed}
    places = [f"(?<=[{_ranges(composed | (marks.keys() - composing))}])"]
    for number in sorted({marks[char] for char in composing}):
        if lower := [mark for mark in marks if marks[mark] < number]:
            upper = [char for char in composing if marks[char] == number]
            places.append(f"(?<=[{_ranges(upper)}])(?=[{_ranges(lower)}])")
    return f"(?=[{_ranges(marks)}])(?:{'|'.join(places)})"


def _ranges(chars: Collection[str]) -> str:
    """Return the inside of a character class of a regex."""
    codes = {ord(char) for char in chars}
    starts, ends = (sorted(code for code in codes if code + step not in codes) for step in (-1, 1))
    return "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends, strict=True))


def _splits(proto: Any, user: Sequence[str]) -> Steps:
    """Return the pre-tokenizers that isolate user-defined symbols and cut the names of control symbols and bytes.

    `tokenizers` would recognize those names in a text: a unigram model by its scores, if it lacks a character of the
    name, and a BPE model, which finds user-defined symbols as whole words, if the name stands between two of them. The
    cut is beside a character without a piece, where no piece crosses it.
    """
    known = {piece.piece for piece in proto.pieces if piece.type in (_NORMAL, _USER)}
    is_bpe = proto.trainer_spec.model_type == sp.TrainerSpec.BPE
    names = [piece.piece for piece in proto.pieces if piece.type not in (_NORMAL, _USER)]
    names = [name for name in names if (user if is_bpe else not known.issuperset(name))]
    isolated = [_split("|".join(map(re.escape, user)), "Isolated")] if is_bpe and user else []
    return isolated + cut_names(names, known, is_whole=is_bpe)


def cut_names(names: Sequence[str], known: Collection[str], is_whole: bool = False) -> Steps:
    """Return a pre-tokenizer, if there are names, that cuts them, or only those that are a whole word."""
    start, end, cuts = (r"\A", r"\z", []) if is_whole else ("", "", [])
    for name in names:
        cut = next((k for k in range(1, len(name)) if (name[k - 1] in known) != (name[k] in known)), 1)
        cuts.append(f"{start}{re.escape(name[:cut])}(?={re.escape(name[cut:])}{end})")
    return [_split("|".join(cuts), "MergedWithPrevious")] if cuts else []


def _split(regex: str, behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _unigram(proto: Any) -> dict[str, Any]:
    score = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    lowest = min(score.values())
    # A bonus of user-defined symbols, as SentencePiece has one; by eighths, which are added up without rounding.
    score |= {piece.piece: (len(piece.piece.encode()) - 1) / 8 for piece in proto.pieces if piece.type == _USER}
    # SentencePiece never matches control symbols and bytes in text, but `tokenizers` matches every entry of the list.
    # A score below that of the single characters keeps them out.
    vocab = [
        [piece.piece, score[piece.piece] if piece.type in (_NORMAL, _USER) else
         sum(score.get(char, 0.0) for char in piece.piece) + lowest] for piece in proto.pieces
    ]
    unk = next(token_id for token_id, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
    return {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": proto.trainer_spec.byte_fallback}


def _bpe(proto: Any) -> dict[str, Any]:
    # SentencePiece ranks pieces and merges any two neighbours that form one; `tokenizers` needs the pairs.
    ids = {piece.piece: token_id for token_id, piece in enumerate(proto.pieces)}
    text = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, _USER)}
    merges = []
    for piece, score in text.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in text and right in text:
                merges.append((-score, ids[left], ids[right], [left, right]))
    merges.sort(key=lambda merge: merge[:3])
    unk = next(piece.piece for piece in proto.pieces if piece.type == _UNKNOWN)
    return {
        "type": "BPE", "dropout": None, "unk_token": unk, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": proto.trainer_spec.byte_fallback,
        "vocab": ids, "merges": [pair for *_, pair in merges],
        "ignore_merges": any(piece.type == _USER for piece in proto.pieces),
    }
