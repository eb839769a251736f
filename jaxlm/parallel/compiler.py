"""XLA compiler options of a program's steps."""

from __future__ import annotations

from jax.sharding import Mesh

GPU_OPTIONS: dict[str, bool | int] = {
    # Triton finds the tiles of a matrix product by compiling and timing many: a first step of GPT-2 took 15 s on an
    # H100 without it, over a minute with it.
    "xla_gpu_enable_triton_gemm": False,
    # By default two of attention's three projections become one product, whose epilogue cannot add their biases.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
"""Options on every GPU."""

DETERMINISTIC_GPU_OPTIONS: dict[str, bool | int] = {
    # No atomic additions, whose order varies, and no choice of an algorithm by its time in this process.
    "xla_gpu_deterministic_ops": True,
}
"""Further options on GPUs with `train.deterministic`."""

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
"""Further options on v5e, which let all-reduces overlap with compute; launch/tables/STUDIES.md has what they change.

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


def compiler_options(mesh: Mesh, deterministic: bool = False) -> dict[str, bool | int] | None:
    """Return the `compiler_options` of jax.jit for a program on `mesh`; None for the compiler's defaults.

    With `deterministic` the same inputs give the same bits, which other devices than GPUs always do.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        return GPU_OPTIONS | (DETERMINISTIC_GPU_OPTIONS if deterministic else {})
    if device.platform != "tpu":
        return None
    has_fsdp, can_overlap = mesh.shape.get("fsdp", 1) > 1, device.device_kind.startswith(("TPU v5 lite", "TPU v5e"))
    options = dict(FSDP_OPTIONS) if has_fsdp else {}
    if can_overlap:
        options |= OVERLAP_OPTIONS | (FSDP_OVERLAP_OPTIONS if has_fsdp else {})
    return options
