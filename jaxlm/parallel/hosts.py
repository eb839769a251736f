"""Several processes: joining them, and which rows of a batch each one reads."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxlm.errors import UserError

Result = TypeVar("Result")

# Set to 1 by what starts one process a host or a GPU: jax is to find the others, and where it cannot, that is an error
# rather than as many runs of one process each. On a Cloud TPU VM nothing else tells: the workers are known to the
# metadata server alone.
CLUSTER = "JAXLM_CLUSTER"

# What jax asks of a step of Slurm. In the shell that `salloc` opens, which is one process whatever SLURM_NTASKS says,
# the step's node list is missing.
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

# Seconds for which the coordinator outlives the last goodbye.
GRACE = 1.0


def join_processes() -> None:
    """Starts jax.distributed where JAXLM_CLUSTER=1 or the environment names a cluster: a TPU slice on GKE, several TPU
    slices, a step of Slurm, Open MPI, or the three variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. A single process needs nothing. UserError where jax cannot find the others."""
    if jax.distributed.is_initialized() or not _is_one_of_several():
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "JAX_COORDINATOR_ADDRESS" in os.environ and "JAX_PROCESS_ID" in os.environ:
        try:
            count, index = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
        except (KeyError, ValueError):
            raise UserError(
                "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID are set, so JAX_NUM_PROCESSES must be too; the last two "
                "are whole numbers."
            ) from None
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, index)
    else:
        try:
            jax.distributed.initialize()
        except ValueError as error:  # it has found no cluster, or half of one
            raise UserError(
                f"the environment says that this process is one of several, but jax cannot find the others ({error}); "
                "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
            ) from error
    atexit.register(_leave_processes)


def _is_one_of_several() -> bool:
    told = os.environ
    if "JAX_COORDINATOR_ADDRESS" in told and "JAX_PROCESS_ID" in told:
        return True
    if "," in told.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in told:
        return True
    if "OMPI_COMM_WORLD_SIZE" in told:
        return told["OMPI_COMM_WORLD_SIZE"] != "1"
    if all(name in told for name in SLURM_STEP):
        # Slurm's interactive step is one process, though SLURM_NTASKS is then the job's.
        return "1" not in (told["SLURM_NTASKS"], told.get("SLURM_STEP_NUM_TASKS"))
    return told.get(CLUSTER, "") not in ("", "0") or "JAX_COORDINATOR_ADDRESS" in told


def _leave_processes() -> None:
    """Ends jax.distributed. Left to itself process 0 stops the coordinator the moment that all have said goodbye, and a
    process that is slower to hang up takes the closed connection for a failure and aborts. There is no public way to
    the coordinator, hence the private module."""
    state = distributed.global_state
    coordinator, state.service = state.service, None
    jax.distributed.shutdown()
    if coordinator is not None:
        time.sleep(GRACE)
        coordinator.shutdown()


def main_first(action: Callable[[], Result], everywhere: bool = True) -> Result | None:
    """Runs `action` on process 0, then, if `everywhere`, on the others, which find what it has made.

    When it fails on process 0 it fails on all, so that none waits for another for ever. None where it was not run.
    """
    if jax.process_count() == 1:
        return action()
    main, result, failure = jax.process_index() == 0, None, None
    if main:
        try:
            result = action()
        except Exception as error:
            failure = error
    good = multihost_utils.broadcast_one_to_all(np.int32(failure is None))
    if failure is not None:
        raise failure
    if not good:
        raise UserError("process 0 stopped; its output says why.")
    return action() if everywhere and not main else result


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
