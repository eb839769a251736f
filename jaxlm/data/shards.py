"""Shards: each holds the tokens of a part of a text, and depends on nothing but the part, the tokenizer and settings.

A shard is a folder of flat arrays (`jaxlm.data.arrays`) and facts, under a name that follows from what it depends on:

* tokens: uint16 or uint32, the ids of all documents;
* entities: uint32, for text with mentions: at the first token of a mention the place of its entity in the facts'
  `names`, from 1; else 0;
* ends: uint64, the end of each document in the tokens, or of each sentence where sentences are documents;
* sentences: uint32, the number of sentences of each document, only there;
* hashes: uint64, 64 bits of the SHA-256 of each document's text, or of its first piece;
* sizes: uint64, bytes of UTF-8 of each document;
* counts: uint32 [vocabulary], the count of each id.

A shard is complete if it has its `facts.json`. One that is there is not made again.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data.arrays import FACTS, ArrayWriter, FlatArray, read_facts, write_array, write_facts
from jaxlm.data.engine import Progress, Work
from jaxlm.data.mentions import Mentions, divide_mentions, first_tokens
from jaxlm.data.parts import Part
from jaxlm.data.readers import NO_TEXT, Piece
from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import Tokenizer, split_sentences
from jaxlm.tokenizers.unknown import NUM_WORDS, unknown_words

FORMAT = 1
LEAST = 1 << 15
"""Bytes of text to hold out at least: some 8,000 tokens of English."""
_GROUP = 1 << 18  # characters encoded at a time, since encodings take many bytes a token
# Of every 50th group, texts and their first characters with which the tokenizer is compared with its export.
_COMPARED_GROUPS, _COMPARED_TEXTS, _COMPARED_LENGTH = 50, 50, 1000
_ARRAYS = {"ends": ("uint64", "units"), "sentences": ("uint32", "documents"), "hashes": ("uint64", "documents"),
           "sizes": ("uint64", "documents"), "counts": ("uint32", "vocabulary")}
"""Types of arrays, and the facts that have their sizes."""
_space = re.compile(r"\s")
_PRIME = 2**255 - 19
_BASE = int.from_bytes(hashlib.sha256(b"jaxlm").digest(), "big") % _PRIME

@dataclasses.dataclass(frozen=True)
class Shards(Work):
    """The shards of one tokenizer and of its settings.

    Attributes:
        tokenizer: the tokenizer.
        sentences: whether each sentence is a document of the rows.
        cut: for text whose end is held out, the byte at which, or at the first white space after it, a document is
            divided; None for none.
    """

    tokenizer: Tokenizer
    sentences: bool = False
    cut: int | None = None

    def depends_on(self, part: Part) -> list[Any]:
        # 2: the sentences of another version of `split_sentences`
        return [FORMAT, part.name, self.tokenizer.fingerprint, 2 if self.sentences else False, self.cut]

    def write(self, folder: epath.Path, part: Part, progress: Progress) -> None:
        writer = _ShardWriter(folder, self, part.reader.has_mentions)
        for piece in part.pieces():
            progress(writer.add(piece))
        writer.close()


class _ShardWriter:
    """Writer of a shard from the pieces of its documents."""

    def __init__(self, folder: epath.Path, shards: Shards, has_mentions: bool) -> None:
        self._folder, self._shards, self._tokenizer, self._cut = folder, shards, shards.tokenizer, shards.cut
        vocabulary = self._tokenizer.vocabulary
        self._dtype = "uint16" if vocabulary.size <= 1 << 16 else "uint32"
        self._tokens = ArrayWriter(folder / "tokens", self._dtype)
        self._entities = ArrayWriter(folder / "entities", "uint32") if has_mentions else None
        self._names: dict[str, int] = {}  # of entities, with their places
        self._ends = ArrayWriter(folder / "ends", "uint64")
        self._arrays = {name: array.array("Q") for name in ("hashes", "sizes", "sentences")}
        self._counts = np.zeros(vocabulary.size, np.int64)
        self._waiting: list[tuple[str, bool, Mentions]] = []  # text, whether it ends a sentence or document, mentions
        self._characters = self._groups = 0
        self._words: dict[str, None] = {}
        self._document, self._hash = hashlib.sha256(), 0
        self._size = self._sentences = 0  # of the document
        self._digest = self._bytes = self._blank = self._mentions = self._whole = 0
        self._divided = -1

    def add(self, piece: Piece) -> int:
        """Add a piece, and return its size in bytes."""
        if piece == NO_TEXT:
            self._blank += 1
            return 0
        data = piece.text.encode()
        if piece.first:
            self._document = hashlib.sha256(data)
            self._hash = int.from_bytes(self._document.digest()[:8], "little")
        else:
            self._document.update(data)
        if piece.mentions:
            self._document.update(json.dumps(piece.mentions).encode())
        for text, last, mentions in self._divide(piece, data):
            self._add_text(text, last, mentions)
        self._bytes += len(data)
        if piece.last:
            self._whole += 1
            self._digest = (self._digest * _BASE + int.from_bytes(self._document.digest(), "big")) % _PRIME
        if self._characters >= _GROUP:
            self._encode()
        return len(data)

    def _divide(self, piece: Piece, data: bytes) -> list[tuple[str, bool, Mentions]]:
        """Return the text of a piece, whether it ends a document, and mentions; two of them where `cut` divides it."""
        if self._cut is None or not 0 <= self._cut - self._bytes < len(data):
            return [(piece.text, piece.last, piece.mentions)]
        before = len(data[: self._cut - self._bytes].decode(errors="ignore"))
        space = _space.search(piece.text, before, len(piece.text.rstrip()))
        place = space.start() if space else before
        self._divided = len(self._arrays["hashes"]) + 1
        head, tail = piece.text[:place], piece.text[place:]
        mentions = divide_mentions(piece.mentions, (len(head), len(tail)))
        return [(head, True, next(mentions)), (tail, piece.last, next(mentions))]

    def _add_text(self, text: str, last: bool, mentions: Mentions) -> None:
        parts = list(split_sentences(text)) if self._shards.sentences else [text]
        divided = divide_mentions(mentions, map(len, parts))
        for number, (part, own) in enumerate(zip(parts, divided, strict=True), 1):
            ends = last or number < len(parts)
            self._waiting.append((part, ends, own))
            self._sentences += ends
        self._characters += len(text)
        self._size += len(text.encode())
        if last:
            for name, value in (("hashes", self._hash), ("sizes", self._size), ("sentences", self._sentences)):
                self._arrays[name].append(value)
            self._size = self._sentences = 0

    def _encode(self) -> None:
        """Tokenize and write the texts that wait."""
        texts = [text for text, *_ in self._waiting]
        if self._groups % _COMPARED_GROUPS == 0:
            compared = texts[:: -(-len(texts) // _COMPARED_TEXTS)]
            self._tokenizer.require_equal_ids([text[:_COMPARED_LENGTH] for text in compared])
        self._groups += 1
        has_mentions = any(mentions for *_, mentions in self._waiting)
        found = self._tokenizer.encode_with_offsets(texts) if has_mentions else [
            (ids, None) for ids in self._tokenizer.encode_arrays(texts)
        ]
        sizes = np.array([len(ids) for ids, _ in found], np.int64)
        tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in found)])
        ends = self._tokens.size + np.cumsum(sizes)
        if self._entities is not None:
            self._add_entities(self._entities, found, len(tokens))
        self._ends.append(ends[np.array([ends_unit for _, ends_unit, _ in self._waiting], bool)])
        self._tokens.append(tokens)
        counts, unk = np.bincount(tokens, minlength=len(self._counts)), self._tokenizer.vocabulary.unk
        self._counts += counts
        if unk >= 0 and counts[unk] and len(self._words) < NUM_WORDS:
            unknown = (text for text, (ids, _) in zip(texts, found, strict=True) if unk in ids)
            self._words |= dict.fromkeys(unknown_words(self._tokenizer, unknown))
        self._waiting, self._characters = [], 0

    def _add_entities(self, file: ArrayWriter, found: list[tuple[np.ndarray, np.ndarray]], size: int) -> None:
        values, start = np.zeros(size, "uint32"), 0
        for (ids, offsets), (*_, mentions) in zip(found, self._waiting, strict=True):
            for token, entity in first_tokens(offsets, mentions) if mentions else ():
                values[start + token] = self._names.setdefault(entity, 1 + len(self._names))
            start += len(ids)
        self._mentions += int(np.count_nonzero(values))
        file.append(values)

    def close(self) -> None:
        """Finish the files; the facts are written last."""
        if self._waiting:
            self._encode()
        for file in filter(None, (self._tokens, self._ends, self._entities)):
            file.close()
        arrays = {name: np.array(values, "uint64") for name, values in self._arrays.items()}
        write_array(self._folder / "hashes", arrays["hashes"])
        write_array(self._folder / "sizes", arrays["sizes"])
        if self._shards.sentences:
            write_array(self._folder / "sentences", arrays["sentences"].astype("uint32"))
        if self._counts.max() >= 1 << 32:
            raise UserError("a file of the text has one token 4 billion times or more; divide it into several files.")
        write_array(self._folder / "counts", self._counts.astype("uint32"))
        facts = {
            "format": FORMAT, "dtype": self._dtype, "vocabulary": len(self._counts), "tokens": self._tokens.size,
            "units": self._ends.size, "documents": len(arrays["hashes"]), "bytes": self._bytes, "blank": self._blank,
            "mentions": self._mentions, "names": list(self._names), "whole": self._whole,
            "digest": f"{self._digest:064x}", "unknown_words": list(self._words)[:NUM_WORDS],
            "divided": self._divided,
        }
        write_facts(self._folder / FACTS, facts)


class Shard:
    """A complete shard, opened for reading.

    Attributes:
        path: its folder.
        facts: see `_ShardWriter.close`.
    """

    def __init__(self, path: epath.Path) -> None:
        """Read the facts; raise UserError if there are none, or they are damaged."""
        self.path, self.facts = path, read_facts(path / FACTS, FORMAT)

    def read(self, name: str) -> np.ndarray:
        """Return an array of the shard: uint64 of hashes, else int64."""
        dtype, size = _ARRAYS[name]
        values = FlatArray(self.path / name, dtype, self.facts[size]).read(0, self.facts[size])
        return values if name == "hashes" else values.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Facts of a text, from those of its shards.

    Attributes:
        digest: hash of all documents in order, independent of their distribution over parts.
        documents: number of documents.
        bytes: size in UTF-8.
        lowest: lowest hash of a document.
        highest: highest hash of a document.
        least_below: smallest threshold of hashes that holds out at least LEAST bytes (of a small text, a tenth); 0 if
            the documents below it are more than a fifth of the text.
    """

    digest: str
    documents: int
    bytes: int
    lowest: int
    highest: int
    least_below: int

    @classmethod
    def of(cls, shards: Iterator[tuple[Mapping[str, Any], np.ndarray, np.ndarray]]) -> Totals:
        """Add up shards in order, given the facts of each and the hashes and sizes of its documents that are kept."""
        digest = documents = size = highest = 0
        low, low_sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)  # of the lowest hashes, of LEAST bytes together
        for facts, hashes, sizes in shards:
            digest = (digest * pow(_BASE, facts["whole"], _PRIME) + int(facts["digest"], 16)) % _PRIME
            documents, size = documents + len(sizes), size + int(sizes.sum())
            highest = max(highest, int(hashes.max(initial=0)))
            is_low = hashes < low[-1] if low_sizes.sum() >= LEAST else slice(None)
            low, low_sizes = np.append(low, hashes[is_low]), np.append(low_sizes, sizes[is_low])
            order = np.argsort(low, kind="stable")
            order = order[: 1 + np.searchsorted(np.cumsum(low_sizes[order]), LEAST)]
            low, low_sizes = low[order], low_sizes[order]
        held = np.cumsum(low_sizes)
        last = np.searchsorted(held, min(LEAST, size / 10))
        least = 1 + int(low[last]) if size and held[last] <= size / 5 else 0
        return cls(f"{digest:064x}", documents, size, int(low[0]) if len(low) else 0, highest, least)
