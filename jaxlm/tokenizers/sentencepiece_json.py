"""From a SentencePiece model to the `tokenizer.json` of the `tokenizers` library, which Transformers reads.

Two kinds of model come here. Ours (see tokenizer_training.py) keep the text as it is and begin every line with the
word-start mark; for them both libraries give the same ids, by construction:

* Unigram scores are multiples of 2**-k, and a segment is so short that every sum of scores is exact in float32
  (SentencePiece) as in float64 (tokenizers). Both libraries walk the lattice in the same order and keep the first of
  equal paths, so they agree also on ties, which in published models fall by rounding.
* A segment ends where no piece can reach across: before a space or a newline that follows a word, or inside a run of
  more than RUN_LIMIT characters (or spaces), which is cut by the same pattern on both sides.

Published models are converted as closely as the `tokenizers` library allows.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sp

SPACE = "▁"
# Written in place of SentencePiece's "identity" to tell our models, whose lines each begin a word, from others'.
LINES = "jaxlm_lines"
RUN_LIMIT = 1024
SEGMENT_LIMIT = 4096
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def _word_pattern(space: str) -> str:
    """Matches a word with the spaces before it, or spaces, and cuts both where they run on for too long."""
    return f"[{space}]{{0,{RUN_LIMIT}}}[^{space}\\n]{{1,{RUN_LIMIT}}}|[{space}]{{1,{RUN_LIMIT}}}"


_SPACES = " " + SPACE
_words = re.compile(_word_pattern(_SPACES))
_long_run = re.compile(f"[^ {SPACE}]{{{RUN_LIMIT + 1}}}|[ {SPACE}]{{{RUN_LIMIT + 1}}}")


def parse(model: bytes) -> Any:
    """The ModelProto in `model`. ValueError if it is not one."""
    proto = sp.ModelProto()
    try:
        proto.ParseFromString(model)
    except Exception as error:  # protobuf's DecodeError is not in its stable interface
        raise ValueError("not a SentencePiece model") from error
    if not proto.pieces or not any(piece.type == _UNKNOWN for piece in proto.pieces):
        raise ValueError("not a SentencePiece model")
    return proto


def is_ours(proto: Any) -> bool:
    return proto.normalizer_spec.name == LINES


def is_unigram(proto: Any) -> bool:
    return proto.trainer_spec.model_type == sp.TrainerSpec.UNIGRAM


def is_bpe(proto: Any) -> bool:
    return proto.trainer_spec.model_type == sp.TrainerSpec.BPE


def symbol_pieces(proto: Any) -> list[str]:
    """Every piece that stands for no text: control symbols and the unknown symbol."""
    return [piece.piece for piece in proto.pieces if piece.type in (_CONTROL, _UNKNOWN)]


def line_segments(text: str) -> Iterator[str | None]:
    """The segments of a text, for one of our models, None for each newline; their ids, joined, are the text's ids."""
    if not text:
        return
    for number, line in enumerate(text.split("\n")):
        if number:
            yield None
        # The beginning of a text begins a word even before a newline, as the `first` scheme of Metaspace has it.
        if line or not number:
            line = " " + line
            if len(line) <= RUN_LIMIT:
                yield line
            else:
                yield from _cut_line(line)


def _cut_line(line: str) -> Iterator[str]:
    if len(line) <= SEGMENT_LIMIT and not _long_run.search(line):
        yield line
        return
    start = 0
    for word in _words.finditer(line):
        here = word.start()
        # Words may share a segment, but not the parts of a run that was too long.
        is_new_word = line[here] in _SPACES and line[here - 1] not in _SPACES
        if here > start and (not is_new_word or word.end() - start > SEGMENT_LIMIT):
            yield line[start:here]
            start = here
    yield line[start:]


def to_tokenizer_json(proto: Any, *, begin_word: bool = True) -> dict[str, Any]:
    """The model as a `tokenizer.json`, without post-processor; every special symbol an added token.

    begin_word: whether the beginning of a text begins a word (false for segments of our own, which carry their mark).
    """
    spec = proto.normalizer_spec
    normalizers: list[dict[str, Any]] = []
    if is_ours(proto):
        normalizers += [
            {"type": "Replace", "pattern": {"Regex": "\\n(?=[^\\n])"}, "content": "\n "},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ]
        # A mark is due before the text even if it begins with spaces of its own, which are marks by now: the first
        # Metaspace sets a plain space before the text, the second makes a mark of it.
        begin = [_metaspace(" ", "first"), _metaspace(SPACE, "never")] if begin_word else []
        pattern = _word_pattern(SPACE) + "|\\n"
        pre_tokenizers = [
            *begin, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        ]
        decoders = [{"type": "Replace", "pattern": {"String": "\n "}, "content": "\n"}]
    else:
        if spec.precompiled_charsmap:
            charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
            normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if spec.remove_extra_whitespaces:
            normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
            normalizers.append({"type": "Replace", "pattern": {"Regex": f"[ {SPACE}]+\\z"}, "content": ""})
        pre_tokenizers = [_metaspace(SPACE, "first" if spec.add_dummy_prefix and begin_word else "never")]
        decoders = []
    model = _unigram(proto) if is_unigram(proto) else _bpe(proto)
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spec.add_dummy_prefix else []
    special = [
        {
            "id": number, "content": piece.piece, "single_word": False, "lstrip": piece.type == _CONTROL,
            "rstrip": False, "normalized": False, "special": True,
        }
        for number, piece in enumerate(proto.pieces) if piece.type in (_CONTROL, _UNKNOWN)
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, *decoders, *strip,
        ]},
        "model": model,
    }


def _metaspace(replacement: str, scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, "split": False}


def _unigram(proto: Any) -> dict[str, Any]:
    # SentencePiece never matches control symbols, bytes and unused pieces in text, but `tokenizers` matches whatever
    # is in the list. A score below that of the same characters one by one keeps them out.
    score = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, _USER)}
    usual = [piece.score for piece in proto.pieces if piece.type == _NORMAL]
    unknown = min(usual) - 10.0
    vocab: list[list[Any]] = []
    for piece in proto.pieces:
        if piece.type == _NORMAL:
            vocab.append([piece.piece, piece.score])
        elif piece.type == _USER:
            vocab.append([piece.piece, len(piece.piece.encode()) * max(usual) - 0.1])
        else:
            vocab.append([piece.piece, sum(score.get(char, unknown) for char in piece.piece) - 1.0])
    unk = next(number for number, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
    return {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": proto.trainer_spec.byte_fallback}


def _bpe(proto: Any) -> dict[str, Any]:
    # SentencePiece keeps pieces, best first, and joins any two neighbours that make one; `tokenizers` wants the pairs.
    number = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    text = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, _USER)}
    merges = []
    for piece, score in text.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in text and right in text:
                merges.append((-score, number[left], number[right], [left, right]))
    merges.sort(key=lambda merge: merge[:3])
    unk = next(piece.piece for piece in proto.pieces if piece.type == _UNKNOWN)
    return {
        "type": "BPE", "dropout": None, "unk_token": unk, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False, "vocab": number, "merges": [pair for *_, pair in merges],
    }


def dumps(tokenizer: dict[str, Any]) -> str:
    return json.dumps(tokenizer, ensure_ascii=False)
