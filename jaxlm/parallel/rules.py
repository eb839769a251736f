"""One table: parameter path -> how its last two dimensions are split. Every family uses the same names, so one table
serves them all; a layer dimension in front (from the scan) is never split."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.parallel.mesh import BATCH_AXES

# The first pattern that matches the end of the path decides; None keeps a dimension whole.
# Megatron's split: the first matrix of a pair by its outputs, the second by its inputs, so that one all-reduce a pair
# suffices. fsdp takes the other dimension.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"v_(row|col)/.*", ()),  # Adafactor's factored moments: one number a row, too small to split
    (r"(query|key|value|wi|wi_0|wi_1)/kernel", ("fsdp", "tensor")),
    (r"(query|key|value|wi|wi_0|wi_1)/bias", ("tensor",)),
    (r"(out|wo)/kernel", ("tensor", "fsdp")),
    (r"(word|shared)/embedding", ("tensor", "fsdp")),
    (r"lm_head/kernel", ("fsdp", "tensor")),
    (r"embedding", (None, "fsdp")),
    (r"kernel", ("fsdp", None)),
    (r".*", ()),
)


def partition_spec(path: str, shape: tuple[int, ...], axis_sizes: dict[str, int]) -> PartitionSpec:
    """The spec for one parameter; an axis that does not divide its dimension is left out."""
    tail = next(tail for pattern, tail in RULES if re.search(rf"(^|/)({pattern})$", path))
    if len(tail) > len(shape):
        return PartitionSpec()
    spec = [None] * (len(shape) - len(tail)) + [
        axis if axis is not None and size % axis_sizes[axis] == 0 else None
        for axis, size in zip(tail, shape[len(shape) - len(tail) :], strict=True)
    ]
    return PartitionSpec(*spec)


def path_string(path: tuple[Any, ...]) -> str:
    """A pytree path as "encoder/layers/attention/query/kernel"."""
    return "/".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))) for entry in path)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf of `tree` (arrays or shapes): a parameter tree, or anything that contains copies
    of one, as optimizer states do."""
    sizes = dict(mesh.shape)

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(path_string(path), tuple(leaf.shape), sizes))

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over data and fsdp; the length is whole on every device, since corruptions sort along it."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
    """Devices over which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def placement(mesh: Mesh) -> Callable[[jax.Array, tuple[str | None, ...]], jax.Array]:
    """The rule for arrays inside a step: rows over data and fsdp, the vocabulary over tensor, everything else whole."""
    axes = {"batch": BATCH_AXES, "vocabulary": "tensor"}

    def rule(x: jax.Array, counts: tuple[str | None, ...]) -> jax.Array:
        spec = PartitionSpec(*(axes.get(count) for count in counts))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return rule


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())
