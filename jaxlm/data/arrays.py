"""Flat arrays on a disk or in a bucket: written once by appending, then read at random.

A file consists of blocks of 4,096 bytes: 4,088 bytes of elements, then their CRC-32. So any range of elements takes one
short read, and damage is noticed where it is read.
"""

from __future__ import annotations

import collections
import errno
import json
import os
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
from etils import epath

from jaxlm.errors import UserError, outage
from jaxlm.paths import cause, in_bucket, is_outage, write_whole, writing

BLOCK = 1 << 12  # bytes
FACTS = "facts.json"
"""File of the facts of a folder of arrays, which is written last: a folder that has it is complete."""
STRIDE = 256
"""Of an increasing array, every such element is in memory."""
SPLITS = ("train", "held_out", "left_out")
"""Splits of a token store, each a folder of arrays."""
_DATA = BLOCK - 8  # bytes of elements in a block
_RESIDENT = 1 << 23  # elements up to which an increasing array is in memory: 64 MB
_OPEN = 256  # files
_NETWORK_ERRNOS = (errno.ESTALE, errno.ETIMEDOUT)  # of a network disk, which may pass
_SYSTEM_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, *_NETWORK_ERRNOS)  # failures of the system, not of a file


class ArrayWriter:
    """Writer of a new array.

    Attributes:
        size: number of elements that were appended.
    """

    def __init__(self, path: epath.Path, dtype: str) -> None:
        """Create the file."""
        self.size = 0
        self._path, self._dtype, self._rest = path, np.dtype(dtype).newbyteorder("<"), b""
        with writing(path):
            self._file = path.open("wb")
        if in_bucket(path):  # a file that an exception abandons would be uploaded, perhaps in place of a whole one
            self._file.autocommit = False

    def append(self, values: np.ndarray) -> None:
        """Append a 1-D array."""
        self.size += len(values)
        data = self._rest + np.asarray(values, self._dtype).tobytes()
        whole = len(data) // _DATA * _DATA
        self._rest = data[whole:]
        if whole:
            self._write(data[:whole])

    def close(self) -> int:
        """Finish the file and return the number of elements."""
        if self._rest:
            self._write(self._rest.ljust(_DATA, b"\0"))
        with writing(self._path):
            if in_bucket(self._path):
                self._file.autocommit = True
            else:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        return self.size

    def _write(self, data: bytes) -> None:
        blocks = np.zeros((len(data) // _DATA, BLOCK), np.uint8)
        blocks[:, :_DATA] = np.frombuffer(data, np.uint8).reshape(-1, _DATA)
        blocks[:, _DATA : _DATA + 4] = _checksums(blocks)[:, None].view(np.uint8)
        with writing(self._path):
            self._file.write(blocks.tobytes())


def write_array(path: epath.Path, values: np.ndarray) -> None:
    """Write an array that is in memory."""
    writer = ArrayWriter(path, values.dtype.str)
    writer.append(values)
    writer.close()


def _checksums(blocks: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of the elements of each block: uint32 [blocks]."""
    view = memoryview(blocks.ravel())
    return np.array([zlib.crc32(view[at : at + _DATA]) for at in range(0, len(view), BLOCK)], "<u4")


def check_size(path: str, dtype: str, size: int) -> None:
    """Raise UserError unless the file of an array of `size` elements is there and as long; it is not read."""
    try:
        length = os.stat(path).st_size
    except OSError as error:
        raise damaged(path, error) from error
    if length != -(-size * np.dtype(dtype).itemsize // _DATA) * BLOCK:
        raise damaged(path, "it is not as long as its elements")


class Files:
    """Arrays of one type in many files, of which some are open at a time: `_OPEN` of all such objects.

    Attributes:
        paths: paths of the files.
    """

    def __init__(self, paths: Sequence[str], dtype: str) -> None:
        """Name the files; none is opened yet."""
        self.paths, self._dtype = paths, np.dtype(dtype).newbyteorder("<")
        self._open: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._open)
        _live.add(self)

    def read(self, file: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return count[i] > 0 elements from start[i] of each file[i], one after the other.

        Raises:
            UserError: a file is missing, too short or damaged.
        """
        per = _DATA // self._dtype.itemsize
        first, end = start // per, (start + count - 1) // per + 1
        data = self._bytes(file.tolist(), (first * BLOCK).tolist(), (end * BLOCK).tolist())
        blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCK)
        wrong = np.flatnonzero(_checksums(blocks) != blocks[:, _DATA : _DATA + 4].copy().view("<u4")[:, 0])
        if len(wrong):
            place = np.searchsorted(np.cumsum(end - first), wrong[0], side="right")
            raise damaged(self.paths[file[place]], "its checksum differs")
        values = blocks[:, :_DATA].copy().view(self._dtype).ravel()
        before = np.cumsum(end - first) - (end - first)  # blocks of earlier ranges
        begins = before * per + start - first * per
        if len(count) == 1:
            return values[begins[0] : begins[0] + count[0]]
        return values[ranges(begins, count)]

    def _bytes(self, file: list[int], start: list[int], end: list[int]) -> bytes:
        if self.paths and in_bucket(self.paths[0]):
            return self._fetched([self.paths[number] for number in file], start, end)
        found = []
        with self._lock:
            for number, first, last in zip(file, start, end, strict=True):
                try:
                    found.append(_read_whole(self._descriptor(number), last - first, first))
                except OSError as error:
                    raise damaged(self.paths[number], error) from error
                if len(found[-1]) != last - first:
                    raise damaged(self.paths[number], "it is cut off")
        return b"".join(found)

    def close(self) -> None:
        """Close the files; one that is read again is opened again."""
        with self._lock:
            _close(self._open)
            self._open.clear()

    def _descriptor(self, number: int) -> int:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            while len(self._open) >= max(1, _OPEN // len(_live)):
                os.close(self._open.popitem(last=False)[1])
            self._open[number] = os.open(self.paths[number], os.O_RDONLY)
        return self._open[number]

    def _fetched(self, paths: list[str], start: list[int], end: list[int]) -> bytes:
        """Return ranges of objects of a bucket, which are asked for at the same time."""
        store = fsspec.core.url_to_fs(paths[0])[0]
        found = store.cat_ranges(paths, start, end, on_error="return")
        for path, data, first, last in zip(paths, found, start, end, strict=True):
            if isinstance(data, Exception):
                raise damaged(path, data) from data
            if len(data) != last - first:
                raise damaged(path, "it is cut off")
        return b"".join(found)


_live: weakref.WeakSet[Files] = weakref.WeakSet()


def _read_whole(descriptor: int, size: int, start: int) -> bytes:
    """Return `size` bytes, or those up to the end of the file; one `pread` of Linux reads at most 2 GiB."""
    data = os.pread(descriptor, size, start)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), start + len(data))):
        data += more
    return data


