"""Conversion of a SentencePiece model to the `tokenizer.json` of the `tokenizers` library, which Transformers reads.

Vocabularies trained by jaxlm start every line with the word-start mark, and normalize the text first or leave it as
it is. SentencePiece encodes text here, because it is five times as fast for a unigram vocabulary (1.56 against 0.30
million tokens/s on one core of a shared x86 server); `tokenizers` encodes it after an export. Both give the same ids:

* Unigram scores are multiples of a power of 2 so large that float32 (SentencePiece) adds them over EXACT characters as
  exactly as float64 (`tokenizers`). Both libraries walk the lattice in the same order and keep the first of equal
  paths, so that they also agree on ties. For published models, rounding decides ties.
* SentencePiece gets texts in segments of about EXACT characters, cut at the end of a word. No piece crosses a cut.

Published models are converted as closely as the `tokenizers` library allows.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sp

from jaxlm.tokenizers.normalizer import NORMALIZERS

SPACE = "▁"
LINES = {"identity": "jaxlm_lines", "nmt_nfkc": "jaxlm_lines_nmt_nfkc"}
"""Normalization → the rule name in models trained by jaxlm, which tells them from published ones."""
EXACT = 4096
WORD_END = re.compile(f"(?<=[^ {SPACE}\\n])[ \\n]")
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_line_start = re.compile("\\n(?=[^\\n])")


def parse(model: bytes) -> Any:
    """Return the ModelProto in `model`; raise an exception unless it is a unigram or BPE model."""
    proto = sp.ModelProto.FromString(model)
    is_known = proto.trainer_spec.model_type in (sp.TrainerSpec.UNIGRAM, sp.TrainerSpec.BPE)
    if not is_known or all(piece.type != _UNKNOWN for piece in proto.pieces):
        raise ValueError("it is not a SentencePiece model of type unigram or BPE")
    return proto


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
    normalizers, pre_tokenizers, decoders = pipeline(proto)
    if proto.normalizer_spec.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special = [
        added_token(token_id, piece.piece, lstrip=piece.type == _CONTROL)
        for token_id, piece in enumerate(proto.pieces) if piece.type in (_CONTROL, _UNKNOWN)
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
        "model": (_unigram if proto.trainer_spec.model_type == sp.TrainerSpec.UNIGRAM else _bpe)(proto),
    }


Steps = list[dict[str, Any]]


def _lines_pipeline(proto: Any) -> tuple[Steps, Steps, Steps]:
    """Return the normalizers, pre-tokenizers and decoders of a model trained by jaxlm.

    They do what `normalize` and `prefix_lines` do.
    """
    normalizers = [
        *(NORMALIZERS if is_normalized(proto) else ()),
        {"type": "Replace", "pattern": {"Regex": _line_start.pattern}, "content": "\n "},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    words = {"Regex": f"{SPACE}*[^{SPACE}\\n]+|{SPACE}+|\\n"}
    pre_tokenizers = [
        # Metaspace prepends nothing to a text that already starts with its mark. So the first one prepends a plain
        # space, and the second one turns it into a mark.
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
    # SentencePiece never matches control symbols, bytes and unused pieces in text, but `tokenizers` matches every entry
    # of the list. A score below that of the single characters keeps them out.
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
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False, "vocab": ids, "merges": [pair for *_, pair in merges],
    }
