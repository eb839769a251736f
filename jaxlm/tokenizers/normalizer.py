"""What tokenizers trained here do to a text first: the same here and, by the `tokenizers` library, after an export."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import tokenizers

# SentencePiece's nmt_nfkc takes these out, and makes spaces of those, but leaves no newline, tab or carriage return.
_REMOVED = "[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]"
_SPACES = "[\x0c\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd]"
# The library counts a text whose first character is taken out as one that continues a word.
_LEADING = rf"\A{_REMOVED}"
_leading, _removed, _spaces = map(re.compile, (_LEADING, _REMOVED, _SPACES))
_nfkc = tokenizers.normalizers.NFKC()

NORMALIZERS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"Regex": _LEADING}, "content": " "},
    {"type": "Replace", "pattern": {"Regex": _REMOVED}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": _SPACES}, "content": " "},
    {"type": "NFKC"},
]
"""`normalize` as steps of a `tokenizer.json`."""


def normalize(text: str) -> str:
    """The text in Unicode's form NFKC, without control characters, and with plain spaces in place of others: what
    SentencePiece's `nmt_nfkc` does, except that newlines, tabs and carriage returns stay, and that a control character
    at the very beginning becomes a space."""
    text = _spaces.sub(" ", _removed.sub("", _leading.sub(" ", text)))
    if unicodedata.is_normalized("NFKC", text):
        return text
    # The library of the export, whose tables are of another version of Unicode than Python's; line by line, since few
    # lines need it and it is slow.
    return "".join(
        line if unicodedata.is_normalized("NFKC", line) else _nfkc.normalize_str(line)
        for line in text.splitlines(keepends=True)
    )
