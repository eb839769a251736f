"""Fixed-length windows of a split of a token store, read a batch at a time.

The document of a window is found in two stages, both array operations on a whole batch: by the sums over every
`STRIDE` documents, which are in memory, and then among these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from etils import epath

from jaxlm.data.arrays import STRIDE, FlatArray, Increasing, Spliced, write_array
from jaxlm.errors import UserError
from jaxlm.paths import new_folder
from jaxlm.types import TokenBatch

NUMBERS = 1 << 30  # document numbers in a row wrap around here
_AT_ONCE = 1 << 17  # offsets per read when windows are counted


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a token store.

    Attributes:
        documents: number of documents.
        num_tokens: number of tokens.
        text_bytes: bytes of text.
        tokens: uint16 or uint32 [num_tokens].
        offsets: int64 [documents + 1]; document d is tokens offsets[d] to offsets[d + 1] - 1, never empty.
        entities: int64 [num_tokens] for text with entities: the place of an entity in the names of all shards, from 1,
            where its mention begins; else 0.
        folder: folder of the split in the store.
    """

    documents: int
    num_tokens: int
    text_bytes: int
    tokens: Spliced
    offsets: Increasing
    entities: Spliced | None = None
    folder: epath.Path = epath.Path()

    def sums(self, name: str, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return `_sums` of a measure; of many documents the store keeps them under `name`."""
        folder, count = self.folder / name, -(-self.documents // STRIDE) + 1
        file = folder / "sums"
        if not self.offsets.is_resident and file.exists():
            return FlatArray(file, "int64", count).read(0, count)
        sums = _sums(self.offsets, measure)
        if not self.offsets.is_resident:
            with contextlib.suppress(UserError), new_folder(folder, file.name) as new:  # a store may be read-only
                write_array(new / file.name, sums)
        return sums


def _sums(offsets: Increasing, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the sums of measure(lengths) over the first k * STRIDE documents, for all k: int64 [blocks + 1]."""
    sums = [np.zeros(1, np.int64)]
    for start in range(0, offsets.size, _AT_ONCE):
        values = measure(np.diff(offsets.read(start, min(start + _AT_ONCE, offsets.size) + 1)))
        sums.append(np.add.reduceat(values, np.arange(0, len(values), STRIDE)))
    return np.cumsum(np.concatenate(sums))


class DocumentWindows:
    """Windows with tokens of a single document.

    A document of n >= length tokens has ceil(n / length) windows; the last one is aligned to its end, so it is full. A
    shorter document has one padded window, and a document with fewer than 2 tokens has none.
    """

    def __init__(self, split: Split, length: int, pad: int, entity_ids: np.ndarray | None = None) -> None:
        """Count the windows.

        Args:
            split: split of a token store.
            length: tokens of a window.
            pad: id of padding.
            entity_ids: result of `jaxlm.data.store.Store.entity_ids`; None for windows without entities.
        """
        self.length, self._pad, self._entity_ids = length, pad, entity_ids
        self._tokens, self._entities = split.tokens, split.entities
        self._split, self._offsets = split, split.offsets
        self._before = split.sums(f"windows-{length}", self._windows)
        self.count = int(self._before[-1])

    @functools.cached_property
    def mean_length(self) -> float:
        """Mean number of tokens of a window."""
        def tokens_of(sizes: np.ndarray) -> np.ndarray:
            return self._windows(sizes) * np.minimum(sizes, self.length)

        tokens = self._split.sums(f"tokens-{self.length}", tokens_of)
        return int(tokens[-1]) / max(1, self.count)

    def _windows(self, lengths: np.ndarray) -> np.ndarray:
        return np.where(lengths < 2, 0, -(-lengths // self.length))

    def read(self, index: np.ndarray) -> TokenBatch:
        """Read the windows `index`, int [batch], where -1 stands for an empty row."""
        used = index >= 0
        start, size, document = np.zeros((3, len(index)), np.int64)
        start[used], size[used], document[used] = self._locate(index[used])
        position = np.arange(self.length)
        is_token = position < size[:, None]
        tokens = self._tokens.windows(start, self.length)
        segments = np.where(is_token, 1 + document[:, None] % NUMBERS, 0)
        entities = None
        if self._entity_ids is not None:
            entities = np.where(is_token, self._entity_ids[self._entities.windows(start, self.length)], -1)
        return TokenBatch(np.where(is_token, tokens, self._pad).astype(np.int32), segments.astype(np.int32), entities)

    def _locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the start of each window in the tokens, its number of tokens, and its document."""
        block = np.searchsorted(self._before, index, side="right") - 1
        near = self._offsets.windows(block * STRIDE, STRIDE + 1)
        lengths = np.diff(near)
        ends = self._before[block][:, None] + np.cumsum(self._windows(lengths), axis=1)
        document = (ends <= index[:, None]).sum(axis=1)
        rows = np.arange(len(index))
        length = lengths[rows, document]
        number = index - (ends[rows, document] - self._windows(length))
        start = np.minimum(number * self.length, np.maximum(length - self.length, 0))
        return near[rows, document] + start, np.minimum(length, self.length), block * STRIDE + document


class PackedWindows:
    """Windows of the concatenation of all documents, without padding.

    An incomplete window at the end is dropped, unless it is the only one. A document that does not fit is cut at the
    end of a window and goes on in another one. The eos tokens are not stored: with them, document d begins at
    offset[d] + d; with begin tokens too, at offset[d] + 2 d.

    With `room`, a window counts that many more tokens after each document, for symbols that the model's rows have
    between documents. It holds the tokens of the documents alone, and padding in place of the others.

    Attributes:
        mean_length: mean number of tokens of a window.
    """

    def __init__(
        self, split: Split, length: int, pad: int, eos: int | None, stride: int | None = None,
        entity_ids: np.ndarray | None = None, room: int = 0, begin: int | None = None,
    ) -> None:
        """Count the windows.

        Args:
            split: split of a token store.
            length: tokens of a window.
            pad: id of padding.
            eos: id of the token after each document; None for none.
            stride: tokens between the starts of successive windows; the default is `length`.
            entity_ids: result of `jaxlm.data.store.Store.entity_ids`; None for windows without entities.
            room: number of further tokens after each document; only without eos.
            begin: id of the token before each document; None for none; only with eos.
        """
        self.length, self._pad, self._eos, self._begin, self._stride = length, pad, eos, begin, stride or length
        self._after = room if eos is None else 1
        self._extra = self._after + (begin is not None)
        self._tokens, self._entities, self._entity_ids = split.tokens, split.entities, entity_ids
        self._offsets = split.offsets
        blocks = np.minimum(np.arange(len(self._offsets.samples)) * STRIDE, split.documents)
        self._before = self._offsets.samples + self._extra * blocks
        self._size = int(self._before[-1])
        self.count = 0 if self._size < 2 else max(1, 1 + (self._size - length) // self._stride)
        share = split.num_tokens / max(1, self._size) if eos is None else 1.0  # the rest is room
        self.mean_length = min(length, self._size) * share

    def read(self, index: np.ndarray) -> TokenBatch:
        """Read the windows `index`, int [batch], where -1 stands for an empty row."""
        used = index >= 0
        start = np.where(used, index, 0) * self._stride
        position = np.arange(self.length)
        is_token = used[:, None] & (start[:, None] + position < self._size)
        first, segment, is_end, is_start = self._documents(start)
        start = start - self._extra * first - (self._begin is not None)
        if self._extra and self._eos is None:
            # Move the text together; a window may begin within the room that follows a document.
            leading = np.cumprod(is_end, axis=1).sum(axis=1)
            is_text, is_end = is_token & ~is_end, np.zeros_like(is_end)
            is_token = position < is_text.sum(axis=1, keepdims=True)
            segment[is_token] = segment[is_text]
            segment -= leading[:, None] > 0
            # Of a room that the window begins in, `extra - leading` positions lie before it and hold no tokens.
            start -= (self._extra - leading) % self._extra

        def stored(array: Spliced) -> np.ndarray:
            values = array.windows(np.maximum(start, 0), self.length)
            # Each symbol before a position shifts the stored tokens by one.
            place = position - self._extra * (segment - 1) + np.minimum(start, 0)[:, None]
            return values if self._eos is None else np.take_along_axis(values, np.maximum(place, 0), axis=1)

        tokens = stored(self._tokens) if self._eos is None else np.where(is_end, self._eos, stored(self._tokens))
        if self._begin is not None:
            is_begin = np.diff(segment, axis=1, prepend=1 - is_start[:, None]) > 0
            tokens, is_end = np.where(is_begin, self._begin, tokens), is_end | is_begin
        entities = None
        if self._entity_ids is not None:
            entities = np.where(is_token & ~is_end, self._entity_ids[stored(self._entities)], -1)
        return TokenBatch(
            np.where(is_token, tokens, self._pad).astype(np.int32), np.where(is_token, segment, 0).astype(np.int32),
            entities,
        )

    def _documents(self, start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Locate the documents of the windows that begin at `start`.

        Returns:
            The number of the first document, [batch]; for each position, the number of its document within the window,
            from 1, [batch, length]; whether the position is an eos, or room, [batch, length]; and whether the window
            begins where its first document does, [batch].
        """
        rows = np.arange(len(start))[:, None]
        block = np.searchsorted(self._before, start, side="right") - 1
        # A window touches at most `length` documents after its first one, since no document is empty.
        count = STRIDE + self.length + 1
        number = block[:, None] * STRIDE + np.arange(count)
        begins = self._offsets.windows(block * STRIDE, count)
        begins = begins + self._extra * np.minimum(number, self._offsets.size)
        relative = begins - start[:, None]
        first = block * STRIDE + (relative <= 0).sum(axis=1) - 1
        marks = np.zeros((len(start), self.length + max(1, self._extra)), np.int64)
        inside = (relative > 0) & (relative < marks.shape[1]) & (number <= self._offsets.size)
        marks[np.broadcast_to(rows, relative.shape)[inside], relative[inside]] = 1
        segment = 1 + np.cumsum(marks[:, : self.length], axis=1)
        is_end = np.zeros_like(segment, bool)
        for ahead in range(1, self._after + 1):
            is_end |= marks[:, ahead : ahead + self.length] == 1
        return first, segment, is_end, (relative == 0).any(axis=1)
