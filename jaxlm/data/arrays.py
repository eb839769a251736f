"""Flat arrays on disk or in a bucket: zarr 3 through tensorstore, written once by appending, then read at random.

An array consists of shards of a few megabytes, so that a corpus has few files. A shard consists of small blocks, each
readable by itself, so that a window costs one short read. On disk an array has two dimensions, lines of `LINE`
elements, because tensorstore gathers lines several times as fast as elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts

from jaxlm.errors import UserError
from jaxlm.paths import cause, in_bucket, remedy

LINE = 1 << 6
BLOCK = 1 << 13  # elements per read
SHARD = 1 << 22  # elements per file
_UNBOUNDED = 1 << 50
_CACHE_BYTES = 64 << 20


def context() -> ts.Context:
    """Return a context; arrays opened with the same one share its cache."""
    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


class FlatArray:
    """A finished array, opened for reading; a damaged one raises UserError when it is opened or read."""

    def __init__(self, folder: str, size: int, shared: ts.Context) -> None:
        """Open the array of `size` elements in `folder`, with the cache of the context `shared`."""
        spec = {"driver": "zarr3", "kvstore": kvstore(folder), "recheck_cached_data": False}
        self._folder = folder
        self._array = self._result(ts.open, spec, open=True, read=True, context=shared)
        self.size = size
        self._lines = -(-size // LINE)
        if self._array.shape != (self._lines, LINE):
            raise damaged(folder, f"its shape {self._array.shape} is not that of {size} elements")

    def windows(self, start: np.ndarray, length: int) -> np.ndarray:
        """Return `length` elements from each `start`: [starts, length], arbitrary past the end of the array."""
        if self.size == 0:
            return np.zeros((len(start), length), self._array.dtype.numpy_dtype)
        line = start[:, None] // LINE + np.arange((length - 2) // LINE + 2)
        lines = self._result(self._array[np.minimum(line, self._lines - 1)].read).reshape(len(start), -1)
        return np.take_along_axis(lines, start[:, None] % LINE + np.arange(length), axis=1)

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the elements from `start` to `end - 1`."""
        first = start // LINE
        lines = self._result(self._array[first : -(-end // LINE)].read)
        return lines.reshape(-1)[start - first * LINE : end - first * LINE]

    def _result(self, action: Callable, *arguments: Any, **named: Any) -> Any:
        try:
            return action(*arguments, **named).result()
        except (ValueError, OSError) as error:
            raise damaged(self._folder, str(error).splitlines()[0]) from error


def damaged(folder: str, what: str) -> UserError:
    """Return the error of a damaged token store."""
    return UserError(f"The token store is damaged at {folder} ({what}); delete the store and run again to rebuild it.")


class ArrayWriter:
    """Writer of a new array, with one shard in memory."""

    def __init__(self, folder: str, dtype: str) -> None:
        """Create the array in `folder`."""
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        checked = [little, {"name": "crc32c"}]
        sharding = {"chunk_shape": [BLOCK // LINE, LINE], "codecs": checked, "index_codecs": checked}
        metadata = {
            "shape": [_UNBOUNDED, LINE],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD // LINE, LINE]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        spec = {"driver": "zarr3", "kvstore": kvstore(folder), "metadata": metadata}
        self._folder = folder
        self._array = self._checked(lambda: ts.open(spec, create=True, delete_existing=True).result())
        self._shard = np.zeros(SHARD, dtype)
        self._filled = 0
        self._written = 0

    def append(self, values: np.ndarray) -> None:
        """Append a 1-D array of the dtype of this one."""
        while len(values):
            part = values[: SHARD - self._filled]
            self._shard[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == SHARD:
                self._flush()

    def close(self) -> int:
        """Finish the array and return its number of elements."""
        size = self._written + self._filled
        self._flush()
        lines = -(-size // LINE)
        self._checked(lambda: self._array.resize(exclusive_max=[lines, LINE], resize_metadata_only=True).result())
        return size

    def _flush(self) -> None:
        lines = -(-self._filled // LINE)
        if lines:
            self._shard[self._filled : lines * LINE] = 0
            first = self._written // LINE
            values = self._shard[: lines * LINE].reshape(lines, LINE)
            self._checked(lambda: self._array[first : first + lines].write(values).result())
            self._written, self._filled = self._written + self._filled, 0

    def _checked(self, action):
        try:
            return action()
        except (OSError, ValueError, RuntimeError) as error:
            advice = remedy(error, self._folder)
            raise UserError(f"{self._folder} cannot be written ({cause(error)}); {advice}.") from error


def kvstore(folder: str) -> str | dict[str, str]:
    """Return TensorStore's description of a folder, on a disk or in a bucket."""
    if not in_bucket(folder):
        return {"driver": "file", "path": os.path.abspath(folder) + "/"}
    folder, endpoint = folder.rstrip("/") + "/", os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and folder.startswith("s3://"):  # the server that s3fs asks; TensorStore does not read the variable
        bucket, _, path = folder.removeprefix("s3://").partition("/")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        return {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint, "aws_region": region}
    return folder