def _close(opened: Mapping[int, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the numbers start[i], start[i] + 1, … start[i] + count[i] - 1 of each range in turn."""
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(int(count.sum()))


class _Array:
    """An array that is read by ranges.

    Attributes:
        size: number of elements.
    """

    size: int

    def ranges(self, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return count[i] elements from start[i], one range after the other."""
        raise NotImplementedError

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the elements from `start` to `end - 1`."""
        return self.ranges(np.array([start]), np.array([end - start]))

    def windows(self, start: np.ndarray, length: int) -> np.ndarray:
        """Return `length` elements from each `start`: [starts, length], 0 past the end of the array."""
        count = np.clip(self.size - start, 0, length)
        values = self.ranges(start, count)
        found = np.zeros((len(start), length), values.dtype)
        found[np.arange(length) < count[:, None]] = values
        return found


class FlatArray(_Array):
    """A finished array in a file."""

    def __init__(self, path: epath.Path | str, dtype: str, size: int) -> None:
        """Name the file; it is not opened yet."""
        self.size, self._dtype, self._files = size, dtype, Files([os.fspath(path)], dtype)

    def close(self) -> None:
        """Close the file until it is read again."""
        self._files.close()

    def ranges(self, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        used = count > 0
        if not used.any():
            return np.zeros(0, self._dtype)
        return self._files.read(np.zeros(used.sum(), int), start[used], count[used])


class Increasing:
    """An increasing array of int64 that begins with 0: offsets of documents, or of runs of tokens.

    Every `STRIDE`-th element is in memory; so are all others, unless there are too many.

    Attributes:
        size: number of elements after the 0.
        samples: element k * STRIDE for each k, then the last one.
    """

    def __init__(self, path: epath.Path | str, size: int) -> None:
        """Open the array that `IncreasingWriter` wrote."""
        self.size, self._array = size, FlatArray(path, "int64", size + 1)
        self._held = self._array.read(0, size + 1) if size < _RESIDENT else None
        self._array.close()  # a mixture of many sources would hold hundreds open
        count = -(-size // STRIDE) + 1
        self.samples = FlatArray(f"{os.fspath(path)}-samples", "int64", count).read(0, count)

    @property
    def is_resident(self) -> bool:
        """Whether all elements are in memory."""
        return self._held is not None

    def windows(self, first: np.ndarray, count: int) -> np.ndarray:
        """Return `count` elements from each `first`: [firsts, count]; past the end the last one repeats."""
        number = first[:, None] + np.arange(count)
        if self._held is not None:
            return self._held[np.minimum(number, self.size)]
        return np.where(number <= self.size, self._array.windows(first, count), self.samples[-1])

    def ranges(self, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Return count[i] elements from start[i], one range after the other."""
        return self._array.ranges(start, count) if self._held is None else self._held[ranges(start, count)]

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the elements from `start` to `end - 1`."""
        return self._array.read(start, end) if self._held is None else self._held[start:end]

    def search(self, value: np.ndarray) -> np.ndarray:
        """Return for each value the number of the last element that is not larger; values are below the last one."""
        if self._held is not None:
            return np.searchsorted(self._held, value, side="right") - 1
        block = np.searchsorted(self.samples, value, side="right") - 1
        near = self.windows(block * STRIDE, STRIDE)
        return block * STRIDE + (near <= value[:, None]).sum(axis=1) - 1


class IncreasingWriter:
    """Writer of an `Increasing` array from the differences of its elements."""

    def __init__(self, path: epath.Path) -> None:
        """Create the files."""
        self._array = ArrayWriter(path, "int64")
        self._samples = ArrayWriter(path.parent / f"{path.name}-samples", "int64")
        self.last = 0
        self._write(np.zeros(1, np.int64))

    def append(self, differences: np.ndarray) -> None:
        """Append elements, given what each is more than the one before it."""
        values = self.last + np.cumsum(differences, dtype=np.int64)
        if len(values):
            self._write(values)

    def _write(self, values: np.ndarray) -> None:
        self._samples.append(values[-self._array.size % STRIDE :: STRIDE])
        self._array.append(values)
        self.last = int(values[-1])

    def close(self) -> int:
        """Finish the files and return the number of elements after the 0."""
        size = self._array.close() - 1
        if size % STRIDE:
            self._samples.append(np.array([self.last]))
        self._samples.close()
        return size


class Spliced(_Array):
    """An array whose runs lie in several files: the tokens of a split, in the shards."""

    def __init__(
        self, files: Files, starts: np.ndarray, runs: Increasing, places: FlatArray, base: np.ndarray | None = None
    ) -> None:
        """Store the arguments.

        Args:
            files: the files, whose elements are numbered one file after the other.
            starts: number of the first element of each file, and of all: int64 [files + 1].
            runs: number in this array of the first element of each run, and of all.
            places: number in the files of the first element of each run.
            base: what is added to the elements of each file that are not 0; None for nothing.
        """
        self._files, self._starts, self._runs, self._places, self._base = files, starts, runs, places, base
        self.size = int(runs.samples[-1])

    def ranges(self, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        start, count = start[count > 0], count[count > 0]
        if not len(count):
            return np.zeros(0, np.int64)
        first = self._runs.search(start)
        several = self._runs.search(start + count - 1) - first + 1
        begins, ends = (self._runs.ranges(first + more, several) for more in (0, 1))
        places = self._places.ranges(first, several)
        window, last = np.repeat(start, several), np.repeat(start + count, several)
        places += np.maximum(window - begins, 0)
        sizes = np.minimum(ends, last) - np.maximum(begins, window)
        file = np.searchsorted(self._starts, places, side="right") - 1
        found = self._files.read(file, places - self._starts[file], sizes)
        if self._base is None:
            return found
        return np.where(found, found.astype(np.int64) + np.repeat(self._base[file], sizes), 0)


def write_facts(path: epath.Path, facts: Mapping[str, Any]) -> None:
    """Write facts as JSON, with their checksum."""
    write_whole(path, json.dumps({**facts, "checksum": zlib.crc32(json.dumps(facts).encode())}).encode())


def read_facts(path: epath.Path, version: int) -> dict[str, Any]:
    """Return the facts of a file; raise UserError for one that is missing, damaged or of another version."""
    try:
        facts = json.loads(path.read_bytes())
        is_known, checksum = facts["format"] == version, facts.pop("checksum", None)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise damaged(os.fspath(path), error) from error
    if not is_known:
        raise damaged(os.fspath(path), "it is of another version of jaxlm")
    if checksum != zlib.crc32(json.dumps(facts).encode()):
        raise damaged(os.fspath(path), "its checksum differs")
    return facts


def damaged(path: str, what: str | Exception) -> UserError:
    """Return the error of a missing, damaged or unreadable file of a shard or store; their splits are folders."""
    if isinstance(what, Exception) and is_outage(what, path):
        return outage(path, cause(what))
    number = getattr(what, "errno", None)
    if isinstance(what, PermissionError) or number in _SYSTEM_ERRNOS:
        text = f"{path} cannot be read ({cause(what)}), but may be whole; fix the cause and run again."
        return UserError(text, 1 if number in _NETWORK_ERRNOS else 2)
    folder = os.path.dirname(path)
    if os.path.basename(folder) in SPLITS or os.path.basename(path) == "repeats":  # a mask is made with the others
        folder = os.path.dirname(folder)
    root, room = os.path.split(os.path.dirname(folder))
    if in_bucket(path) and room == "shards":  # a finished store in a bucket is believed to have its shards
        folder += f" and {root}/stores"
    is_missing = isinstance(what, FileNotFoundError)
    state = "missing" if is_missing else f"damaged ({cause(what) if isinstance(what, Exception) else what})"
    return UserError(f"{path} is {state}; delete {folder} and run again, which makes it anew.")
