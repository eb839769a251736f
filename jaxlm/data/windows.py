"""Windows of one length of a split of a token store, read many at a time.

Offsets of documents are looked up in two stages: every `_STRIDE`-th is in memory, and so are all of them unless there
are very many. Both stages are array operations on a whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxlm.data.arrays import FlatArray
from jaxlm.errors import UserError
from jaxlm.types import TokenBatch

PACKINGS = ("document", "packed", "packed-eos", "stream", "stream-both-ways")
_STRIDE = 256
_RESIDENT = 1 << 23  # documents whose offsets are kept in memory: 64 MB
_AT_ONCE = 1 << 17  # offsets read at a time when a split is opened
_NUMBERS = 1 << 30  # of documents, in rows


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a token store.

    tokens: uint16 or uint32. offsets: int64, one more than documents; document d is tokens offsets[d] to
    offsets[d + 1] - 1, never empty.
    """

    name: str
    documents: int
    num_tokens: int
    text_bytes: int
    tokens: FlatArray
    offsets: FlatArray


class _Offsets:
    """Offsets of documents by number."""

    def __init__(self, split: Split) -> None:
        self.documents = split.documents
        self._array = split.offsets
        self._held = split.offsets.read(0, split.documents + 1) if split.documents < _RESIDENT else None

    def from_each(self, first: np.ndarray, count: int) -> np.ndarray:
        """`count` offsets from each document `first` on: int64 [firsts, count]; past the end they repeat the last."""
        number = first[:, None] + np.arange(count)
        if self._held is not None:
            return self._held[np.minimum(number, self.documents)]
        offsets = self._array.windows(first, count)
        past = number > self.documents
        if past.any():
            offsets[past] = self._array.read(self.documents, self.documents + 1)[0]
        return offsets

    def every(self, stride: int, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Sums of measure(lengths) over the first k * stride documents, k = 0, 1, ...: int64 [blocks + 1]."""
        sums = [np.zeros(1, np.int64)]
        for start in range(0, self.documents, _AT_ONCE):
            values = measure(np.diff(self._array.read(start, min(start + _AT_ONCE, self.documents) + 1)))
            sums.append(np.add.reduceat(values, np.arange(0, len(values), stride)))
        return np.cumsum(np.concatenate(sums))


def windows_of(
    split: Split, length: int, packing: str, *, pad: int, eos: int, stride: int | None = None
) -> DocumentWindows | PackedWindows:
    """pad, eos: ids, -1 where the tokenizer has none. stride: of a stream. Raises UserError for an unknown packing or a
    missing `eos`."""
    if packing not in PACKINGS:
        raise UserError(f"{packing!r} is no packing; choose one of {', '.join(PACKINGS)}.")
    if packing == "document":
        return DocumentWindows(split, length, max(pad, 0))
    if packing != "packed" and eos < 0:
        raise UserError(
            "The tokenizer has no end-of-sequence symbol, which packing documents with one between them needs; "
            "choose a tokenizer that has it, or train one with `jaxlm tokenizer train`."
        )
    stride = stride if packing.startswith("stream") else None
    return PackedWindows(split, length, max(pad, 0), None if packing == "packed" else eos, stride)


class DocumentWindows:
    """Windows that hold tokens of one document.

    A document of n >= length tokens gives ceil(n / length) windows, the last one anchored to its end so that it is full
    too; a shorter one gives one window, padded; one under 2 tokens gives none.
    """

    def __init__(self, split: Split, length: int, pad: int) -> None:
        self.length, self._pad = length, pad
        self._tokens = split.tokens
        self._offsets = _Offsets(split)
        self._before = self._offsets.every(_STRIDE, self._windows)
        self.count = int(self._before[-1])

    def _windows(self, lengths: np.ndarray) -> np.ndarray:
        return np.where(lengths < 2, 0, -(-lengths // self.length))

    def read(self, index: np.ndarray) -> TokenBatch:
        """index: int [batch], -1 for an empty row. Returns int32 [batch, length] twice."""
        used = index >= 0
        start, size, document = np.zeros((3, len(index)), np.int64)
        start[used], size[used], document[used] = self._locate(index[used])
        place = np.arange(self.length)
        real = place < size[:, None]
        tokens = self._tokens.windows(start, self.length)
        segments = np.where(real, 1 + document[:, None] % _NUMBERS, 0)
        return TokenBatch(np.where(real, tokens, self._pad).astype(np.int32), segments.astype(np.int32))

    def _locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where windows begin in the tokens, how many tokens they hold, and of which document."""
        block = np.searchsorted(self._before, index, side="right") - 1
        near = self._offsets.from_each(block * _STRIDE, _STRIDE + 1)
        lengths = np.diff(near)
        ends = self._before[block][:, None] + np.cumsum(self._windows(lengths), axis=1)
        document = (ends <= index[:, None]).sum(axis=1)
        rows = np.arange(len(index))
        length = lengths[rows, document]
        number = index - (ends[rows, document] - self._windows(length))
        start = np.minimum(number * self.length, np.maximum(length - self.length, 0))
        return near[rows, document] + start, np.minimum(length, self.length), block * _STRIDE + document


class PackedWindows:
    """Windows of the stream of all documents, with `eos` after each if it is given; without padding. A window begins
    `stride` tokens after the one before it, by default where that ends.

    What is left at the end of the stream and does not fill a window is left out, unless it is all there is. The eos
    tokens are not stored: document d begins at offset[d] + d of a stream that has them.
    """

    def __init__(self, split: Split, length: int, pad: int, eos: int | None, stride: int | None = None) -> None:
        self.length, self._pad, self._eos, self._stride = length, pad, eos, stride or length
        self._extra = 0 if eos is None else 1
        self._tokens = split.tokens
        self._offsets = _Offsets(split)
        self._before = self._offsets.every(_STRIDE, lambda lengths: lengths + self._extra)
        self._size = int(self._before[-1])
        self.count = 0 if self._size < 2 else max(1, 1 + (self._size - length) // self._stride)

    def read(self, index: np.ndarray) -> TokenBatch:
        """index: int [batch], -1 for an empty row. Returns int32 [batch, length] twice."""
        used = index >= 0
        start = np.where(used, index, 0) * self._stride
        place = np.arange(self.length)
        real = used[:, None] & (start[:, None] + place < self._size)
        first, segment, is_end = self._documents(start)
        tokens = self._tokens.windows(start - self._extra * first, self.length)
        if self._eos is not None:  # each end before a place moves what is stored by one
            tokens = np.take_along_axis(tokens, place - (segment - 1), axis=1)
            tokens = np.where(is_end, self._eos, tokens)
        return TokenBatch(
            np.where(real, tokens, self._pad).astype(np.int32), np.where(real, segment, 0).astype(np.int32)
        )

    def _documents(self, start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For windows that begin at `start`: the number of the first document, [batch]; and for every position,
        [batch, length] each, the number of its document in the window, from 1, and whether it is an eos."""
        rows = np.arange(len(start))[:, None]
        block = np.searchsorted(self._before, start, side="right") - 1
        # A window touches at most `length` documents after its first, for none is empty.
        count = _STRIDE + self.length + 1
        number = block[:, None] * _STRIDE + np.arange(count)
        begins = self._offsets.from_each(block * _STRIDE, count)
        begins = begins + self._extra * np.minimum(number, self._offsets.documents)
        relative = begins - start[:, None]
        first = block * _STRIDE + (relative <= 0).sum(axis=1) - 1
        marks = np.zeros((len(start), self.length + 1), np.int64)
        inside = (relative > 0) & (relative <= self.length) & (number <= self._offsets.documents)
        marks[np.broadcast_to(rows, relative.shape)[inside], relative[inside]] = 1
        segment = 1 + np.cumsum(marks[:, :-1], axis=1)
        is_end = (marks[:, 1:] == 1) & (self._extra == 1)
        return first, segment, is_end
