"""Peak FLOP/s, clocks and bandwidths of known chips; peak FLOP/s is the denominator of MFU."""

from __future__ import annotations

import dataclasses
import re
import timeit
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one device as jax counts devices, from the makers' data sheets (TPU v2, v3 and 7x: one core).
PEAKS: tuple[tuple[str, float], ...] = (
    ("TPU7x", 1153.5e12), ("TPU v6", 918e12), ("TPU v6e", 918e12), ("TPU v5p", 459e12), ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12), ("TPU v5", 459e12), ("TPU v4", 275e12), ("TPU v3", 61.5e12), ("TPU v2", 23e12),
    ("GH200", 989e12), ("H200 NVL", 835e12), ("H200", 989e12), ("H100 NVL", 835e12), ("H100 PCIe", 756e12),
    ("H100", 989e12), ("B200", 2250e12),
    ("A100", 312e12), ("L40S", 362e12), ("L4", 121e12), ("A10", 125e12), ("V100", 125e12), ("T4", 65e12),
    ("RTX 4090", 165e12),
)


@dataclasses.dataclass(frozen=True)
class TPU:
    """One device of a TPU generation.

    Attributes:
        clock: Clock in Hz.
        hbm_bandwidth: HBM bandwidth in bytes/s.
        mxu_width: Rows and columns of its matrix units.
        cores: TensorCores of a device; a kernel's parallel grid dimension is split over them.
        link_bandwidth: Bandwidth of one link to a neighbouring chip (ICI), in bytes/s and one direction.
        slice_bandwidth: Bandwidth of a chip's share of the network between slices (DCN), in bytes/s; 0 if not
            published.
    """

    clock: float
    hbm_bandwidth: float
    mxu_width: int
    cores: int = 1
    link_bandwidth: float = 0.0
    slice_bandwidth: float = 0.0


# Bandwidths: Google Cloud's pages on each generation. Clocks: v2's, v3's and v4's are published (Jouppi et al. 2020 and
# 2023); the others follow from the peak, which is 2 x MXUs x width^2 x clock: v5e has 4 MXUs of 128, v4 and v5p 8 of
# 128 (both cores of a chip). v6e is counted as 4 MXUs of 256, since the compiler's estimate for a large product is
# already more FLOPs a cycle than 2 of them do. 7x has no entry: neither its clock nor its matrix units are published.
# Links: Google Cloud's bandwidth of a chip in both directions (v5e 400, v5p 1,200, v6e 800 GB/s) over its 4 or 6 ports;
# v4's is 2,400 Gbit/s in one direction over 6. Between slices: v5e 6.4 and v6e 25.6 Tbit/s a pod of 256 chips, v5p 50
# Gbit/s a chip.
TPUS: dict[str, TPU] = {
    "TPU v6": TPU(1.75e9, 1640e9, 256, 1, 100e9, 12.5e9),
    "TPU v5p": TPU(1.75e9, 2765e9, 128, 2, 100e9, 6.25e9),
    "TPU v5 lite": TPU(1.5e9, 819e9, 128, 1, 50e9, 3.125e9),
    "TPU v5e": TPU(1.5e9, 819e9, 128, 1, 50e9, 3.125e9),
    "TPU v5": TPU(1.75e9, 2765e9, 128, 2, 100e9, 6.25e9),
    "TPU v4": TPU(1.05e9, 1228e9, 128, 2, 50e9),
    "TPU v3": TPU(0.94e9, 450e9, 128),
    "TPU v2": TPU(0.7e9, 350e9, 128),
}


@dataclasses.dataclass(frozen=True)
class GPU:
    """One model of GPU.

    Attributes:
        kind: Its name, as jax has it.
        capability: CUDA compute capability, major and minor.
        multiprocessors: Number of streaming multiprocessors.
        lanes: Number of float32 units of a multiprocessor.
        threads: Maximum number of threads of a multiprocessor.
        shared_memory: Shared memory of a multiprocessor in bytes.
        cache: L2 cache in bytes.
        clock: Highest clock in Hz.
        memory: Memory in bytes.
        memory_bandwidth: Memory bandwidth in bytes/s.
        link_bandwidth: Bandwidth to the other GPUs of its host (NVLink, PCIe for the L4), in bytes/s and one direction.
        network_bandwidth: Bandwidth of its share of the network between hosts, in bytes/s; 0 where none is usual.
    """

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    threads: int
    shared_memory: int
    cache: int
    clock: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float = 0.0


