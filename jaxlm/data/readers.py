"""Files of text, read as a stream of documents in pieces of bounded size.

A document may be larger than memory: it comes as pieces of at most `PIECE` characters, cut before white space, which
are tokenised one by one and joined again in the token store. Where a document is cut depends on its text alone, so
that the same text gives the same tokens from any kind of file.

What happens to odd text, on purpose: NUL bytes and other control characters are handed on unchanged (a tokenizer with
byte fallback keeps them, BERT's drops them); a byte-order mark at the start of a file is dropped; Windows line ends
become plain ones in .txt files; a lone surrogate, which JSON can write and UTF-8 cannot, becomes U+FFFD; bytes that are
not UTF-8 are refused.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import zstandard
from etils import epath

from jaxlm.data.long_json import text_of_long_object
from jaxlm.errors import UserError

PIECE = 1 << 16  # characters
BLOCK = 1 << 20  # bytes read at a time
LONG_LINE = 1 << 24  # bytes; a longer JSON line is never held whole
TEXT_SUFFIXES = (".txt", ".text", ".tokens", ".raw")
JSON_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")


class Piece(NamedTuple):
    """A part of a document: `first` and `last` say whether the document begins and ends with it."""

    text: str
    first: bool
    last: bool


class Cutter:
    """Cuts documents, given in chunks of any size, into pieces. White space alone is no document."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0
        self._first = True

    def add(self, chunk: str) -> Iterator[Piece]:
        for start in range(0, len(chunk), PIECE):
            self._parts.append(chunk[start : start + PIECE])
            self._size += len(self._parts[-1])
            if self._size <= PIECE:
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
        text = "".join(self._parts)
        if not self._first or text.strip():
            yield self._piece(text, last=True)
        self._parts, self._size, self._first = [], 0, True

    def document(self, text: str) -> Iterator[Piece]:
        yield from self.add(text)
        yield from self.end()

    def _piece(self, text: str, last: bool) -> Piece:
        first, self._first = self._first, False
        return Piece(text, first, last)


def kind_of(path: str) -> str | None:
    """"text" or "json" by the name of a file, None where we do not know it."""
    name = path.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    if name.endswith(TEXT_SUFFIXES):
        return "text"
    return "json" if name.endswith(JSON_SUFFIXES) else None


def read_file(path: str, text_field: str) -> Iterator[Piece]:
    """The documents of one file. Raises UserError, naming the place, for whatever cannot be read."""
    try:
        with _open(path) as stream:
            if kind_of(path) == "json":
                yield from _read_json_lines(stream, path, text_field)
            else:
                yield from _read_text(stream, path)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(
            f"{path} is truncated or damaged ({error}); fetch or compress it again, or leave it out of --data.source."
        ) from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check --data.source.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check its permissions.") from error


def _open(path: str) -> BinaryIO:
    raw = epath.Path(path).open("rb")
    name = path.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(_Closing(gzip.GzipFile(fileobj=raw), raw), BLOCK)
    if name.endswith(".xz"):
        return io.BufferedReader(_Closing(lzma.LZMAFile(raw), raw), BLOCK)
    if name.endswith(".zst"):
        return io.BufferedReader(_Closing(_ZstdFile(raw), raw), BLOCK)
    return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(_Closing(raw, raw), BLOCK)


class _Closing(io.RawIOBase):
    """A readable stream that closes the file below it too."""

    def __init__(self, stream, below) -> None:
        self._stream, self._below = stream, below

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._below.close()
        super().close()


