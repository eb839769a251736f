"""Multi-process runs: joining, comparing and ordering the processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxlm.errors import UserError
from jaxlm.paths import cause, check_output, in_bucket, write_whole

Result = TypeVar("Result")

CLUSTER = "JAXLM_CLUSTER"
"""Launchers of one process per host or GPU set this variable to 1: then it is an error if jax cannot find the other
processes, instead of several runs of one process each. A Cloud TPU VM needs it, since only its metadata server knows
the workers. 0 means alone, whatever else the environment says."""
PLACE = ("JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS", "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri",
         "PMIX_NAMESPACE", "JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Variables that name a cluster and one of its processes on a host; together, since `mpirun` keeps the SLURM_PROCID of
its shell."""
JOIN_SECONDS = "JAXLM_JOIN_SECONDS"
"""Seconds to wait for the other processes to start, and for the devices, 300 by default."""
WAIT_SECONDS = "JAXLM_WAIT_SECONDS"
"""Seconds to wait for the other processes later, as for process 0 to tokenize the text: 86,400 by default."""
LOG_SECONDS = 60.0
"""Seconds between two messages of a waiting process."""
LEAVE_SECONDS = 30.0
"""Seconds that a process of several waits for the others at its end, once for a save and once to exit."""
SHARED_SECONDS = 30
"""Seconds in which a file that process 0 has written must be seen by the others."""
HEARTBEAT_SECONDS = "JAXLM_HEARTBEAT_SECONDS"
"""Heartbeat timeout in seconds, after which jax considers a process lost and ends the others; 100 by default."""
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables that jax reads in a step of Slurm. The shell of `salloc` is one process, whatever SLURM_NTASKS says, and
has no node list of a step."""


def join_processes() -> None:
    """Start jax.distributed if the environment names several processes.

    It does if JAXLM_CLUSTER=1, or if it names a cluster: a TPU slice on GKE, several TPU slices, a step of Slurm, Open
    MPI, or the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. If not all processes join
    within JAXLM_JOIN_SECONDS, the process says so and exits with 1.

    Raises:
        UserError: The variables are wrong, or this process of the cluster runs already.
    """
    if jax.distributed.is_initialized() or not _is_one_of_several():
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    seconds, processes = _seconds(JOIN_SECONDS, 300), _processes_from_env()
    state = "this process waits for the others of its cluster"  # jax chooses where they meet
    if processes:
        address, count, index = processes
        state = f"process {index} of {count} waits for {'process 0' if index else 'the others'} at {address}"
    _hold_place()
    log(f"{state}; waiting up to {seconds} s ({JOIN_SECONDS}).")
    try:
        if processes and index == 0:
            _require_free_port(address)
        bind = address if processes and _is_loopback(address) else None
        # jax's service would swallow SIGTERM until the first step; see `share_signals`.
        jax.config.update("jax_enable_preemption_service", False)
        # jax's own timeout aborts with a C++ stack.
        with _patience(state, seconds, JOIN_SECONDS, "Start all at the same time, each with an index of its own."):
            jax.distributed.initialize(
                *(processes or ()), initialization_timeout=seconds + 60, coordinator_bind_address=bind,
                heartbeat_timeout_seconds=_seconds(HEARTBEAT_SECONDS, 100),
            )
    except ValueError as error:
        raise UserError(
            f"the environment says that this process is one of several, but jax cannot find the others ({error}); "
            "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error


def share_signals() -> None:
    """Tell SIGTERM to one of several processes to all from here on; they stop after the same step.

    Until this call, as during hours of tokenization, it ends the process at once.
    """
    if jax.distributed.is_initialized() and distributed.global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()


def start_devices() -> None:
    """Start jax's devices. If they take longer than JAXLM_JOIN_SECONDS the process says so and exits with 1.

    Raises:
        UserError: They are those of several hosts, which have not joined.
    """
    seconds = _seconds(JOIN_SECONDS, 300)
    state = "jax waits for its devices; on a TPU slice of several hosts all must start"
    with _patience(state, seconds, JOIN_SECONDS, "JAX_PLATFORMS=cpu looks at a run from one host."):
        jax.devices()
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise UserError(
            f"this slice has {jax.process_count()} hosts, which jaxlm has not joined; set {CLUSTER}=1 on all."
        )


def _hold_place() -> None:
    """Lock a file of this host until the process ends; raise UserError if a process with the same PLACE has the lock.

    jax would take the second one for the first, restarted, and end all.
    """
    place = [socket.gethostname(), *(os.environ.get(name) for name in PLACE)]  # hosts may share a $TMPDIR
    digest = hashlib.sha256(repr(place).encode()).hexdigest()[:16]
    try:
        file = Path(tempfile.gettempdir(), f"jaxlm-{os.getuid()}-{digest}.lock")
        fcntl.flock(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)  # and never closed
    except BlockingIOError:
        raise UserError(
            "another jaxlm process of this cluster runs on this host, and a second one would end it; set "
            f"{CLUSTER}=0 JAX_PLATFORMS=cpu to look at a run."
        ) from None
    except OSError:  # a host without locks goes on
        pass


@contextlib.contextmanager
def _patience(state: str, seconds: int, variable: str, advice: str) -> Iterator[None]:
    """Log every `LOG_SECONDS` that the block still waits, and exit with 1 after `seconds`."""
    ended = threading.Event()

    def watch() -> None:
        left = float(seconds)
        while not ended.wait(min(LOG_SECONDS, left)):
            left -= LOG_SECONDS
            if left <= 0:
                log(f"{state}; gave up after {seconds} s. {advice}")
                return os._exit(1)
            log(f"{state}, {seconds - left:.0f} s so far of up to {seconds} ({variable}).")

    threading.Thread(target=watch, name="jaxlm-wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _seconds(variable: str, default: int) -> int:
    seconds = os.environ.get(variable, str(default))
    if not re.fullmatch(r"[1-9]\d{0,5}", seconds):
        raise UserError(f"{variable} is {seconds!r}; it must be a whole number of seconds above 0.")
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
        return address, int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
    except (KeyError, ValueError):
        raise UserError(
            "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID are set, so JAX_NUM_PROCESSES must be too; the last two are "
            "whole numbers."
        ) from None


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "localhost:", "[::1]:"))


def _require_free_port(address: str) -> None:
    """Raise UserError if process 0 cannot listen at the address, where jax would crash."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") if _is_loopback(address) else ""  # the host's name may not resolve to its own address
    try:
        socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at {address} ({error.strerror.partition(' (')[0]}); give each process a "
            "JAX_PROCESS_ID of its own, and JAX_COORDINATOR_ADDRESS a port that is free."
        ) from error


