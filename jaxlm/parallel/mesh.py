"""The device mesh: the batch is sharded over `data` and `fsdp`, parameters over `fsdp` and `tensor`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh

from jaxlm.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int = -1
    """Data-parallel size: replicas of the model; -1 takes all remaining devices."""
    fsdp: int = 1
    """Fully-sharded data-parallel size: shards of parameters, optimizer state and batch (ZeRO-3)."""
    tensor: int = 1
    """Tensor-parallel size (Megatron)."""

    def shape(self, devices: int) -> tuple[int, int, int]:
        """Return the axis sizes for this number of devices; UserError unless their product equals it."""
        sizes = (self.data, self.fsdp, self.tensor)
        try:
            if min(sizes) < -1:  # numpy takes it for -1
                raise ValueError
            return np.empty(devices).reshape(sizes).shape  # one size may be -1
        except ValueError:
            raise UserError(
                f"the mesh data={self.data}, fsdp={self.fsdp}, tensor={self.tensor} does not fit {devices} "
                f"device{'s' * (devices != 1)}: the product of its axes must equal the number of devices; set one of "
                "them to -1 to take what is left, such as --mesh.data -1."
            ) from None


def num_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of TPU slices that the devices belong to; 1 for other platforms."""
    return len({getattr(device, "slice_index", 0) for device in devices}) if devices[0].platform == "tpu" else 1


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over all devices, or over `devices` in topology order.

    Its axes are of type Auto: the compiler propagates the shardings of parameters and batch, so that models need
    none of their own. Several TPU slices, which a slow network joins, divide the axis `data`.
    """
    devices = list(jax.devices() if devices is None else devices)
    data, fsdp, tensor = config.shape(len(devices))
    slices = num_slices(devices)
    if data % slices:
        raise UserError(
            f"mesh.data {data} is not divisible by the {slices} slices; set --mesh.fsdp and --mesh.tensor so that "
            f"their product divides the {len(devices) // slices} devices of a slice."
        )
    # A physical axis is split where no product of whole ones is an axis of the mesh: 2 x 8 of 4 x 4 chips.
    sizes, options = (data // slices, fsdp, tensor), {"allow_split_physical_axes": True}
    if slices == 1:
        arranged = create_device_mesh(sizes, devices, **options)
    else:
        arranged = create_hybrid_device_mesh(sizes, (slices, 1, 1), devices, **options)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


Sizes = Mapping[str, int] | Literal["host"] | None
"""Axis sizes of the mesh of a trained model, see `make_inference_mesh`."""


def make_inference_mesh(trained: MeshConfig, sizes: Sizes) -> Mesh:
    """Return the mesh of a trained model.

    Args:
        trained: The mesh of its training, for empty sizes; where it does not fit, all devices shard the parameters.
        sizes: Axis sizes of a mesh over all devices; None for this process's devices, which shard the parameters, and
            "host" for its CPU, if JAX_PLATFORMS does not leave it out: a model that no single device can hold.
    """
    if sizes is None or sizes == "host":
        devices = jax.local_devices()
        with contextlib.suppress(RuntimeError):
            devices = jax.local_devices(backend="cpu")[:1] if sizes else devices
        return Mesh(np.reshape(devices, (1, -1, 1)), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    with contextlib.suppress(UserError):
        return make_mesh(MeshConfig(**sizes) if sizes else trained)
    return make_mesh(MeshConfig(**sizes) if sizes else MeshConfig(1, -1, 1))


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, group: int = 1) -> None:
    """Raise UserError unless each microbatch can be sharded evenly over the batch axes, in groups of `group` rows."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if (batch_size // accumulate) % (shards * group):
        microbatches = f" in {accumulate} microbatches" if accumulate > 1 else ""
        why = "one for each of objective.chunks, or for each direction"
        groups = f", of which each takes groups of {group} rows ({why})" if group > 1 else ""
        raise UserError(
            f"train.batch_size {batch_size}{microbatches} is not divisible by data x fsdp = {shards} devices{groups}; "
            "change train.batch_size or the mesh."
        )
