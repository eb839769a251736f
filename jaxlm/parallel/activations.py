"""Placement of activations on the mesh of the program being traced.

The program sets that mesh with `tracing_for`, or jax's `use_abstract_mesh`. Without constraints the compiler guesses
the placement of activations from the shardings of the parameters. For parameters sharded over `fsdp` it guesses that
activations are sharded along their width, and then moves activations between devices instead of parameters.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec, get_abstract_mesh, use_abstract_mesh

from jaxlm.parallel.mesh import BATCH_AXES
from jaxlm.parallel.rules import ACTIVATION_AXES

_options: contextvars.ContextVar[Mapping[str, bool | int] | None] = contextvars.ContextVar("options", default=None)


@contextlib.contextmanager
def tracing_for(mesh: Mesh, options: Mapping[str, bool | int] | None) -> Iterator[None]:
    """Trace a program for the devices of a mesh, which will be compiled with these options."""
    token = _options.set(options)
    try:
        with use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        _options.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shard the leading dimensions of `x` by logical axis name; the identity where there is no mesh.

    Axes are "batch", "vocabulary", "heads" or None for each leading dimension; by default the first is the batch.
    """
    if get_abstract_mesh().empty:
        return x
    spec = PartitionSpec(*(ACTIVATION_AXES[axis] for axis in axes or ("batch",)))
    return jax.lax.with_sharding_constraint(x, spec)


def num_batch_shards() -> int:
    """Return the number of devices over which the rows of a batch are sharded."""
    return math.prod(get_abstract_mesh().shape.get(axis, 1) for axis in BATCH_AXES)


def num_vocabulary_shards() -> int:
    """Return the number of devices over which the vocabulary of the logits is sharded."""
    return get_abstract_mesh().shape.get(ACTIVATION_AXES["vocabulary"], 1)


def target_platform() -> str:
    """Return the platform of the devices that the traced program will run on: "cpu", "gpu" or "tpu".

    It differs from the default backend when a program is compiled for a topology that is not attached.
    """
    device = get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def target_kind() -> str:
    """Return the model of these devices, as JAX names it: "TPU v4"."""
    device = get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind


def target_options() -> Mapping[str, bool | int]:
    """Return the compiler's options of the traced program."""
    return _options.get() or {}