def log(sentence: str) -> None:
    """Print a sentence on standard error, on any process."""
    with contextlib.suppress(OSError):  # the terminal may be gone; threads that end the process go on
        print(f"jaxlm: {sentence}", file=sys.stderr, flush=True)


def _is_one_of_several() -> bool:
    env = os.environ
    if env.get(CLUSTER) == "0":
        return False
    if "JAX_COORDINATOR_ADDRESS" in env and "JAX_PROCESS_ID" in env:
        return True
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env:
        return True
    if "OMPI_COMM_WORLD_SIZE" in env:
        return env["OMPI_COMM_WORLD_SIZE"] != "1"
    if all(name in env for name in SLURM_STEP):
        # Slurm's interactive step is one process; its SLURM_NTASKS is that of the job.
        return "1" not in (env["SLURM_NTASKS"], env.get("SLURM_STEP_NUM_TASKS"))
    return bool(env.get(CLUSTER)) or "JAX_COORDINATOR_ADDRESS" in env


def main_first(action: Callable[[], Result], task: str, everywhere: bool = True) -> Result | None:
    """Run `action` on process 0, then on the others if `everywhere`, so that they find the files that it has written.

    If it fails on one it fails on all, so that none waits forever.

    `task` is what it does, for messages, such as "prepare the text".

    Returns:
        The result, or None where `action` was not run.
    """
    is_main = jax.process_index() == 0
    result = together(action if is_main else lambda: None, f"process 0 to {task}")
    return together((lambda: result) if is_main else action, f"the others to {task}") if everywhere else result


