"""Inference where the parameters are: rows are split over the mesh that shards them, and results are on every process.

Parameters that no mesh shards, such as numpy arrays, are read by the default device, which then has all rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh

from jaxlm.parallel.mesh import BATCH_AXES
from jaxlm.parallel.rules import Rules, batch_sharding, place, shardings
from jaxlm.types import Params


def mesh_of(params: Params) -> Mesh | None:
    """Return the mesh that parameters are sharded over; None for those of one device or of the host."""
    placements = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    return next((placement.mesh for placement in placements if isinstance(placement, NamedSharding)), None)


def num_row_shards(params: Params) -> int:
    """Return the number of devices that rows are split over."""
    mesh = mesh_of(params)
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES) if mesh else 1


def shard_params(params: Params, mesh: Mesh | None, own: Rules = ()) -> Params:
    """Return parameters as each device's shards; without a mesh, on the default device."""
    return place(params, shardings(params, mesh, own)) if mesh else jax.device_put(params)


def constraints(params: Params) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which functions are traced for the mesh of the parameters; see `activations.constrain`."""
    mesh = mesh_of(params)
    return use_abstract_mesh(mesh.abstract_mesh) if mesh else contextlib.nullcontext()


def place_batch(rows: Any, params: Params) -> Any:
    """Return arrays of the host, rows first and equal on all processes, on the devices; each gets its own rows only.

    The first rows are repeated until the number of rows is a multiple of `num_row_shards`.
    """
    mesh, shards = mesh_of(params), num_row_shards(params)

    def place(array: np.ndarray) -> jax.Array:
        filled = np.asarray(array)[np.arange(-(-len(array) // shards) * shards) % len(array)]
        return jax.make_array_from_callback(filled.shape, batch_sharding(mesh), lambda index: filled[index])

    return jax.tree.map(place, rows) if mesh else rows


def to_host(tree: Any) -> Any:
    """Return arrays as numpy arrays, on every process."""
    def gather(array: jax.Array) -> jax.Array | np.ndarray:
        return array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)

    return jax.device_get(jax.tree.map(gather, tree))


def fetch(tree: Any, count: int) -> Any:
    """Return the first `count` rows of arrays as numpy arrays, on every process."""
    return jax.tree.map(lambda array: array[:count], to_host(tree))


def run_rows(function: Callable[..., Any], params: Params, rows: Any, *others: Any) -> Any:
    """Return `function(params, rows, *others)` as numpy arrays with rows first, on every process.

    Every device reads the whole of `others`, further arrays of the host or the default device.
    """
    with constraints(params):
        found = function(params, place_batch(rows, params), *others)
    return fetch(found, len(jax.tree.leaves(rows)[0]))
