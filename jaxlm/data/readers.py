"""Readers of text files, which stream documents in pieces of bounded size, and values of rows.

A document may be larger than memory. It comes as pieces of at most `PIECE` characters, cut before white space, which
are tokenized separately and joined in the token store. In .txt a document ends at a blank line, or with the line that
brings it to `PIECE` characters; in JSON lines and tables, a document is the text of a row. The cuts depend only on the
text, so the same text gives the same tokens from any kind of file. Only rows are held whole. A row whose text is null
or white space gives `NO_TEXT`.

Unusual characters: NUL and other control characters pass unchanged (a tokenizer with byte fallback keeps them, BERT's
drops them). A byte-order mark at the start of a file is dropped. Windows line ends become plain ones in .txt files. An
unpaired surrogate, which JSON can write and UTF-8 cannot, becomes U+FFFD. Bytes that are not UTF-8 are an error, which
names the likely encoding.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import zstandard
from etils import epath

from jaxlm.data.mentions import Mentions, within
from jaxlm.errors import UserError
from jaxlm.paths import JSON_TYPES, reading
from jaxlm.tokenizers.tokenizer import replace_surrogates

PIECE = 1 << 16  # characters
BLOCK = 1 << 20  # characters of a line per read
LONGEST_LINE = 1 << 28  # characters of a line of JSON or of a table at most
KINDS = {
    ".txt": "text", ".text": "text", ".tokens": "text", ".raw": "text", ".jsonl": "json", ".ndjson": "json",
    ".csv": "table", ".tsv": "table", ".parquet": "parquet",
}
"""Kinds of the files of a corpus by their suffixes."""
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
}
_COMPRESSED = 1 << 13  # compressed bytes per read; decompressed, they may grow a thousandfold
_CODECS = ["utf_16", "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp949", "cp932", "euc_jp", "gb18030", "big5",
           "cp1255", "cp1256", "tis_620", "koi8_r", "cp1258"]
"""Encodings that text files have beside UTF-8."""


class Piece(NamedTuple):
    """A piece of a document.

    Attributes:
        text: its text.
        first: whether it begins the document.
        last: whether it ends the document.
        mentions: mentions of entities in it.
    """

    text: str
    first: bool
    last: bool
    mentions: Mentions = ()


NO_TEXT = Piece("", first=True, last=True)
"""Stands for a row without text, which is no document."""


class Cutter:
    """Cutter of documents, given in chunks of any size, into pieces. It drops documents of white space only.

    Leading white space is held until text follows.
    """

    def __init__(self) -> None:
        """Start the first document."""
        self._parts: list[str] = []
        self._size = 0
        self._first = self._is_blank = True

    def add(self, chunk: str) -> Iterator[Piece]:
        """Add a chunk to the document, and yield the pieces that are complete."""
        for start in range(0, len(chunk), PIECE):
            self._parts.append(chunk[start : start + PIECE])
            self._size += len(self._parts[-1])
            self._is_blank &= not self._parts[-1].strip()
            if self._size <= PIECE or self._is_blank:
                continue
            text = "".join(self._parts)
            while len(text) > PIECE:
                end = max(text.rfind(space, 0, PIECE) for space in (" ", "\n", "\t"))
                if end <= 0:  # a script without spaces
                    end = PIECE
                yield self._piece(text[:end], last=False)
                text = text[end:]
            self._parts, self._size = [text], len(text)

    def end(self) -> Iterator[Piece]:
        """End the document, and yield its last piece."""
        if not self._is_blank:
            yield self._piece("".join(self._parts), last=True)
        self._parts, self._size, self._first, self._is_blank = [], 0, True, True

    def document(self, text: str, mentions: Mentions = ()) -> Iterator[Piece]:
        """Yield the pieces of a whole document, or `NO_TEXT`. A mention that a cut divides is dropped."""
        if not text.strip():
            yield NO_TEXT
            return
        start = 0
        for piece in itertools.chain(self.add(text), self.end()):
            yield piece._replace(mentions=within(mentions, start, start + len(piece.text))) if mentions else piece
            start += len(piece.text)

    def _piece(self, text: str, last: bool) -> Piece:
        first, self._first = self._first, False
        return Piece(text, first, last)


def suffix_of(path: str) -> str:
    """Return the suffix of a file in lower case, before .gz, .xz or .zst."""
    name, suffix = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] if suffix in _DECOMPRESSORS else suffix


def read_lines(path: str, start: int = 0, end: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield (place for messages, line) of a file, or of a range of it; raise UserError for unreadable content."""
    with open_text(path, start, end) as stream:
        number, since = 0, f" after byte {start:,}" if start else ""
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            place = f"{path}, line {number}{since}"
            if len(line) > LONGEST_LINE:
                raise UserError(f"{place} is longer than {LONGEST_LINE >> 20} MB; split it, or write its text as .txt.")
            yield place, line