def check_main_output(*arguments: Any, **options: Any) -> None:
    """Call `check_output` on process 0, which alone writes the file: hosts may not share the folder."""
    main_first(lambda: check_output(*arguments, **options), "check the output", everywhere=False)


def together(action: Callable[[], Result], reason: str) -> Result:
    """Run `action` on all processes at the same time, and wait for all; if it fails on one it fails on all.

    They wait on their hosts, for hours if need be, since a collective on the devices has the platform's time limit. A
    process says every `LOG_SECONDS` that it waits, and exits with 1 after JAXLM_WAIT_SECONDS. If one is lost, jax ends
    the others.

    `reason` is what a process waits for, such as "process 0 to prepare the text", the same for all.
    """
    if jax.process_count() == 1:
        return action()
    from orbax.checkpoint import multihost  # imported late: other commands need no orbax

    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    remark = f" has failed ({cause(failure)}) and" if failure else ""
    limit, state = _seconds(WAIT_SECONDS, 86_400), f"process {jax.process_index()}{remark} waits for {reason}"
    with _patience(state, limit, WAIT_SECONDS, "Run the same command to go on."):  # the others give up too
        multihost.get_barrier_sync_fn()(key=f"jaxlm {reason}", timeout_ms=1000 * (limit + 600))
    code = 0 if failure is None else getattr(failure, "exit_code", 1)
    codes = multihost_utils.process_allgather(np.int32(code))
    if failure is not None:
        raise failure
    if codes.any():  # launchers start again after 1
        code = 1 if 1 in codes else int(codes.max())
        raise UserError(f"process {np.argmax(codes == code)} stopped; its output says why.", code)
    return result


def require_same(facts: Mapping[str, Any]) -> None:
    """Raise UserError on all processes, with process and host, if their devices, versions or `facts` differ.

    `facts` are values that JSON can hold.
    """
    if jax.process_count() == 1:
        return
    host, index = socket.gethostname(), jax.process_index()
    devices = [Counter() for _ in range(jax.process_count())]
    for device in jax.devices():
        devices[device.process_index][device.device_kind] += 1
    kinds = [" and ".join(f"{count} {kind}" for kind, count in counts.items()) or "none" for counts in devices]
    # Checked before any collective, which needs the same number of devices in every process. jax knows the other
    # processes' devices, but not their host names.
    _refuse_differences([
        {"host": host if process == index else "", "devices": kind} for process, kind in enumerate(kinds)
    ])
    record = {"host": host, "python": platform.python_version(), "code of jaxlm": _source_digest()}
    record |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    encoded = json.dumps(record | dict(facts)).encode()
    length = int(multihost_utils.process_allgather(np.int32(len(encoded))).max())
    rows = multihost_utils.process_allgather(np.frombuffer(encoded.ljust(length), np.uint8))
    _refuse_differences([json.loads(row.tobytes()) for row in rows])


