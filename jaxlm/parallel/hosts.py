"""Several processes: joining them, and which rows of a batch each one reads."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax._src.clusters import ClusterEnv
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

# Seconds for which jax looks for the coordinator's address; without a sign of life after which a process is lost; for
# which one that has ended waits for the others.
FIND_WITHIN, LOST_AFTER, LEAVE_WITHIN = 300, 30, 300

# Seconds for which process 0 lives on when it has found one lost, so that the others find the same, not process 0 lost.
LAST = 4


def join_processes() -> None:
    """Starts jax.distributed where JAXLM_CLUSTER=1 or the environment names a cluster: a TPU slice on GKE, several TPU
    slices, a step of Slurm, Open MPI, or the three variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. A single process needs nothing. UserError where jax cannot find the others."""
    if jax.distributed.is_initialized() or not _is_one_of_several():
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # jax would abort the others with a stack of C++ frames; `_watch` and `_relay` end them with a sentence.
    jax.config.update("jax_enable_recoverability", True)
    address, count, index = _addresses()
    leaving, relaying = threading.Event(), threading.Event()
    place = tempfile.gettempdir()
    place = place if len(place) < 80 else "/tmp"  # a socket's path has at most 104 to 108 bytes
    with tempfile.TemporaryDirectory(prefix="jaxlm-", dir=place) as folder:  # one connection is made, and lasts
        if index > 0:
            address = _relay(address, Path(folder), lambda: relaying.is_set() and _end_without("0"))
        jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=LOST_AFTER)
    relaying.set()
    threading.Thread(target=_watch, args=(leaving,), daemon=True).start()
    atexit.register(_leave_processes, leaving, relaying)


def _addresses() -> tuple[str, int, int]:
    """(host:port of the coordinator, number of processes, index of this one), from the three variables, else from jax's
    cluster detection, for which there is no public function."""
    told = os.environ
    address, count, index = told.get("JAX_COORDINATOR_ADDRESS"), None, None
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS is {address!r}; it must be HOST:PORT.")
    if address is not None and "JAX_PROCESS_ID" in told:
        try:
            return address, int(told["JAX_NUM_PROCESSES"]), int(told["JAX_PROCESS_ID"])
        except (KeyError, ValueError):
            raise UserError(
                "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID are set, so JAX_NUM_PROCESSES must be too; the last two "
                "are whole numbers."
            ) from None
    try:
        *found, _ = ClusterEnv.auto_detect_unset_distributed_params(address, count, index, [], None, FIND_WITHIN)
        if None in found:
            raise ValueError("it knows no such cluster")
    except ValueError as error:
        raise UserError(
            f"the environment says that this process is one of several, but jax cannot find the others ({error}); "
            "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error
    return tuple(found)


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


def _watch(leaving: threading.Event) -> None:
    """Ends this process with one sentence when another is lost, whatever it waits for. There is no public way to ask
    who is there without all processes asking at the same time, hence the private module."""
    state = distributed.global_state
    everyone = range(state.num_processes)
    while not leaving.wait(1.0):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 cannot be reached, as the relay will say
            lost = set(everyone) - set(state.client.get_live_nodes(everyone))
            if lost and not leaving.is_set():
                _end_without(" and ".join(map(str, sorted(lost))))


def _relay(address: str, folder: Path, when_broken: Callable[[], object]) -> str:
    """Opens a socket in `folder` that forwards to the coordinator at `address`, and returns its address. When the
    coordinator's side of a connection closes, as when process 0 is lost, calls `when_broken` before it closes jax's
    side, at which jax would abort."""
    host, port = address.rsplit(":", 1)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "relay"))
    server.listen()

    def connect(jax_side: socket.socket) -> None:
        try:
            coordinator_side = socket.create_connection((host.strip("[]"), int(port)))
        except OSError:  # process 0 has not begun yet; jax tries again
            jax_side.close()
            return
        closed = threading.Event()

        def forward(source: socket.socket, target: socket.socket) -> None:
            failing = source
            with contextlib.suppress(OSError):
                while data := source.recv(2**16):
                    failing = target
                    target.sendall(data)
                    failing = source
            if failing is coordinator_side and not closed.is_set():
                when_broken()
            closed.set()
            for side in (source, target):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=forward, args=(jax_side, coordinator_side), daemon=True).start()
        forward(coordinator_side, jax_side)

    def accept() -> None:
        while True:
            threading.Thread(target=connect, args=server.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"unix:{folder / 'relay'}"


def _end_without(lost: str) -> NoReturn:
    state = distributed.global_state
    print(
        f"jaxlm: process {lost} of {state.num_processes} has ended or cannot be reached, so this one ends too; see its "
        "output, then start the same command again on every host.", file=sys.stderr, flush=True,
    )
    if state.process_id == 0:
        time.sleep(LAST)
    os._exit(1)


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Where several processes run, what fails may fail since another one is lost: leaves `_watch` time to say so."""
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1 and not isinstance(error, UserError):
            time.sleep(LOST_AFTER + 5)
        raise


def _leave_processes(leaving: threading.Event, relaying: threading.Event) -> None:
    """Ends jax.distributed, once all have done their work. Left to itself process 0 stops the coordinator the moment
    that all have said goodbye, and a process that is slower to hang up takes the closed connection for a failure and
    aborts."""
    leaving.set()
    state = distributed.global_state
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        state.client.wait_at_barrier("jaxlm leaves", LEAVE_WITHIN * 1000)
    relaying.clear()
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