@contextlib.contextmanager
def open_text(path: str, start: int = 0, end: int | None = None) -> Iterator[TextIO]:
    """Open a file of UTF-8 text, decompressed by its suffix, or a range of bytes of an uncompressed one.

    Only a newline character ends a line. All errors of reading become UserError.
    """
    with reading(path):
        try:
            with epath.Path(path).open("rb") as raw:
                whole = _decompressed(raw, path) if end is None else _Range(raw, start, end)
                with io.BufferedReader(whole, BLOCK) as stream:
                    yield io.TextIOWrapper(stream, encoding="utf-8" if start else "utf-8-sig", newline="\n")
        except UnicodeDecodeError as error:
            likely = _likely_encoding(error.object)
            convert = f"convert it (`iconv -f {likely} -t UTF-8 FILE > NEW`)" if likely != "unknown" else "convert it"
            raise UserError(
                f"{path} is not UTF-8 text (its likely encoding: {likely}); {convert} or leave it out."
            ) from error
        except (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
            raise UserError(
                f"{path} is truncated or damaged ({error}); fetch or compress it again, or leave it out of "
                "--data.source."
            ) from error


class _Range(io.RawIOBase):
    """Reader of a range of bytes."""

    def __init__(self, raw: BinaryIO, start: int, end: int) -> None:
        raw.seek(start)
        self._raw, self._left = raw, end - start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(min(len(buffer), self._left))
        buffer[: len(data)], self._left = data, self._left - len(data)
        return len(data)


def boundary(path: str, place: int, kind: str) -> int:
    """Return where the part of a file that `place` bytes are before begins: a function of file and place alone.

    It is the first line after `place`; of kind "text" the first one after a blank line, if there is one within a
    megabyte, and in a longer line the first word.
    """
    with reading(path), epath.Path(path).open("rb") as raw:
        size = raw.seek(0, io.SEEK_END)
        if place <= 0 or place >= size:
            return min(max(place, 0), size)
        raw.seek(place - 1)
        data, start = raw.read(BLOCK), place - 1
        if kind == "text":
            for end in (rb"\n[ \t\r\x0b\x0c]*\n", rb"\n", rb" ", rb"(?s).(?=[^\x80-\xbf])"):
                if found := re.search(end, data):
                    return start + found.end()
        while data and (found := data.find(b"\n")) < 0:
            start += len(data)
            data = raw.read(BLOCK)
        return start + found + 1 if data else size


def _likely_encoding(data: bytes) -> str:
    import charset_normalizer

    found = charset_normalizer.from_bytes(data, cp_isolation=_CODECS)
    close = [each for each in found if each.chaos < found[0].chaos + 0.05 and each.coherence > found[0].coherence - 0.1]
    names = [name for each in close for name in each.could_be_from_charset] or ["unknown"]
    # Short Western European texts fit other Latin encodings as well, which are rarer.
    name = "cp1252" if "cp1252" in names else names[0]
    return name if name == "unknown" else name.upper().replace("_", "-")


def _decompressed(raw: BinaryIO, path: str) -> Any:
    """Return a reader of the decompressed bytes that raises an exception for a truncated file."""
    decompressor = _DECOMPRESSORS.get(os.path.splitext(path.lower())[1])
    return _Streams(raw, decompressor) if decompressor else raw


class _Streams(io.RawIOBase):
    """Reader of consecutive compressed streams, with zeros between them.

    The libraries' own readers take a truncated zstd file for a short one, and a damaged second .xz stream for the end.
    """

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Any]) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._stream: Any = None
        self._data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            is_over = self._stream is None or self._stream.eof
            compressed = self._stream.unused_data if self._stream and is_over else b""
            compressed = compressed or self._raw.read(_COMPRESSED)
            if not compressed:
                if not is_over:
                    raise EOFError("the compressed file ends before its end-of-stream marker")
                return 0
            if is_over:
                compressed = compressed.lstrip(b"\0")
                self._stream = self._decompressor() if compressed else None
            if compressed:
                self._data = memoryview(self._stream.decompress(compressed))
        size = min(len(buffer), len(self._data))
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size


