"""Checksums of the arrays of a checkpoint, computed on the devices and independent of the sharding.

Orbax's array files have none: a bit flipped on disk is restored as another number without an error. Each checkpoint
holds one 32-bit checksum per array, which the restored array must match.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.trees import path_string

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(tree: Any) -> tuple[dict[str, int], bool]:
    """Return the checksum of each array of `tree` by its path, and whether all numbers are finite."""
    leaves = {path_string(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    sharding = next(iter(leaves.values())).sharding
    # Replicated, so that every process of a cluster can read the result.
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    numbers, finite = jax.device_get(jax.jit(_checksums, out_shardings=replicated)(leaves))
    return {path: int(number) for path, number in numbers.items()}, bool(finite)


def _checksums(leaves: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves.values() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return {path: checksum(leaf) for path, leaf in leaves.items()}, jnp.all(jnp.stack(finite or [jnp.array(True)]))


@jax.jit  # traced once for all arrays of one shape, such as a parameter and its moments
def checksum(leaf: jax.Array) -> jax.Array:
    """Return the sum modulo 2^32 of a bijective hash of each element's bits and its index.

    A change of one element always changes the sum; changes of several cancel out with probability 2^-32. The order of
    summation does not matter.
    """
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    bits = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    index, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    mixed = (bits ^ (index * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
