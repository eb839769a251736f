"""Peak arithmetic of known chips, the denominator of model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one device as jax counts devices, from the makers' data sheets (TPU v2, v3 and 7x: one core).
PEAKS: tuple[tuple[str, float], ...] = (
    ("TPU7x", 1153.5e12), ("TPU v6", 918e12), ("TPU v5p", 459e12), ("TPU v5 lite", 197e12), ("TPU v5e", 197e12),
    ("TPU v5", 459e12), ("TPU v4", 275e12), ("TPU v3", 61.5e12), ("TPU v2", 22.5e12),
    ("GH200", 989e12), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("B200", 2250e12),
    ("A100", 312e12), ("L40S", 362e12), ("L4", 121e12), ("A10", 125e12), ("V100", 125e12), ("T4", 65e12),
    ("RTX 4090", 165e12),
)


def peak_flops(device: jax.Device) -> float:
    """Peak FLOP/s of `device` in bfloat16, or 0 where it is not known (CPUs). float32 is held to the same peak: it is
    what the chip could do."""
    # Whole words: an L40 is no L4, an A10G no A10.
    found = (peak for name, peak in PEAKS if re.search(rf"\b{name}\b", device.device_kind, re.IGNORECASE))
    return next(found, 0.0)


def measured_flops(device: jax.Device, dtype: str, size: int | None = None, tries: int = 5) -> float:
    """FLOP/s that a product of two `size` x `size` matrices reaches on `device`: the best of a few tries.

    By default 1024 on a CPU and 8192 elsewhere: large enough for the best rate, small enough for a second.
    """
    size = size or (1024 if device.platform == "cpu" else 8192)
    matrix = jax.device_put(jnp.full((size, size), 0.5, dtype), device)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)
