"""The cache folder: $JAXLM_CACHE, else ~/.cache/jaxlm."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from jaxlm.paths import DEFAULT_CACHE, any_path, in_bucket, reading, write_whole


def cache_folder(chosen: str = "") -> epath.Path:
    """Return the folder `chosen`, else $JAXLM_CACHE, else ~/.cache/jaxlm; on a disk or in a bucket."""
    return any_path(chosen or os.environ.get("JAXLM_CACHE") or DEFAULT_CACHE)


def compilation_cache() -> str:
    """Return the folder of compiled programs, which is on a disk."""
    cache = cache_folder()
    return str((cache_folder(DEFAULT_CACHE) if in_bucket(cache) else cache) / "xla")


def cached_arrays(
    kind: str, facts: Any, compute: Callable[[], dict[str, np.ndarray]], chosen: str = ""
) -> dict[str, np.ndarray]:
    """Return arrays from the cache folder, where `compute` puts them first; on a disk they are mapped into memory.

    Args:
        kind: Folder of such arrays in the cache folder.
        facts: JSON value of all that the arrays depend on.
        compute: Returns the arrays by name.
        chosen: Cache folder of the configuration.
    """
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    folder = cache_folder(chosen) / kind / name
    names = folder / "arrays.json"
    if not names.exists():
        arrays = compute()
        for key, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array)
            write_whole(folder / f"{key}.npy", file.getvalue())
        write_whole(names, json.dumps(list(arrays)).encode())  # last, which marks them as finished
    with reading(os.fspath(folder)):
        return {key: _load(folder / f"{key}.npy") for key in json.loads(names.read_text())}


def _load(file: epath.Path) -> np.ndarray:
    if in_bucket(file):
        return np.load(io.BytesIO(file.read_bytes()))
    return np.asarray(np.load(file, mmap_mode="r"))
