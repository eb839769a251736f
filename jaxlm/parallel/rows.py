"""Rows of a batch that each process reads, and the global array of all rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding


def local_rows(sharding: NamedSharding, batch_size: int) -> slice:
    """Return the smallest range of rows that contains all rows of this process's devices."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    bounds = [index[0].indices(batch_size) for index in indices if index is not None]
    return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def place_rows(sharding: NamedSharding, batch_size: int, rows: slice) -> Callable[[np.ndarray], jax.Array]:
    """Return a function from this process's rows to the global array of `batch_size` rows."""

    def place(local: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            return local[start - rows.start : stop - rows.start]

        # `jax.device_put` would compare the rows between all processes, on each call.
        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)

    return place