class _ZstdFile:
    """Reads zstd frames one after another. zstandard's own reader takes a truncated file for a short one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = None
        self._data = b""

    def read(self, size: int) -> bytes:
        while not self._data:
            compressed = self._left_over() or self._raw.read(BLOCK >> 3)
            if not compressed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed file ends before its end-of-stream marker")
                return b""
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._data = self._frame.decompress(compressed)
        data, self._data = self._data[:size], self._data[size:]
        return data

    def _left_over(self) -> bytes:
        return self._frame.unused_data if self._frame is not None and self._frame.eof else b""


def _read_text(stream: BinaryIO, path: str) -> Iterator[Piece]:
    """Documents separated by blank lines."""
    cutter = Cutter()
    decoder = _Decoder(path)
    lines: list[bytes] = []
    held = 0
    whole = True  # whether the next read starts a line
    empty = True  # whether the document has no line yet
    while line := stream.readline(BLOCK):
        starts_line, whole = whole, line.endswith(b"\n")
        if starts_line and (whole or len(line) < BLOCK) and not line.strip():
            yield from cutter.add(decoder.decode(b"".join(lines), final=True))
            yield from cutter.end()
            decoder.skip(line)
            lines, held, empty = [], 0, True
            continue
        lines.append(line)
        held += len(line)
        if held >= BLOCK:
            yield from cutter.add(decoder.decode(b"".join(lines), final=False))
            lines, held = [], 0
        empty = False
    if not empty:
        yield from cutter.add(decoder.decode(b"".join(lines), final=True))
    yield from cutter.end()


class _Decoder:
    """UTF-8 to text, with the place of what is wrong; line ends made plain, the last one of a document dropped."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._offset = 0
        self._line = 1
        self._held = ""  # line ends that may turn out to be the document's last

    def skip(self, data: bytes) -> None:
        self._offset += len(data)
        self._line += data.count(b"\n")

    def decode(self, data: bytes, final: bool) -> str:
        start = self._offset - len(self._utf8.getstate()[0])
        try:
            text = self._utf8.decode(data, final)
        except UnicodeDecodeError as error:
            line = self._line + error.object[: error.start].count(b"\n")
            raise not_utf8(self._path, line, start + error.start) from error
        if self._offset == 0:
            text = text.removeprefix("\ufeff")
        self.skip(data)
        text = (self._held + text).replace("\r\n", "\n")
        self._held = ""
        if final:
            return text.removesuffix("\n")
        kept = text.rstrip("\r\n")
        self._held = text[len(kept) :]
        return kept


def not_utf8(path: str, line: int, byte: int) -> UserError:
    return UserError(
        f"{path}, line {line}, byte {byte}: this is not UTF-8 text; convert the file "
        f"(for example `iconv -f LATIN1 -t UTF-8`) or leave it out of --data.source."
    )


def _read_json_lines(stream: BinaryIO, path: str, text_field: str) -> Iterator[Piece]:
    cutter = Cutter()
    offset = 0
    number = 0
    while line := stream.readline(LONG_LINE):
        number += 1
        place = f"{path}, line {number}"
        if len(line) == LONG_LINE and not line.endswith(b"\n"):
            counted = _Rest(stream, line)
            for chunk in text_of_long_object(counted.chunks(), text_field, place):
                yield from cutter.add(chunk)
            yield from cutter.end()
            offset += counted.size
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(path, number, offset + error.start) from error
        offset += len(line)
        if not text.strip():
            continue
        yield from cutter.document(_field(text, text_field, place))


class _Rest:
    """The blocks of one line too long to hold, of which `head` has been read."""

    def __init__(self, stream: BinaryIO, head: bytes) -> None:
        self._stream, self._head = stream, head
        self.size = 0

    def chunks(self) -> Iterator[bytes]:
        block, self._head = self._head, b""
        while block:
            self.size += len(block)
            yield block
            if block.endswith(b"\n"):
                return
            block = self._stream.readline(BLOCK)


def _field(line: str, text_field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{place}: this is not JSON ({what}); every line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected an object with the field {text_field!r}, found {type(record).__name__}.")
    if text_field not in record:
        fields = ", ".join(map(repr, list(record)[:12])) or "none"
        raise UserError(f"{place} has no field {text_field!r}; choose one with --data.text-field (here: {fields}).")
    text = record[text_field]
    if not isinstance(text, str):
        raise UserError(
            f"{place}: the field {text_field!r} is {type(text).__name__}, not text; choose one with --data.text-field."
        )
    return mend_surrogates(text)


def mend_surrogates(text: str) -> str:
    """Lone surrogates cannot be written as UTF-8; they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
