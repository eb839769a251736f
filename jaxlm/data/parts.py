"""Parts of a text: what can be read alone, on any machine.

A part is a file, or some 16 to 256 MB of one that can be divided: uncompressed text and JSON lines at a line, .parquet
at a group of rows, a dataset at a row. Consecutive files of less than a megabyte are one part. Parts follow from the
names and sizes of the files (of .parquet also the footer), so all machines have the same ones.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jaxlm.data import arrow_source, python_docs
from jaxlm.data.mentions import Mentions
from jaxlm.data.readers import Columns, Cutter, Piece, boundary, open_text, read_text, suffix_of, text_of
from jaxlm.data.rows import kind_of, read_rows
from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import replace_surrogates

LEAST, MOST = 1 << 24, 1 << 28
"""Bytes of a part of a larger file: a sixteenth of the file, but at least and at most these."""
_SMALL = 1 << 20  # bytes of a file that may share a part
_TOGETHER = 64  # mean number of small files in a part
_PLACES = 160  # of a sample
_READ = 10  # times the size of a sample
EXPANSION = 4
"""Assumed size of compressed text to that of its file."""
_DIVISIBLE = (".txt", ".text", ".tokens", ".raw", ".jsonl", ".ndjson", ".parquet")


@dataclasses.dataclass(frozen=True)
class Reader:
    """How the documents of a source are read; a subclass may add mentions of entities to them."""

    text_field: str = "text"
    """Column of the text, except in files of text."""
    has_mentions: ClassVar[bool] = False
    """Whether documents may have mentions of entities."""

    @property
    def columns(self) -> Columns:
        """The columns of a table or dataset that are read."""
        return Columns([self.text_field], "Choose the column of the text with --data.text-field")

    def mentions(self, values: Mapping[str, Any], text: str, place: str) -> Mentions:
        """Return the mentions in the text of a row, given its columns; `place` is that of the row, for messages."""
        return ()

    def read(self, source: str, start: int = 0, end: int | None = None) -> Iterator[Piece]:
        """Yield the documents of a file or dataset, or of a range of it; raise UserError for unreadable content.

        Args:
            source: The file or dataset (see `jaxlm.data.rows.read_rows`).
            start: Where to begin: a byte of text or JSON lines, a group of rows of .parquet, a row of a dataset.
            end: Where to end; None for all of the source.
        """
        cutter, kind = Cutter(), kind_of(source)
        if source == "python-docs":
            for text in python_docs.documents():
                yield from cutter.document(replace_surrogates(text))
            return
        if end is not None and kind in ("text", "json"):
            start, end = (boundary(source, place, kind) for place in (start, end))
        if kind == "text":
            with open_text(source, start, end) as stream:
                yield from read_text(stream, cutter)
            return
        columns = self.columns if kind != "table" else self.columns._replace(optional=())
        for row in read_rows(source, columns, start, end):
            if isinstance(row, UserError):
                raise row
            place, values = row
            value = "" if values[self.text_field] is None else values[self.text_field]
            text = text_of(value, place, self.text_field, others=())
            yield from cutter.document(text, self.mentions(values, text, place))


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a text.

    Attributes:
        files: files, read one after the other, or a dataset.
        reader: how they are read.
        state: JSON of what detects a change without a full read: names, sizes and times of the files.
        size: bytes on the disk, or an estimate of them.
        start: where the part begins in its only file (see `Reader.read`).
        end: where it ends; None for whole files.
    """

    files: tuple[str, ...]
    reader: Reader
    state: str
    size: int
    start: int = 0
    end: int | None = None

    @property
    def name(self) -> str:
        """What identifies the documents: a hash of the state, the range and the reader."""
        reader = [type(self.reader).__name__, *dataclasses.astuple(self.reader), *_own_source(type(self.reader))]
        return hashlib.sha256(json.dumps([self.state, self.start, self.end, reader]).encode()).hexdigest()

    def __str__(self) -> str:
        name = self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1:,} more files"
        return name if self.end is None else f"{name} from {self.start:,} to {self.end:,}"

    @property
    def is_compressed(self) -> bool:
        """Whether its text is larger than its size, perhaps by much."""
        return self.files[0].lower().endswith((".gz", ".xz", ".zst", ".parquet"))

    @property
    def text_size(self) -> int:
        """Bytes of its text, an estimate where it is compressed."""
        return self.size * (EXPANSION if self.is_compressed else 1)

    def pieces(self, start: int | None = None) -> Iterator[Piece]:
        """Yield the documents in pieces; from the place `start` on, if the part has places."""
        for file in self.files:
            yield from self.reader.read(file, self.start if start is None else start, self.end)


@functools.cache  # the text of a run is read by one version
def _own_source(kind: type) -> list[str]:
    """Return the source text of a reader from outside jaxlm, which may be edited."""
    if kind.__module__.startswith("jaxlm."):
        return []
    with contextlib.suppress(OSError, TypeError):  # of a session that keeps none
        return [inspect.getsource(kind)]
    return []


