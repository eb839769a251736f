"""A checksum of every array of a state: computed where the array lives, the same on every mesh.

Array files carry no checksum of their own: a flipped bit on a disk restores silently as another number. So each
checkpoint notes one 32-bit number per array, and a restored array must give it again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.parallel.rules import path_string

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(tree: Any) -> tuple[dict[str, int], bool]:
    """({path: checksum} of the arrays of `tree`, whether every number in them is finite)."""
    leaves = {path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    sharding = next(iter(leaves.values())).sharding
    # Said outright, so that every process of a cluster can read the result.
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    numbers, finite = jax.device_get(jax.jit(_checksums, out_shardings=everywhere)(leaves))
    return {path: int(number) for path, number in numbers.items()}, bool(finite)


def _checksums(leaves: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves.values() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return {path: _checksum(leaf) for path, leaf in leaves.items()}, jnp.all(jnp.stack(finite or [jnp.array(True)]))


@jax.jit  # traced once for all arrays of a shape, as a parameter and its moments are
def _checksum(leaf: jax.Array) -> jax.Array:
    """uint32. Each element's bits are mixed with its place by steps that lose nothing, then added up modulo 2^32: a
    change of one element always shows, several cancel with a chance of 2^-32, and the order of adding is free."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    place, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    mixed = (bits ^ (place * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
