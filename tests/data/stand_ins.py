"""A tokenizer whose ids are bytes + 16, without white space, and token stores of it."""

from __future__ import annotations

import numpy as np

from jaxlm.data.build import StoreBuild
from jaxlm.data.fingerprint import survey
from jaxlm.data.readers import Piece
from jaxlm.tokenizers.vocabulary import Vocabulary

EOS = 3


class ByteTokenizer:
    fingerprint = "bytes"
    is_byte_level = False
    vocabulary = Vocabulary(
        size=272, special=np.arange(272) < 16, word_start=np.arange(272) >= 16, sentence_end=np.zeros(272, bool), pad=0,
        eos=EOS,
    )

    def require_equal_ids(self, texts):
        pass

    def encode_arrays(self, texts, *, num_threads=0):
        return [np.frombuffer("".join(text.split()).encode(), np.uint8).astype(np.int32) + 16 for text in texts]


def whole(documents):
    """Return documents as pieces, one each."""
    return [Piece(text, True, True) for text in documents]


def store_of(folder, documents, held_out=0.0, tokenizer=None, sentences=False):
    return build_store(folder, whole(documents), tokenizer or ByteTokenizer(), held_out, sentences=sentences)


def build_store(folder, pieces, tokenizer=None, held_out=0.0, text=None, **named):
    """Return the store of a text in one file; `text` is another survey than its own."""
    pieces = pieces if text else list(pieces)
    text, tokenizer = text or survey(pieces), tokenizer or ByteTokenizer()
    return StoreBuild(str(folder), [pieces], text, tokenizer, held_out, **named).finish()


def ids(text):
    return ByteTokenizer().encode_arrays([text])[0]