def _source_digest() -> str:
    """Return a digest of this package's files, since checkouts of one version differ."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def _refuse_differences(records: list[dict[str, Any]]) -> None:
    """Raise UserError for the first three names whose value differs between processes; "host" may."""
    differing = []
    for name in dict.fromkeys(name for record in records for name in record if name != "host"):
        values = [str(record.get(name, "missing")) for record in records]
        usual = max(values, key=values.count)
        odd = [number for number, value in enumerate(values) if value != usual]
        if odd:
            other = values[odd[0]]
            differs = (i for i, (a, b) in enumerate(zip(usual, other, strict=False)) if a != b)
            start = max(0, next(differs, min(len(usual), len(other))) - 40)
            other, usual = other[start:][:80], usual[start:][:80]
            host, more = records[odd[0]]["host"], f" and {len(odd) - 1} more" * (len(odd) > 1)
            place = f"process {odd[0]}" + f" on {host}" * bool(host) + more
            differing.append(f"{name}: {other} in {place}, {usual} in the other{'s' * (len(records) > 2)}")
    if differing:
        raise UserError(
            f"the {len(records)} processes of this run differ ({'; '.join(differing[:3])}); start all with the same "
            "installation and command, on machines that share the run folder."
        )


def from_main(value: Any) -> Any:
    """Return process 0's `value`, which JSON can hold, on all processes; all call this at the same time."""
    if jax.process_count() == 1:
        return value
    encoded = json.dumps(value).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(encoded))))
    row = np.frombuffer(encoded[:length].ljust(length), np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(row).tobytes())


def require_shared(folder: epath.Path, flag: str) -> None:
    """Raise UserError on all processes unless each finds a file that process 0 writes, and may write beside it.

    A network filesystem may show the file only seconds later, for which up to `SHARED_SECONDS` are waited.
    """
    if jax.process_count() == 1:
        return
    token = folder / f".shared-{from_main(secrets.token_hex(8))}"  # of an earlier start it would be no proof
    main_first(lambda: write_whole(token, b""), "write into a shared folder", everywhere=False)
    try:
        is_seen = any(_may_use(token) or time.sleep(1) for _ in range(SHARED_SECONDS))
        seen = multihost_utils.process_allgather(np.bool_(is_seen))
    finally:
        if jax.process_index() == 0:
            token.unlink(missing_ok=True)
    if not seen.all():
        raise UserError(
            f"process {np.argmin(seen)} does not see what process 0 writes into {folder}, or may not write there; give "
            f"all processes one {flag}, on a disk that they share or in a bucket."
        )


def _may_use(file: epath.Path) -> bool:
    """Return whether a file is there, in a folder that may be written to."""
    try:
        return file.exists() and (in_bucket(file) or os.access(file.parent, os.W_OK))
    except Exception:  # raised on one process alone, it would leave the others waiting
        return False


def is_true_of_any(here: bool) -> bool:
    """Return whether `here` is true on any process; all call this at the same time."""
    return here if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.bool_(here)).any())


def is_of_processes(error: Exception) -> bool:
    """Return whether an error comes from jax or a collective: another process may be lost, and no user is to blame.

    jax raises a plain ValueError where a compiled collective fails at once.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    is_collective = any(frame.f_code.co_filename == multihost_utils.__file__ for frame in frames)
    return is_collective or isinstance(error, jax.errors.JaxRuntimeError)


def run_with_timeout(action: Callable[[], None]) -> None:
    """Run `action`; if this process is one of several, do not wait for it for more than LEAVE_SECONDS.

    It may wait for a process that has failed, as Orbax does for ten minutes at a save that has filled the disk.
    """
    if jax.process_count() == 1:
        action()
        return
    thread = threading.Thread(target=action, name="jaxlm-end", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)


def exit_process(code: int, failure: Exception | None = None) -> None:
    """Exit this process of a multi-process run: within LEAVE_SECONDS after a UserError, at once after `failure`.

    At Python's exit jax waits for five minutes for the other processes, and they may be waiting for this one.
    """
    if not jax.distributed.is_initialized():
        return
    if failure is None:
        timer = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        return
    traceback.print_exception(failure)
    log(
        f"this process ends ({cause(failure)}): it has failed, or has lost another process of the run, whose output "
        "then says why. Run the same command on all to go on."
    )
    sys.stdout.flush()
    os._exit(code)
