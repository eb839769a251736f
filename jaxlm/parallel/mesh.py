"""The device mesh: `data` and `fsdp` split the batch, `fsdp` and `tensor` split parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxlm.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices."""

    data: int = -1
    """Copies of the model, each with its share of the batch; -1 takes all devices that are left."""
    fsdp: int = 1
    """Ways in which parameters and optimizer state are split, along with the batch (ZeRO-3)."""
    tensor: int = 1
    """Ways in which each matrix product is split (Megatron)."""

    def shape(self, devices: int) -> tuple[int, int, int]:
        """Sizes of the axes for a number of devices; UserError when they do not multiply to it."""
        sizes = dict(zip(AXES, (self.data, self.fsdp, self.tensor), strict=True))
        if any(size != -1 and size < 1 for size in sizes.values()):
            raise UserError(f"mesh sizes must be at least 1 (or -1 for one of them), not {_spell(sizes)}.")
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise UserError(f"only one mesh axis can be -1, not {' and '.join(free)}.")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free and devices % fixed == 0:
            sizes[free[0]] = devices // fixed
        if math.prod(sizes.values()) != devices:
            raise UserError(
                f"the mesh {_spell(sizes)} does not fit {devices} device{'s' * (devices != 1)}: the product of its "
                "axes must equal the number of devices; set --mesh.data -1 to take what is left."
            )
        return tuple(sizes.values())  # type: ignore[return-value]


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices (or those given, in topology order).

    The axes are of type Auto: the compiler propagates shardings from parameters and batch, and Linen's modules know
    nothing of them.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = config.shape(len(devices))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_batch(batch_size: int, accumulate: int, mesh: Mesh) -> None:
    """UserError unless every device gets the same number of rows of each part of the batch."""
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if (batch_size // accumulate) % ways:
        parts = f" in {accumulate} parts" if accumulate > 1 else ""
        raise UserError(
            f"train.batch_size {batch_size}{parts} is not divisible by data x fsdp = {ways} devices; change "
            "train.batch_size or the mesh."
        )


def _spell(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
