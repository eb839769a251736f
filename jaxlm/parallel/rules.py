"""The sharding rules: one table from parameter paths to PartitionSpecs, and one from logical axes of activations.

Every model family uses the same names for the same kinds of parameters, so one table serves them all.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.parallel.hosts import require_same
from jaxlm.parallel.mesh import BATCH_AXES
from jaxlm.trees import path_string

Axes = str | tuple[str, ...] | None
"""Mesh axes that split a dimension; None for none."""
Rules = tuple[tuple[str, tuple[Axes, ...]], ...]

# The first pattern that matches the end of the path decides; its axes are those of the last dimensions, and None
# leaves a dimension whole. In each pair of matrices the first is column-parallel and the second row-parallel over
# `tensor`, so that one all-reduce a pair suffices (Megatron-LM, Shoeybi et al. 2019, section 3). `fsdp` always
# splits the inputs: the gathered parts of rows are contiguous, while those of columns have to be rearranged, which took
# a quarter of a step of GPT-3 13B on 256 chips of v5e.
RULES: Rules = (
    (r"(query|key|value|wi|wi_0|wi_1)/kernel", ("fsdp", "tensor")),
    (r"(query|key|value|wi|wi_0|wi_1)/bias", ("tensor",)),
    (r"(out|wo)/kernel", (("tensor", "fsdp"), None)),
    (r"(word|shared)/embedding", ("tensor", "fsdp")),
    (r"lm_head/kernel", ("fsdp", "tensor")),
    (r"embedding", (None, "fsdp")),
    (r"kernel", ("fsdp", None)),
    (r".*", ()),
)

ACTIVATION_AXES: dict[str | None, Any] = {"batch": BATCH_AXES, "vocabulary": "tensor", "heads": "tensor", None: None}
"""Logical axis of an activation → mesh axes."""


def partition_spec(path: str, shape: tuple[int, ...], axis_sizes: dict[str, int], own: Rules = ()) -> PartitionSpec:
    """Return the PartitionSpec of one parameter, without mesh axes that do not divide their dimension."""
    tail = next(tail for pattern, tail in own + RULES if re.search(rf"(^|/)({pattern})$", path))
    # Adafactor's moments have one number per row or column, and are split like these. (optax calls the shorter side of
    # a matrix its rows, so moments of `wo` and embeddings are split the other way and gathered: a few kilobytes.)
    if moment := re.search(r"(^|/)v_(row|col)/", path):
        tail = tail[:-1] if moment[2] == "row" else tail[:-2] + tail[-1:]
    if len(tail) > len(shape):
        return PartitionSpec()
    spec = [None] * (len(shape) - len(tail)) + [
        _dividing(axes, size, axis_sizes) for axes, size in zip(tail, shape[len(shape) - len(tail) :], strict=True)
    ]
    return PartitionSpec(*spec)


def _dividing(axes: Axes, size: int, axis_sizes: dict[str, int]) -> Axes:
    """Return the mesh axes, or of several the first ones, that divide a dimension of `size`."""
    if isinstance(axes, tuple):
        counts = itertools.accumulate((axis_sizes[axis] for axis in axes), operator.mul)
        return tuple(axis for axis, count in zip(axes, counts, strict=True) if size % count == 0) or None
    return axes if axes is not None and size % axis_sizes[axes] == 0 else None


def is_stacked(path: str) -> bool:
    """Return whether the leading axis of a parameter is that of equal layers ("encoder/layers/mlp/wi/kernel")."""
    return "layers" in path.split("/")[:-1]


def shardings(tree: Any, mesh: Mesh, own: Rules = ()) -> Any:
    """Return a NamedSharding for every leaf of a tree of parameters, or of a tree that contains copies of them.

    Leaves are arrays or shapes. Optimizer states contain copies. The model's `own` rules come before RULES.
    """
    sizes = dict(mesh.shape)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(path_string(path), tuple(leaf.shape), sizes, own))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def place(tree: Any, placement: Any) -> Any:
    """Return arrays under their shardings; of one of the host, which all processes have, each device gets its shard.

    `jax.device_put` would send the whole of it to every device, to compare it between the processes; here those compare
    a digest.

    Raises:
        UserError: The arrays differ between processes that share a mesh.
    """
    hosts = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray)]
    if hosts and not all(sharding.is_fully_addressable for sharding in jax.tree.leaves(placement)):
        total = hashlib.sha256()
        for leaf in hosts:
            total.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
        require_same({"weights of the model that is read (each process needs the same folder)": total.hexdigest()})

    def put(leaf: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, np.ndarray):
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.device_put(leaf, sharding)

    return jax.tree.map(put, tree, placement)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of rows over `data` and `fsdp`. The length is never sharded: corruptions sort along it."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """Return the rows of this process's devices, in order; jax's mesh of a torus may scatter those of a host."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique([np.arange(batch_size)[index[0]] for index in indices if index is not None])


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
