"""Documents that repeat an earlier one, word for word or nearly, which are left out of a text.

Exact duplicates have the same 128-bit hash of their text in NFC with white space collapsed. Near ones have MinHash
signatures (Broder 1997) that agree in one of `BANDS` bands of `ROWS` hashes of the documents' shingles: with Jaccard
similarity s, probability 1 - (1 - s^ROWS)^BANDS, 0.21 at 0.6, 0.77 at 0.75 and 0.99 at 0.85, as for FineWeb (Penedo et
al. 2024). A document is left out if an earlier one, by part and then by place, shares its exact hash or a band with it
(README.md tells how this differs from groups of documents). The keys of a part are computed once, like a shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from etils import epath

from jaxlm.data.arrays import FACTS, FlatArray, read_facts, write_array, write_facts
from jaxlm.data.engine import Progress, Work
from jaxlm.data.parts import Part
from jaxlm.data.readers import NO_TEXT, PIECE, Piece
from jaxlm.errors import UserError
from jaxlm.paths import at_once, cause, new_folder

Deduplicate = Literal["off", "exact", "near"]
BANDS, ROWS = 14, 8
SHINGLE = 5  # words
FORMAT = 2
_GROUP = 1 << 16  # characters of documents that are hashed together
_AT_ONCE = 16  # hashes of all shingles of a group that are computed together
_SORTED = 1 << 24  # keys that are sorted in memory
_GROUPED = 1 << 22  # keys that are distributed over the files together
# Scripts without spaces, of which each character is a word: Thai to Lao, Burmese, Khmer, kana and Han.
_UNSPACED = ((0xE00, 0xEFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF),
             (0x20000, 0x3FFFF))
_R = 0x9E3779B97F4A7C15
_LONGEST = 2 * PIECE + 1  # characters of a normalized piece that are hashed together
_POWERS, _INVERSES = (np.cumprod(np.array([1] + [r] * (_GROUP + _LONGEST), np.uint64))
                      for r in (_R, pow(_R, -1, 1 << 64)))
_A, _B = np.random.SeedSequence(0).generate_state(2 * BANDS * ROWS, np.uint32).reshape(2, -1, 1)
_A |= 1
_ODD = np.random.SeedSequence(1).generate_state(SHINGLE + ROWS, np.uint64) | 1  # multipliers mod 2^64
_NONE = np.full(BANDS * ROWS, (1 << 32) - 1, np.uint32)
_Text = tuple[str, np.ndarray | None]


@functools.lru_cache(maxsize=1)
def _kinds() -> np.ndarray:
    """Return for each code point 1 for a letter, digit or _, 2 for a word by itself, 3 for a mark or joiner, else 0."""
    kinds = np.char.isalnum(np.arange(sys.maxunicode + 1, dtype=np.uint32).view("U1")).astype(np.uint8)
    marks = [code for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M"]
    kinds[ord("_")] = 1
    kinds[[0x200C, 0x200D, *marks]] = 3
    for first, last in _UNSPACED:
        kinds[first : last + 1] = 2
    return kinds


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return hashes of the words of texts, uint64 [words], and the number of words of each text, int64 [texts].

    A hash is the sum of code · r^place of the characters of a word, mod 2^64, with r odd.
    """
    codes = np.frombuffer("\0".join([*texts, ""]).encode("utf-32-le"), "<u4")
    kinds = _kinds()[codes]
    base = np.maximum.accumulate(np.where(kinds < 3, np.arange(len(kinds)), 0))
    kinds = np.where(kinds == 3, kinds[base] == 1, kinds)  # a mark is of the word before it, and begins none
    joined = np.zeros(len(codes) + 1, bool)  # a character and the one before it are in one word
    np.logical_and(kinds[1:] == 1, kinds[:-1] == 1, out=joined[1:-1])
    begins, ends = np.flatnonzero(kinds > joined[:-1]), np.flatnonzero(kinds > joined[1:]) + 1
    sums = np.append(np.uint64(0), np.cumsum(codes * _POWERS[: len(codes)]))
    counts = np.diff(np.searchsorted(begins, np.cumsum([len(text) + 1 for text in texts])), prepend=0)
    return (sums[ends] - sums[begins]) * _INVERSES[begins], counts


