"""From a SentencePiece model to the `tokenizer.json` of the `tokenizers` library, which Transformers reads.

Models trained here begin every line with the word-start mark, and normalise the text before, or keep it as it is.
SentencePiece runs them here, because it is several times as fast, and `tokenizers` after an export. Both give the same
ids:

* Scores of a unigram model are multiples of a power of 2 so large that every sum of scores over EXACT characters is
  exact in float32 (SentencePiece) as in float64 (`tokenizers`). Both libraries walk the lattice in the same order and
  keep the first of equal paths, so they agree also on ties, which in published models fall by rounding.
* SentencePiece gets texts in segments of about EXACT characters, cut where a word ends, across which no piece reaches.

Published models are converted as closely as the `tokenizers` library allows.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sp

from jaxlm.tokenizers.normalizer import NORMALIZERS

SPACE = "▁"
# Written in place of SentencePiece's "identity" to tell models trained here, whose lines each begin a word, by their
# normalization.
LINES = {"identity": "jaxlm_lines", "nmt_nfkc": "jaxlm_lines_nmt_nfkc"}
EXACT = 4096
WORD_END = re.compile(f"(?<=[^ {SPACE}\\n])[ \\n]")
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_line_begin = re.compile("\\n(?=[^\\n])")


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


def is_trained_here(proto: Any) -> bool:
    return proto.normalizer_spec.name in LINES.values()


def is_normalized(proto: Any) -> bool:
    """Whether a model trained here takes texts that `normalize` has been over."""
    return proto.normalizer_spec.name == LINES["nmt_nfkc"]


def is_unigram(proto: Any) -> bool:
    return proto.trainer_spec.model_type == sp.TrainerSpec.UNIGRAM


def is_bpe(proto: Any) -> bool:
    return proto.trainer_spec.model_type == sp.TrainerSpec.BPE


def symbol_pieces(proto: Any) -> list[str]:
    """Every piece that stands for no text: control symbols and the unknown symbol."""
    return [piece.piece for piece in proto.pieces if piece.type in (_CONTROL, _UNKNOWN)]


def begin_lines(text: str) -> str:
    """The text with the space that begins a word before it and before each line that is not empty."""
    return " " + _line_begin.sub("\n ", text) if text else ""


def to_tokenizer_json(proto: Any) -> dict[str, Any]:
    """The model as a `tokenizer.json`, without post-processor; every special symbol an added token."""
    pipeline = _lines_pipeline if is_trained_here(proto) else _published_pipeline
    normalizers, pre_tokenizers, decoders = pipeline(proto)
    if proto.normalizer_spec.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
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
            {"type": "ByteFallback"}, {"type": "Fuse"}, *decoders,
        ]},
        "model": _unigram(proto) if is_unigram(proto) else _bpe(proto),
    }


Steps = list[dict[str, Any]]


def _lines_pipeline(proto: Any) -> tuple[Steps, Steps, Steps]:
    """Normalizers, pre-tokenizers and decoders for a model trained here: those of `normalize` and `begin_lines`."""
    normalizers = [
        *(NORMALIZERS if is_normalized(proto) else ()),
        {"type": "Replace", "pattern": {"Regex": _line_begin.pattern}, "content": "\n "},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    words = {"Regex": f"{SPACE}*[^{SPACE}\\n]+|{SPACE}+|\\n"}
    pre_tokenizers = [
        # A mark is due before the text even if it begins with spaces of its own, which are marks by now: the first
        # Metaspace sets a plain space before the text, the second makes a mark of it.
        _metaspace(" ", "first"), _metaspace(SPACE, "never"),
        {"type": "Split", "pattern": words, "behavior": "Isolated", "invert": False},
    ]
    return normalizers, pre_tokenizers, [{"type": "Replace", "pattern": {"String": "\n "}, "content": "\n"}]


def _published_pipeline(proto: Any) -> tuple[Steps, Steps, Steps]:
    spec = proto.normalizer_spec
    normalizers: Steps = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        normalizers.append({"type": "Replace", "pattern": {"Regex": f"[ {SPACE}]+\\z"}, "content": ""})
    return normalizers, [_metaspace(SPACE, "first" if spec.add_dummy_prefix else "never")], []


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
