"""A tokenizer whose ids are bytes + 16, without white space, a reader of pieces that are given, and token stores."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from etils import epath

from jaxlm.data.parts import Part, Reader
from jaxlm.data.readers import Piece
from jaxlm.data.shards import Shards
from jaxlm.data.splits import SplitText
from jaxlm.data.store import Store, is_finished, write_store
from jaxlm.tokenizers.vocabulary import Vocabulary

EOS, BEGIN = 3, 4


class ByteTokenizer:
    fingerprint = "bytes"
    vocabulary = Vocabulary(
        size=272, special=np.arange(272) < 16, word_start=np.arange(272) >= 16, sentence_end=np.zeros(272, bool), pad=0,
        eos=EOS,
    )

    def require_equal_ids(self, texts):
        pass

    def encode_arrays(self, texts):
        return [np.frombuffer("".join(text.split()).encode(), np.uint8).astype(np.int32) + 16 for text in texts]


class OffsetTokenizer(ByteTokenizer):
    """One token for each character that is not white space."""

    def encode_with_offsets(self, texts):
        places = [[i for i, char in enumerate(text) if not char.isspace()] for text in texts]
        at = [np.array([(i, i + 1) for i in row], np.int32).reshape(-1, 2) for row in places]
        return list(zip(self.encode_arrays(texts), at, strict=True))


@dataclasses.dataclass(frozen=True)
class Given(Reader):
    """Reader of pieces that are given."""

    given: tuple[Piece, ...] = ()
    has_mentions: ClassVar[bool] = True

    def read(self, source: str, start: int = 0, end: int | None = None) -> Iterator[Piece]:
        yield from self.given


def part_of(pieces: Iterable[Piece], reader: type[Given] = Given) -> Part:
    """Return a part of a text that is given."""
    pieces = tuple(pieces)
    state = hashlib.sha256(repr(pieces).encode("utf-8", "surrogatepass")).hexdigest()
    return Part(("given.txt",), reader(given=pieces), state, sum(len(piece.text.encode()) for piece in pieces))


def parts_of(pieces: Iterable[Piece], count: int = 3) -> list[Part]:
    """Return a text in up to `count` parts, which begin with a document."""
    pieces = list(pieces)
    firsts = [number for number, piece in enumerate(pieces) if piece.first]
    starts = sorted({firsts[len(firsts) * k // count] for k in range(count)})
    return [part_of(pieces[start:end]) for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True)]


def whole(documents):
    """Return documents as pieces, one each."""
    return [Piece(text, True, True) for text in documents]


def split_text(folder, pieces, held_out=0.0, tokenizer=None, sentences=False, parts=3, removed=()):
    """Return the shards of a text, in the folder `shards` beside `folder`, and its documents' splits."""
    shards = Shards(str(Path(folder).parent / "shards"), tokenizer or ByteTokenizer(), sentences)
    found = parts if isinstance(parts, list) else parts_of(pieces, parts)
    for part in found:
        if not shards.is_done(part):
            shards.make(part)
    return shards, SplitText.of(found, shards, held_out, removed)


def store_of(folder, documents, held_out=0.0, tokenizer=None, sentences=False, parts=3):
    return build_store(folder, whole(documents), tokenizer, held_out, sentences, parts)


def build_store(folder, pieces, tokenizer=None, held_out=0.0, sentences=False, parts=3, removed=()):
    """Return the store of a text of several shards."""
    shards, text = split_text(folder, pieces, held_out, tokenizer, sentences, parts, removed)
    if not is_finished(folder):
        write_store(epath.Path(folder), "", held_out, shards, text)
    return Store(folder, shards.folder, [BEGIN])


def ids(text):
    return ByteTokenizer().encode_arrays([text])[0]


def contents(split):
    """Return the tokens of each document."""
    ends, tokens = split.offsets.read(0, split.documents + 1), split.tokens.read(0, split.num_tokens)
    return [tokens[start:end].tolist() for start, end in itertools.pairwise(ends)]


def files_of(folder):
    """Return the bytes of all files below a folder by their relative paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
