"""Several processes: joining them, and which rows of a batch each one reads."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding

# Any of these says that this process is one of several, and that jax can find the others by itself.
CLUSTER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def join_processes() -> None:
    """Starts jax.distributed where the environment names a cluster: a TPU pod, Slurm, Open MPI, or the three variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID. A single process needs nothing."""
    if jax.distributed.is_initialized():
        return
    workers = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    alone = os.environ.get("SLURM_NTASKS", "2") == "1" or os.environ.get("OMPI_COMM_WORLD_SIZE", "2") == "1"
    if "," not in workers and (alone or not any(name in os.environ for name in CLUSTER_VARIABLES)):
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "JAX_COORDINATOR_ADDRESS" in os.environ and "JAX_PROCESS_ID" in os.environ:
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
        )
    else:
        jax.distributed.initialize()


def local_rows(sharding: NamedSharding, batch_size: int, length: int) -> slice:
    """The smallest run of rows that holds all rows of this process's devices."""
    indices = sharding.addressable_devices_indices_map((batch_size, length)).values()
    bounds = [index[0].indices(batch_size) for index in indices if index is not None]
    return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def place_rows(sharding: NamedSharding, batch_size: int, rows: slice) -> Callable[[np.ndarray], jax.Array]:
    """A function from this process's rows to the global array of `batch_size` rows."""

    def place(local: np.ndarray) -> jax.Array:
        shape = (batch_size, *local.shape[1:])
        if rows == slice(0, batch_size):
            return jax.device_put(local, sharding)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            return local[start - rows.start : stop - rows.start]

        return jax.make_array_from_callback(shape, sharding, part)

    return place
