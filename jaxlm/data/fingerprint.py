"""Fingerprints: a hash of the documents of a text, and the state of a file.

The hash is computed while the documents are read. The state tells without a full read whether a file has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import fsspec

from jaxlm.data.mentions import Mentions, divide_mentions
from jaxlm.data.readers import NO_TEXT, Piece
from jaxlm.paths import in_bucket
from jaxlm.tokenizers.tokenizer import split_sentences

SPLIT_HASH_BITS = 64
_LEAST = 1 << 15  # bytes to hold out at least: some 8,000 tokens of English
_space = re.compile(r"\s")


def file_state(path: str) -> list[int | str]:
    """Return the size and the times of a file. One with an equal state need not be read again.

    An edit that keeps size and modification time changes the change time. The state of a file in a bucket is its size
    and the server's tag of its contents.
    """
    if in_bucket(path):
        store, name = fsspec.core.url_to_fs(path)
        info = store.info(name)
        return [info["size"], info.get("etag") or info["ETag"]]  # of Google Cloud Storage; of S3
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


class TextHash:
    """Hash of the documents of a text in order; the hash of each document decides whether it is held out.

    Attributes:
        digest: hash of the last whole document.
        documents: number of whole documents.
        bytes: position in the text, in UTF-8.
        mentions: number of mentions of entities.
    """

    def __init__(self, start: int = 0) -> None:
        """Start at a document that begins with byte `start` of the text."""
        self._all = hashlib.sha256()
        self._document = hashlib.sha256()
        self._split_hash = 0
        self.digest = b""
        self.documents = 0
        self.bytes = start
        self.mentions = 0

    def add(self, piece: Piece) -> int:
        """Add a piece and return the split hash of its document.

        The split hash is 64 bits of a hash of the first piece's text, so it is known before the rest of the document.
        """
        data = piece.text.encode()
        if piece.first:
            self._document = hashlib.sha256(data)
            self._split_hash = int.from_bytes(self._document.digest()[:8], "little")
        else:
            self._document.update(data)
        if piece.mentions:
            self._document.update(json.dumps(piece.mentions).encode())
        self.mentions += len(piece.mentions)
        self.bytes += len(data)
        if piece.last:
            self.digest = self._document.digest()
            self._all.update(self.digest)
            self.documents += 1
        return self._split_hash

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the documents, independent of their distribution over files."""
        return self._all.hexdigest()


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts of a text, from one pass over it.

    Attributes:
        fingerprint: hash of all documents in order.
        documents: number of documents.
        bytes: size in UTF-8.
        lowest_route: lowest split hash of a document; the name is a key of the cached survey.
        highest_route: highest split hash of a document.
        least_below: smallest threshold of split hashes that holds out at least _LEAST bytes (of a small text, a tenth);
            0 if the documents below it are more than a fifth of the text.
        mentions: number of mentions of entities.
        starts: first byte of each file.
        blank: number of rows without text, which are left out.
    """

    fingerprint: str
    documents: int
    bytes: int
    lowest_route: int
    highest_route: int
    least_below: int
    mentions: int = 0
    starts: Sequence[int] = (0,)
    blank: int = 0


def survey(*files: Iterable[Piece]) -> Survey:
    """Read the files of a text and return its survey."""
    text, size, starts, blank = TextHash(), 0, [], 0
    lowest, highest = (1 << SPLIT_HASH_BITS) - 1, 0
    # (-split_hash, bytes) of the documents with the lowest hashes: a heap of _LEAST bytes.
    first: list[tuple[int, int]] = []
    held = 0  # their bytes

    def pieces() -> Iterator[Piece]:
        for file in files:
            starts.append(text.bytes)
            yield from file

    for piece in pieces():
        if piece == NO_TEXT:
            blank += 1
            continue
        before = text.bytes
        split_hash = text.add(piece)
        lowest, highest = min(lowest, split_hash), max(highest, split_hash)
        size += text.bytes - before
        if piece.last:
            heapq.heappush(first, (-split_hash, size))
            held, size = held + size, 0
            while held - first[0][1] >= _LEAST:
                held -= heapq.heappop(first)[1]
    least, held = 0, 0
    for negative, size in sorted(first, reverse=True):
        if held < min(_LEAST, text.bytes / 10):
            least, held = 1 - negative, held + size
    least = least if held <= text.bytes / 5 else 0
    return Survey(text.fingerprint, text.documents, text.bytes, lowest, highest, least, text.mentions, starts, blank)


class Part(NamedTuple):
    """Part of a piece that belongs to one split, usually the whole piece.

    Attributes:
        text: its text.
        is_held_out: whether it belongs to the held-out split.
        last: whether it ends a document of its split.
        mentions: mentions of entities in its text.
    """

    text: str
    is_held_out: bool
    last: bool
    mentions: Mentions = ()


def sentence_parts(part: Part) -> Iterator[Part]:
    """Yield the sentences of a part of a text, as documents of its split."""
    sentences = list(split_sentences(part.text))
    mentions = divide_mentions(part.mentions, map(len, sentences))
    for number, sentence in enumerate(sentences, 1):
        last = part.last or number < len(sentences)
        yield Part(sentence, part.is_held_out, last, next(mentions))


@dataclasses.dataclass(frozen=True)
class HeldOutRule:
    """The held-out text: documents with a split hash below `below`, and everything after byte `tail` of the text."""

    below: int
    tail: int

    @classmethod
    def of(cls, share: float, text: Survey) -> HeldOutRule:
        """Hold out a share of the documents by hash, or the tail of a text with few documents or large ones.

        At least _LEAST bytes are held out, but of a small text a tenth; whole documents make it a little more.
        """
        if share <= 0:
            return cls(0, text.bytes)
        share = max(share, min(0.1, _LEAST / text.bytes))
        below = max(round(share * (1 << SPLIT_HASH_BITS)), text.least_below)
        has_many = share * text.documents >= 4
        if has_many and text.least_below and text.lowest_route < below <= text.highest_route:
            return cls(below, text.bytes)
        return cls(0, text.bytes - round(share * text.bytes))

    def divide(self, piece: Piece, split_hash: int, start: int, end: int) -> list[Part]:
        """Split a piece where the tail begins.

        Args:
            piece: the piece.
            split_hash: split hash of its document.
            start: its first byte in the text.
            end: its last byte + 1.
        """
        if not start <= self.tail < end:
            is_held_out = split_hash < self.below or start >= self.tail
            return [Part(piece.text, is_held_out, piece.last, piece.mentions)]
        before = len(piece.text.encode()[: self.tail - start].decode(errors="ignore"))
        space = _space.search(piece.text, before)
        cut = space.start() if space else before
        head, tail = piece.text[:cut], piece.text[cut:]
        mentions = divide_mentions(piece.mentions, (len(head), len(tail)))
        return [Part(head, False, True, next(mentions)), Part(tail, True, piece.last, next(mentions))]


def split_documents(pieces: Iterable[Piece], rule: HeldOutRule) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield first byte and split hash of each document, and whether any of it is trained on and any held out."""
    seen, first, sides = TextHash(), 0, set()
    for piece in pieces:
        if piece != NO_TEXT:
            start = seen.bytes
            first, split_hash = start if piece.first else first, seen.add(piece)
            sides |= {part.is_held_out for part in rule.divide(piece, split_hash, start, seen.bytes) if part.text}
            if piece.last:
                yield first, split_hash, False in sides, True in sides
                sides = set()


def sample(pieces: Iterable[Piece], total: int, wanted: int) -> Iterator[str]:
    """Sample about `wanted` bytes evenly from a text of `total` bytes, or all of a smaller text.

    A sample consists of whole pieces of documents, or the beginnings of large pieces.
    """
    share = min(1.0, wanted / max(1, total))
    credit = 0.0
    for piece in pieces:
        credit += len(piece.text) * share
        if credit >= len(piece.text) - 0.5:
            credit -= len(piece.text)
            yield piece.text
        elif credit >= 4096:
            end = piece.text.rfind(" ", 0, int(credit))
            text = piece.text[: end if end > 0 else int(credit)]
            credit -= len(text)
            yield text
