"""Flat arrays on disk or in a bucket: zarr 3 through tensorstore, appended to once, then read anywhere.

An array lies in shards of a few megabytes, each made of small blocks that can be read alone, so that a window costs
one short read, on a disk as in a bucket, and a corpus few files.
"""

from __future__ import annotations

import os

import numpy as np
import tensorstore as ts

from jaxlm.errors import UserError

BLOCK = 1 << 13  # elements read at a time
SHARD = 1 << 22  # elements a file
_UNBOUNDED = 1 << 50
_CACHE_BYTES = 64 << 20


def context() -> ts.Context:
    """Arrays opened with one context share its cache."""
    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def open_array(folder: str, shared: ts.Context) -> ts.TensorStore:
    """Opens a finished array for reading."""
    spec = {"driver": "zarr3", "kvstore": _kvstore(folder), "recheck_cached_data": False}
    return ts.open(spec, open=True, read=True, context=shared).result()


class ArrayWriter:
    """Appends to a new array; holds one shard in memory."""

    def __init__(self, folder: str, dtype: str) -> None:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        checked = [little, {"name": "crc32c"}]
        sharding = {"chunk_shape": [BLOCK], "codecs": checked, "index_codecs": checked}
        metadata = {
            "shape": [_UNBOUNDED],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        spec = {"driver": "zarr3", "kvstore": _kvstore(folder), "metadata": metadata}
        self._folder = folder
        self._array = self._checked(lambda: ts.open(spec, create=True, delete_existing=True).result())
        self._shard = np.empty(SHARD, dtype)
        self._filled = 0
        self._written = 0

    @property
    def size(self) -> int:
        return self._written + self._filled

    def append(self, values: np.ndarray) -> None:
        """values: 1-D, cast to the array's dtype by the caller."""
        while len(values):
            part = values[: SHARD - self._filled]
            self._shard[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == SHARD:
                self._flush()

    def close(self) -> None:
        self._flush()
        self._checked(lambda: self._array.resize(exclusive_max=[self._written], resize_metadata_only=True).result())

    def _flush(self) -> None:
        if self._filled:
            end = self._written + self._filled
            self._checked(lambda: self._array[self._written : end].write(self._shard[: self._filled]).result())
            self._written, self._filled = end, 0

    def _checked(self, action):
        try:
            return action()
        except (OSError, ValueError, RuntimeError) as error:
            text = str(error)
            if "No space left" in text or "quota" in text.lower():
                raise disk_full(self._folder) from error
            if "Permission denied" in text or "Read-only" in text:
                raise UserError(f"{self._folder} cannot be written; choose another --data.cache-dir.") from None
            raise


def disk_full(folder: str) -> UserError:
    return UserError(
        f"The disk is full: the token store at {folder} could not be finished, and what there was of it is removed; "
        "free some space or choose another --data.cache-dir."
    )


def is_remote(folder: str) -> bool:
    return "://" in folder


def _kvstore(folder: str):
    if is_remote(folder):
        return folder.rstrip("/") + "/"
    return {"driver": "file", "path": os.path.abspath(folder) + "/"}