def read_text(stream: TextIO, cutter: Cutter) -> Iterator[Piece]:
    """Yield documents, which end at a blank line or with the line that brings them to `PIECE` characters.

    The second rule gives a text without blank lines several documents, for the held-out split and for sentence pairs.
    """
    starts_line, line_end, size = True, "", 0
    while line := stream.readline(BLOCK):
        while line.endswith("\r") and (more := stream.readline(1)):
            line += more
        is_whole = line.endswith("\n")
        is_blank = starts_line and (is_whole or len(line) < BLOCK) and not line.strip(" \t\n\r\x0b\x0c")
        if not is_blank:  # a document does not include its final line end
            yield from cutter.add(line_end + line.removesuffix("\n").removesuffix("\r" if is_whole else ""))
            line_end, size = "\n" if is_whole else "", size + len(line)
        if is_blank or (is_whole and size >= PIECE):
            yield from cutter.end()
            line_end, size = "", 0
        starts_line = is_whole
    yield from cutter.end()


def line_hint(path: str) -> str:
    """Return a hint about a file of text whose first lines, 100 or more, have no blank one; "" for other files."""
    with open_text(path) as stream:
        lines = stream.read(BLOCK).split("\n")[:-1][:1000]
    advice = "if each line is one, put blank lines between them (`sed G FILE > NEW`) or write .jsonl"
    has_none = len(lines) >= 100 and all(map(str.strip, lines))
    return f"{path} has no blank line in its first {len(lines):,}, and only those end documents; {advice}" * has_none


class Columns(NamedTuple):
    """Columns to read of a table or of a dataset.

    Attributes:
        names: those that must be there.
        advice: how to choose other ones, for messages.
        optional: those that are read if they are there.
    """

    names: Sequence[str]
    advice: str
    optional: Sequence[str] = ()

    def chosen(self, found: Sequence[str], place: str, hint: str = "") -> list[str]:
        """Return the columns to read of those in `found`; raise UserError for one that is missing or there twice."""
        for name in self.names:
            if name not in found:
                close = [each for each in found if each.casefold() == name.casefold()]
                meant = f"perhaps {close[0]!r} is meant; " if close else ""
                shown = ", ".join(repr(each[:40]) for each in found[:12]) or "none"
                raise UserError(f"{place}: there is no column {name!r}; {meant}it has {shown}. {self.advice}{hint}.")
        chosen = [*self.names, *(name for name in self.optional if name in found)]
        if twice := [name for name in chosen if list(found).count(name) > 1]:
            raise UserError(f"{place}: there are {list(found).count(twice[0])} columns {twice[0]!r}; rename or remove "
                            "all but one.")
        return chosen


NUMBERS = (int, float)
LABELS = (int, float, bool)
"""Types other than str of the texts and of the labels of a row."""


def text_of(value: Any, place: str, name: str, others: tuple[type, ...] = NUMBERS) -> str:
    """Return a field of a row as text.

    Args:
        value: value of the field.
        place: place of the row, for messages.
        name: name of the field, for messages.
        others: types other than str that are converted by `str`.

    Raises:
        UserError: the value has any other type.
    """
    if isinstance(value, str):
        return replace_surrogates(value)
    if type(value) in others:  # a bool is also an int
        return str(value)
    found = "null or missing" if value is None else JSON_TYPES.get(type(value), type(value).__name__)
    raise UserError(
        f"{place}: the field {name!r} is {found}, not text; fix or remove the row, or choose a field of texts."
    )


def texts_of(value: Any, place: str, name: str, others: tuple[type, ...] = NUMBERS) -> list[str]:
    """Apply `text_of` to each item of a list, or to the value itself."""
    return [text_of(item, place, name, others) for item in (value if isinstance(value, list) else [value])]


def json_object(line: str, place: str) -> dict[str, Any]:
    """Parse a line of JSON; raise UserError unless it is an object."""
    try:
        record = json.loads(line, parse_constant=lambda _: None)  # pandas' NaN, of a cell without a value
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{place}: this is not JSON ({what}); every line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object, found {type(record).__name__}.")
    return record


def read_names(folder: str | os.PathLike[str], kind: str) -> tuple[str, ...]:
    """Read the names of `{kind}2id.txt` in the order of their ids: the entities or the relations of a graph.

    Raises:
        UserError: The count is wrong, a line is not `name<TAB>id`, ids are out of order, or two names are equal.
    """
    path = Path(folder) / f"{kind}2id.txt"
    lines = read_lines(str(path))
    _, first = next(lines, ("", ""))
    if not first.strip().isdecimal():
        raise UserError(f"{path}, line 1 is {first.strip()[:40]!r}; it must be the number of names that follow.")
    names: dict[str, None] = {}
    for place, line in lines:
        name, _, number = line.rstrip("\r\n").rpartition("\t")
        if number.strip() != str(len(names)) or name in names:
            raise UserError(f"{place} is {line.strip()[:40]!r}; it must be a new name, a tab and the id {len(names)}.")
        names[name] = None
    if len(names) != int(first):
        raise UserError(f"{path} promises {int(first):,} names in line 1 and has {len(names):,}; copy it again.")
    return tuple(names)