# NVIDIA's data sheets and architecture papers; the exact memory and L2 sizes are those of XLA's device descriptions.
# Networks: those of DGX hosts, 8 adapters of 200 Gbit/s (A100) or 400 Gbit/s.
GPUS: dict[str, GPU] = {
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167936, 41943040, 1.41e9, 84974239744, 2039e9, 300e9,
                25e9),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233472, 52428800, 1.98e9, 85028765696, 3352e9, 450e9,
                50e9),
    "h200": GPU("NVIDIA H200", (9, 0), 132, 128, 2048, 233472, 52428800, 1.98e9, 151397597184, 4800e9, 450e9, 50e9),
    "b200": GPU("NVIDIA B200", (10, 0), 148, 128, 2048, 233472, 132644864, 1.965e9, 191514411008, 7672e9, 900e9, 50e9),
    "l4": GPU("NVIDIA L4", (8, 9), 58, 128, 1536, 102400, 50331648, 2.04e9, 22 * 2**30, 300e9, 32e9),
}


def gpu_model(device: jax.Device) -> GPU | None:
    """Return the facts of a GPU, or None where they are not known."""
    return next((gpu for gpu in GPUS.values() if gpu.kind == device.device_kind), None)


def memory_bandwidth(device: jax.Device) -> float:
    """Return the memory bandwidth of `device` in bytes/s, or 0 where it is not known."""
    tpu, gpu = tpu_generation(device), gpu_model(device)
    return tpu.hbm_bandwidth if tpu else gpu.memory_bandwidth if gpu else 0.0


def tpu_generation(device: jax.Device) -> TPU | None:
    """Return the clock and bandwidth of a TPU device, or None where they are not known."""
    return next((chip for name, chip in TPUS.items() if device.device_kind.startswith(name)), None)


def peak_flops(device: jax.Device) -> float:
    """Return the peak FLOP/s of `device` in bfloat16, or 0 where it is not known (CPUs).

    MFU in float32 uses the same peak, since the chip could reach it.
    """
    # Whole words: an L40 is no L4, an A10G no A10. These are less than the card whose name they have.
    if re.search(r"\b(Laptop|MIG)\b|4090 D\b", device.device_kind):
        return 0.0
    found = (peak for name, peak in PEAKS if re.search(rf"\b{name}\b", device.device_kind, re.IGNORECASE))
    return next(found, 0.0)


def measured_flops(device: jax.Device, dtype: str, size: int | None = None, tries: int = 5) -> float:
    """Return the FLOP/s of a product of two `size` x `size` matrices on `device`, the best of `tries`.

    The size is by default 1024 on a CPU and 8192 elsewhere: large enough for the best rate, small enough for a second.
    """
    size = size or (1024 if device.platform == "cpu" else 8192)
    matrix = jax.device_put(jnp.full((size, size), 0.5, dtype), device)
    return 2.0 * size**3 / _fastest(jnp.matmul, (matrix, matrix), tries)


def measured_bandwidth(device: jax.Device, size: int = 2**28, tries: int = 5) -> float:
    """Return the bytes/s that `device` reads and writes in a copy of `size` bytes, the best of `tries`."""
    array = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    return 2.0 * size / _fastest(jnp.negative, (array,), tries)


def _fastest(function: Callable[..., jax.Array], operands: Sequence[jax.Array], tries: int) -> float:
    """Return the seconds of a jitted function after its first run, the least of `tries`."""
    jitted = jax.jit(function)
    jitted(*operands).block_until_ready()
    return min(timeit.repeat(lambda: jitted(*operands).block_until_ready(), number=1, repeat=tries))
