"""XLA options of the train step, by platform."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """Compiler options for a step on this mesh."""
    if mesh.devices.flat[0].platform == "tpu":
        return {"xla_tpu_spmd_rng_bit_generator_unsafe": True}
    return None
