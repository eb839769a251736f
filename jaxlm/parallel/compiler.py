"""XLA compiler options of the train step."""

from __future__ import annotations

from jax.sharding import Mesh

TPU_OPTIONS: dict[str, bool | int] = {
    # Each device generates the random bits of its own rows. By default every TPU generates the bits of the whole batch
    # and slices its part: 16 GiB per layer for attention dropout of 2,048 rows of 512 tokens. "Unsafe" means that the
    # bits depend on the mesh, which is fine for dropout.
    "xla_tpu_spmd_rng_bit_generator_unsafe": True,
}
"""Options on every TPU."""

OVERLAP_OPTIONS: dict[str, bool | int] = {
    # All-reduces become a start and an end. Those with nothing between them are made synchronous again.
    "xla_enable_async_all_reduce": True,
    # Fuses the steps of an all-reduce with matrix products, so that both run at the same time; by default those of
    # all-gathers only.
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    # Also with elementwise loops: the last gradients overlap with the optimizer's update of the first ones.
    "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": True,
    # Combines small gradients up to a mebibyte. By default one all-reduce combines all of them, and can only start
    # after the whole backward pass.
    "xla_jf_crs_combiner_threshold_in_bytes": 2**20,
}
"""Further options on v5e, which let all-reduces overlap with compute; configs/RESULTS.md has what they change.

The compiler supports the fusion of all-reduces on no other generation: it warns of wrong results and refuses to
compile, and its older versions ran out of VMEM on v4. Without the fusion nothing overlaps, and smaller all-reduces
would only add latency."""

FSDP_OPTIONS: dict[str, bool | int] = {
    # Gathers each weight, and reduces each gradient, as a whole. By default the compiler cuts many of the products with
    # them into as many small ones as there are chips ("windowed einsum"), which take up to twice as long as the one.
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}
"""Further options on every TPU where parameters are sharded over `fsdp`."""

FSDP_OVERLAP_OPTIONS: dict[str, bool | int] = {
    # The reduction and the slices that follow stay apart, since the reduction alone overlaps with compute. Fused to a
    # reduce-scatter they send half the bytes, but nothing runs at the same time.
    "xla_tpu_enable_all_reduce_scatter_fusion": False,
}
"""Further options on v5e where parameters are sharded over `fsdp`."""


def compiler_options(mesh: Mesh) -> dict[str, bool | int] | None:
    """Return the `compiler_options` of jax.jit for a train step on `mesh`; None for the compiler's defaults."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    has_fsdp, can_overlap = mesh.shape.get("fsdp", 1) > 1, device.device_kind.startswith(("TPU v5 lite", "TPU v5e"))
    options = TPU_OPTIONS | (FSDP_OPTIONS if has_fsdp else {})
    if can_overlap:
        options |= OVERLAP_OPTIONS | (FSDP_OVERLAP_OPTIONS if has_fsdp else {})
    return options
