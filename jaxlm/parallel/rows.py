"""Rows of a batch that each process reads, and the global array of all rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding


def local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """Return the rows of this process's devices, in order; jax's mesh of a torus may scatter those of a host."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique([np.arange(batch_size)[index[0]] for index in indices if index is not None])


def place_rows(sharding: NamedSharding, batch_size: int, rows: np.ndarray) -> Callable[[np.ndarray], jax.Array]:
    """Return a function from this process's rows to the global array of `batch_size` rows."""

    def place(local: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            first = np.searchsorted(rows, start)
            return local[first : first + stop - start]

        # `jax.device_put` would compare the rows between all processes, on each call.
        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)

    return place