def minima(words: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the minima over the shingles x of each document of the hashes (x xor b) a mod 2^32.

    Args:
        words: hashes of words, uint64; a shingle is the upper half of a sum of `SHINGLE` of them times odd numbers.
        ends: end of each document in the words, of which it has `SHINGLE` or more: int64 [documents].

    Returns:
        uint32 [documents, BANDS * ROWS].
    """
    count = len(words) - SHINGLE + 1
    x = (sum(words[k : k + count] * _ODD[k] for k in range(SHINGLE)) >> 32).astype(np.uint32)
    x = np.delete(x, ends[:-1, None] - np.arange(1, SHINGLE))  # without those that reach into the next document
    starts = np.append(0, ends[:-1] - (SHINGLE - 1) * np.arange(1, len(ends)))
    hashes = (slice(first, first + _AT_ONCE) for first in range(0, len(_A), _AT_ONCE))
    return np.concatenate([np.minimum.reduceat((x ^ _B[own]) * _A[own], starts, axis=1) for own in hashes]).T


def _normalized(pieces: Iterable[Piece], is_near: bool) -> Iterator[_Text]:
    """Yield text in NFC, for near duplicates without case, and the exact key of a document at its end."""
    exact = hashlib.blake2b()
    for piece in pieces:
        if piece == NO_TEXT:
            continue
        if piece.first:
            exact = hashlib.blake2b(digest_size=16)
        text = unicodedata.normalize("NFC", piece.text)
        exact.update((" ".join(text.split()) + " ").encode())
        text = text.casefold() if is_near else text
        starts = range(0, len(text), _LONGEST) or range(1)
        for start in starts:
            ends = piece.last and start == starts[-1]
            yield text[start : start + _LONGEST], np.frombuffer(exact.digest(), np.uint64) if ends else None


def document_keys(pieces: Iterable[Piece], is_near: bool) -> Iterator[np.ndarray]:
    """Yield keys of documents, some at a time: uint64 [documents, 2], the exact ones, and for near ones BANDS more."""
    low, rest = _NONE, np.zeros(0, np.uint64)  # of the document that has begun: its minima so far, and its last words
    for group in _groups(_normalized(pieces, is_near)):
        texts, exact = zip(*group, strict=True)
        keys = np.array([key for key in exact if key is not None], np.uint64).reshape(-1, 2)
        if is_near:
            words, counts = word_hashes(texts)
            ends = (len(rest) + np.cumsum(counts))[np.array([key is not None for key in exact])]
            words = np.concatenate([rest, words])
            rest = words[ends[-1] if len(ends) else 0 :][-SHINGLE:]
            ends = np.append(ends, len(words))
            # A document of less than a shingle is filled up with zeros; one without words gets its exact key as words.
            missing = np.maximum(SHINGLE - np.diff(ends, prepend=0), 0)
            filling, empty = np.zeros(missing.sum(), np.uint64), np.flatnonzero(missing[:-1] == SHINGLE)
            filling[(np.cumsum(missing)[empty] - SHINGLE)[:, None] + np.arange(2)] = keys[empty]
            least = minima(np.insert(words, np.repeat(ends, missing), filling), ends + np.cumsum(missing))
            least[0] = np.minimum(least[0], low)
            low = least[-1] if len(rest) == SHINGLE else _NONE
            keys = np.hstack([keys, least[:-1].reshape(-1, BANDS, ROWS).astype(np.uint64) @ _ODD[SHINGLE:]])
        yield keys


def _groups(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    group, size = [], 0
    for each in texts:
        group.append(each)
        size += len(each[0]) + 1
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclasses.dataclass(frozen=True)
class Keys(Work):
    """The keys of the documents of parts.

    Attributes:
        is_near: whether near duplicates are looked for.
    """

    is_near: bool

    def depends_on(self, part: Part) -> list[Any]:
        return [self.version, part.name, self.is_near]

    def write(self, folder: epath.Path, part: Part, progress: Progress) -> None:
        def pieces() -> Iterator[Piece]:
            for piece in part.pieces():
                yield piece
                progress(len(piece.text.encode()))

        none = np.zeros((0, self.num_columns + 1), np.uint64)
        keys = np.concatenate([none, *document_keys(pieces(), self.is_near)])
        write_array(folder / "keys", keys.T.ravel())
        write_facts(folder / FACTS, {"format": FORMAT, "documents": len(keys)})

    @property
    def version(self) -> int:
        """Version of the keys; near ones of version 2 had words divided by combining marks."""
        return FORMAT + self.is_near

    @property
    def num_columns(self) -> int:
        """Number of the keys of a document: the exact one, and its bands."""
        return 1 + BANDS * self.is_near

    def num_documents(self, part: Part) -> int:
        """Return the number of documents of a part whose keys are complete."""
        return read_facts(self.path(part) / FACTS, FORMAT)["documents"]

    def read(self, part: Part, size: int, column: int) -> np.ndarray:
        """Return a key of each of the `size` documents of a part: uint64 [size, 2] the exact ones, else [size, 1]."""
        start, width = (column + 1, 1) if column else (0, 2)
        values = FlatArray(self.path(part) / "keys", "uint64", size * (self.num_columns + 1))
        return values.read(start * size, (start + width) * size).reshape(width, size).T


def find_duplicates(keys: Keys, parts: Sequence[Part], folder: epath.Path) -> list[np.ndarray]:
    """Return which documents of each part repeat an earlier one: bool [documents].

    The keys are sorted in files, some millions at a time. The result is kept in `folder`.
    """
    sizes = list(at_once(keys.num_documents, parts))
    if not (folder / FACTS).exists():
        repeats = np.zeros(sum(sizes), bool)
        for column in range(keys.num_columns if parts else 0):
            for numbers in _later_ones(keys, parts, sizes, column):
                repeats[numbers] = True
        masks = [repeats[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        list(at_once(lambda number: write_mask(folder, number, masks[number]), range(len(masks))))
        finish_masks(folder)
        del repeats, masks  # a byte a document, as what is read below

    def read(number: int) -> np.ndarray:
        return FlatArray(folder / str(number) / "repeats", "uint8", sizes[number]).read(0, sizes[number]).astype(bool)

    return list(at_once(read, range(len(parts))))


def write_mask(folder: epath.Path, number: int, mask: np.ndarray) -> None:
    """Keep which documents of a part, bool [documents], repeat an earlier one."""
    with new_folder(folder / str(number), "repeats") as new:
        write_array(new / "repeats", mask.view(np.uint8))


def finish_masks(folder: epath.Path) -> None:
    """Mark that the masks of all parts are in the folder."""
    write_facts(folder / FACTS, {"format": FORMAT})


@contextlib.contextmanager
def _scratch_folder(size: int) -> Iterator[str]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    except OSError as error:
        raise UserError(f"the keys of duplicates cannot be sorted in {tempfile.gettempdir()} ({cause(error)}); set the "
                        f"variable TMPDIR to a folder with {size / 1e9:,.1f} GB of space.") from error


def _later_ones(keys: Keys, parts: Sequence[Part], sizes: Sequence[int], column: int) -> Iterator[np.ndarray]:
    """Yield the numbers of documents that have the key of an earlier one in a column."""
    count = -(-sum(sizes) // _SORTED) or 1
    with _scratch_folder(24 * sum(sizes)) as scratch:
        files = [Path(scratch, str(number)) for number in range(count)]
        before = 0
        found = at_once(lambda number: keys.read(parts[number], sizes[number], column), range(len(parts)))
        ends = zip(itertools.accumulate(sizes), found, strict=True)
        for _, group in itertools.groupby(ends, lambda each: each[0] // _GROUPED):
            rows = np.concatenate([own for _, own in group])
            rows = np.column_stack([rows, np.arange(before, before + len(rows), dtype=np.uint64)])
            before += len(rows)
            place = (rows[:, 0] % np.uint64(count)).astype(np.int64)
            rows = rows[np.argsort(place, kind="stable")]
            borders = np.cumsum(np.bincount(place, minlength=count))[:-1]
            for file, own in zip(files, np.split(rows, borders), strict=True):
                with file.open("ab") as stream:
                    stream.write(own.tobytes())
        for file in files:
            rows = np.fromfile(file, np.uint64).reshape(-1, rows.shape[1])
            rows = rows[np.lexsort(rows.T[::-1])]  # by key, then by number
            yield rows[1:][(rows[1:, :-1] == rows[:-1, :-1]).all(axis=1), -1].astype(np.int64)
