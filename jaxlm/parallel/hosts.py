"""Multi-process runs: joining the processes, and the rows of a batch that each one reads."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxlm.errors import UserError

Result = TypeVar("Result")

CLUSTER = "JAXLM_CLUSTER"
"""Launchers of one process per host or GPU set this variable to 1: then it is an error if jax cannot find the other
processes, instead of several runs of one process each. A Cloud TPU VM needs it, since only its metadata server knows
the workers."""
JOIN_SECONDS = "JAXLM_JOIN_SECONDS"
"""Seconds to wait for the other processes, 300 by default."""
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables that jax reads in a step of Slurm. The shell of `salloc` is one process, whatever SLURM_NTASKS says, and
has no node list of a step."""


def join_processes() -> None:
    """Start jax.distributed if the environment names several processes.

    It does if JAXLM_CLUSTER=1, or if it names a cluster: a TPU slice on GKE, several TPU slices, a step of Slurm, Open
    MPI, or the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. If not all processes join
    within JAXLM_JOIN_SECONDS, the process says so and exits with 2.

    Raises:
        UserError: The variables are wrong.
    """
    if jax.distributed.is_initialized() or not _is_one_of_several():
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    seconds, processes = _join_seconds(), _processes_from_env()
    who, bind_address = "this process waits for the others of its cluster", None
    if processes:
        address, count, index = processes
        who = f"process {index} of {count} waits at {address} for the others"
        if index == 0:
            _require_free_port(address)
        if address.startswith(("127.", "localhost:", "[::1]:")):
            bind_address = address  # by default jax listens on all interfaces

    def give_up() -> None:  # jax's own timeout aborts with a C++ stack
        _say(f"{who}; gave up after {seconds} s. Start all at the same time, each with an index of its own.")
        os._exit(2)

    _say(f"{who}; waiting up to {seconds} s ({JOIN_SECONDS}).")
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            *(processes or ()), initialization_timeout=seconds + 60, coordinator_bind_address=bind_address
        )
    except ValueError as error:
        raise UserError(
            f"the environment says that this process is one of several, but jax cannot find the others ({error}); "
            "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error
    finally:
        timer.cancel()


def _join_seconds() -> int:
    seconds = os.environ.get(JOIN_SECONDS, "300")
    if not re.fullmatch(r"[1-9]\d{0,5}", seconds):
        raise UserError(f"{JOIN_SECONDS} is {seconds!r}; it must be a whole number of seconds above 0.")
    return int(seconds)


def _processes_from_env() -> tuple[str, int, int] | None:
    """Return the coordinator's HOST:PORT, the number of processes and this one's index; None if jax detects them."""
    env = os.environ
    address = env.get("JAX_COORDINATOR_ADDRESS")
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS is {address!r}; it must be HOST:PORT.")
    if address is None or "JAX_PROCESS_ID" not in env:
        return None
    try:
        count, index = int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
    except (KeyError, ValueError):
        raise UserError(
            "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID are set, so JAX_NUM_PROCESSES must be too; the last two are "
            "whole numbers."
        ) from None
    if not 0 <= index < count:
        raise UserError(f"JAX_PROCESS_ID is {index}; with JAX_NUM_PROCESSES={count} it must be from 0 to {count - 1}.")
    return address, count, index


def _require_free_port(address: str) -> None:
    """Raise UserError if another program listens at the coordinator's port: jax would crash."""
    try:
        socket.create_server(("", int(address.rpartition(":")[2]))).close()
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at {address} ({error.strerror.partition(' (')[0]}); give each process a "
            "JAX_PROCESS_ID of its own, and JAX_COORDINATOR_ADDRESS a port that is free."
        ) from error


def _say(sentence: str) -> None:
    print(f"jaxlm: {sentence}", file=sys.stderr, flush=True)


def _is_one_of_several() -> bool:
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" in env and "JAX_PROCESS_ID" in env:
        return True
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env:
        return True
    if "OMPI_COMM_WORLD_SIZE" in env:
        return env["OMPI_COMM_WORLD_SIZE"] != "1"
    if all(name in env for name in SLURM_STEP):
        # Slurm's interactive step is one process; its SLURM_NTASKS is that of the job.
        return "1" not in (env["SLURM_NTASKS"], env.get("SLURM_STEP_NUM_TASKS"))
    return env.get(CLUSTER, "") not in ("", "0") or "JAX_COORDINATOR_ADDRESS" in env


def main_first(action: Callable[[], Result], everywhere: bool = True) -> Result | None:
    """Run `action` on process 0, then on the others if `everywhere`, so that they find the files that it has written.

    If it fails on process 0 it fails on all, so that none waits forever. Returns None where `action` was not run.
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
    """Return the smallest range of rows that contains all rows of this process's devices."""
    indices = sharding.addressable_devices_indices_map((batch_size, length)).values()
    bounds = [index[0].indices(batch_size) for index in indices if index is not None]
    return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def place_rows(sharding: NamedSharding, batch_size: int, rows: slice) -> Callable[[np.ndarray], jax.Array]:
    """Return a function from this process's rows to the global array of `batch_size` rows."""

    def place(local: np.ndarray) -> jax.Array:
        shape = (batch_size, *local.shape[1:])
        if rows == slice(0, batch_size):
            return jax.device_put(local, sharding)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            return local[start - rows.start : stop - rows.start]

        return jax.make_array_from_callback(shape, sharding, part)

    return place