def _part_size(size: int) -> int:
    """Return the bytes of a part of a file that can be divided."""
    return min(max(size // 16, LEAST), MOST)


def parts_of_file(path: str, name: str, state: Sequence[int | str], reader: Reader) -> Iterator[Part]:
    """Yield the parts of a file, given its name without links and its state, which begins with its size."""
    size, facts = int(state[0]), json.dumps([name, *state])
    if size < 2 * LEAST or not path.lower().endswith(_DIVISIBLE):
        yield Part((path,), reader, facts, size)
    elif suffix_of(path) == ".parquet":
        groups = list(itertools.accumulate(arrow_source.parquet_groups(path)))
        count = max(1, groups[-1] // _part_size(groups[-1]))
        ends = sorted({1 + bisect.bisect_left(groups, groups[-1] * k // count) for k in range(1, count + 1)})
        for start, end in itertools.pairwise([0, *ends]):
            yield Part((path,), reader, facts, size * (end - start) // len(groups), start, end)
    else:
        for start in range(0, size, _part_size(size)):
            end = min(start + _part_size(size), size)
            yield Part((path,), reader, facts, end - start, start, end)


def parts_of_dataset(source: str, states: Sequence[str], size: int, rows: int, reader: Reader) -> Iterator[Part]:
    """Yield the parts of `python-docs`, or of a dataset of so many rows, given the states of its files."""
    count, facts = min(rows, -(-size // _part_size(size))) or 1, json.dumps(states)
    for number in range(count):
        start, end = (rows * k // count for k in (number, number + 1))
        yield Part((source,), reader, facts, size // count, start, end if rows else None)


def grouped(parts: Sequence[Part]) -> list[Part]:
    """Join consecutive small files; a group ends where a hash of a name says so, so that it stays if others change.

    The name has the file's folder: in some texts all files have the same name.
    """
    groups: list[list[Part]] = []
    is_open, size = False, 0
    for part in parts:
        is_small = part.end is None and part.size < _SMALL
        if is_small and is_open and size < MOST:
            groups[-1].append(part)
        else:
            groups.append([part])
            size = 0
        size, name = size + part.size, "/".join(part.files[0].split("/")[-2:])
        is_open = is_small and zlib.crc32(os.fsencode(name)) % _TOGETHER != 0
    return [own[0] if len(own) == 1 else
            Part(tuple(part.files[0] for part in own), own[0].reader, json.dumps([part.state for part in own]),
                 sum(part.size for part in own)) for own in groups]


def sample(parts: Sequence[Part], wanted: int) -> Iterator[str]:
    """Yield about `wanted` bytes of text from evenly spaced places, or all of a smaller text.

    At most ten times as much is read. A part that cannot be entered gives what stands near its beginning.
    """
    sizes = [part.text_size for part in parts]
    if sum(sizes) <= _READ * wanted:
        yield from _evenly((piece for part in parts for piece in part.pieces()), sum(sizes), wanted)
        return
    ends = list(itertools.accumulate(sizes))
    places = collections.Counter(bisect.bisect_right(ends, ends[-1] * (2 * k + 1) // (2 * _PLACES))
                                 for k in range(_PLACES))
    for number, count in sorted(places.items()):
        part, take = parts[number], wanted // _PLACES
        if part.end is None or kind_of(part.files[0]) not in ("text", "json"):
            yield from _evenly(part.pieces(), min(sizes[number], _READ * take * count), take * count)
        else:
            for place in range(count):
                start = part.start + (part.end - part.start) * place // count
                yield from _first(part.pieces(start), take)


def _first(pieces: Iterator[Piece], wanted: int) -> Iterator[str]:
    """Yield about the first `wanted` bytes: whole pieces of documents, then the beginning of one."""
    for piece in pieces:
        size = len(piece.text.encode())
        if size > wanted:
            end = len(piece.text) * wanted // size
            yield piece.text[: max(piece.text.rfind(" ", 0, end), 0) or end]
            return
        yield piece.text
        wanted -= size


def _evenly(pieces: Iterator[Piece], total: int, wanted: int) -> Iterator[str]:
    """Sample about `wanted` of the first `total` bytes: whole pieces of documents, or the beginnings of large ones.

    If all is wanted, a text that is larger is read to its end or up to `_READ` times as much.
    """
    share, credit, read = min(1.0, wanted / max(1, total)), 0.0, 0
    for piece in pieces:
        credit += len(piece.text) * share
        read += len(piece.text.encode())
        if piece.text and credit >= len(piece.text) - 0.5:
            credit -= len(piece.text)
            yield piece.text
        elif credit >= 4096:
            end = piece.text.rfind(" ", 0, int(credit))
            text = piece.text[: end if end > 0 else int(credit)]
            credit -= len(text)
            yield text
        if read >= _READ * wanted:
            return
