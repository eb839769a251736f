"""Faults: functions that disturb a `Run`, each with the moments and the runs that it is for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable

from tests.chaos.run import HEARTBEAT, LEASE, Failed, Run

STARTING, TRAINING, SAVING = "starting", "training", "saving"
FAULTS: list[Fault] = []


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    act: Callable[[Run], None]
    moments: tuple[str, ...]
    """Moments at which it may happen."""
    applies: Callable[[Run], bool]
    """Whether it is possible in a run."""
    ends: bool
    """Whether all processes have to end after it; otherwise the run may go on."""


def fault(
    name: str, *moments: str, applies: Callable[[Run], bool] = lambda run: True, ends: bool = False
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to FAULTS."""

    def add(act: Callable[[Run], None]) -> Callable[[Run], None]:
        FAULTS.append(Fault(name, act, moments, applies, ends))
        return act

    return add


def is_several(run: Run) -> bool:
    return run.processes > 1


def is_in_bucket(run: Run) -> bool:
    return run.place.proxy is not None


def is_on_disk(run: Run) -> bool:
    return run.place.proxy is None


@fault("kill -9 of all", STARTING, TRAINING, ends=True)
def kill_all(run: Run) -> None:
    run.kill()


@fault("kill -9 of one of several", STARTING, TRAINING, applies=is_several, ends=True)
def kill_one(run: Run) -> None:
    run.send(signal.SIGKILL, [run.draw.randrange(run.processes)])


@fault("kill -9 during a save", SAVING, ends=True)
def kill_during_a_save(run: Run) -> None:
    run.send(signal.SIGKILL, run.some())


@fault("SIGTERM to one or all", STARTING, TRAINING, SAVING, ends=True)
def terminate(run: Run) -> None:
    run.send(signal.SIGTERM, run.some())


@fault("stopped for a moment", STARTING, TRAINING, SAVING)
def stop_for_a_moment(run: Run) -> None:
    _stop(run, run.some(), run.draw.uniform(0.5, 0.3 * HEARTBEAT))


@fault("one of several stopped beyond the time limit", STARTING, TRAINING, SAVING, applies=is_several, ends=True)
def stop_for_long(run: Run) -> None:
    _stop(run, [run.draw.randrange(run.processes)], 2.5 * HEARTBEAT)


@fault("stopped until another start has taken over", TRAINING, SAVING, applies=is_in_bucket)
def stop_beyond_the_lease(run: Run) -> None:
    """What was stopped must end when it finds that another process has its lease."""
    old, indices = (run.commands, run.saved_before), [*range(run.processes)]
    run.send(signal.SIGSTOP, indices)
    run.start()
    goes_on = run.wait_for_progress()
    new, (run.commands, run.saved_before) = (run.commands, run.saved_before), old
    run.send(signal.SIGCONT, indices)
    run.wait_until(lambda: False, seconds=LEASE + 2 * HEARTBEAT)  # until they have ended
    run.check_end()
    run.commands, run.saved_before = new
    if not goes_on:
        raise Failed(f"the other start has ended\n{run.output()}")


def _stop(run: Run, indices: list[int], seconds: float) -> None:
    run.send(signal.SIGSTOP, indices)
    time.sleep(seconds)
    run.send(signal.SIGCONT, indices)


@contextlib.contextmanager
def _proxy(run: Run, fault: str, share: float, delay: float = 1.0):
    proxy = run.place.proxy
    proxy.fault, proxy.share, proxy.delay = fault, share, delay
    yield
    proxy.share = 0.0


@fault("errors of the bucket", STARTING, TRAINING, SAVING, applies=is_in_bucket)
def bucket_errors(run: Run) -> None:
    with _proxy(run, "error", run.draw.choice((0.2, 0.6, 1.0))):
        time.sleep(run.draw.uniform(0.5, 4))


@fault("answers of the bucket that are lost", STARTING, TRAINING, SAVING, applies=is_in_bucket)
def bucket_loses_answers(run: Run) -> None:
    with _proxy(run, "lost", run.draw.choice((0.2, 0.6, 1.0))):
        time.sleep(run.draw.uniform(0.5, 4))


@fault("slow answers of the bucket", STARTING, TRAINING, SAVING, applies=is_in_bucket)
def slow_bucket(run: Run) -> None:
    with _proxy(run, "slow", run.draw.choice((0.2, 1.0)), run.draw.choice((0.5, 3.0))):
        time.sleep(run.draw.uniform(1, 5))


@fault("a truncated file of a checkpoint", TRAINING, ends=True)
def truncate(run: Run) -> None:
    _damage(run, lambda data: data[: run.draw.randrange(len(data))])


@fault("a flipped bit in a checkpoint", TRAINING, ends=True)
def flip(run: Run) -> None:
    def flipped(data: bytes) -> bytes:
        at = run.draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << run.draw.randrange(8)]) + data[at + 1 :]

    _damage(run, flipped)


def _damage(run: Run, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the newest checkpoint, after all processes have ended; there is an older one."""
    run.wait_until(lambda: len(run.whole()) > 1)
    run.kill()
    step = run.newest()
    found = sorted(path for path in (run.folder / "checkpoints" / str(step)).rglob("*") if path.is_file())
    path = run.draw.choice([path for path in found if path.stat().st_size])
    path.write_bytes(change(path.read_bytes()))
    run.mark_damaged(step)


@fault("a full disk", STARTING, TRAINING, SAVING, applies=lambda run: run.place.is_small, ends=True)
def fill_the_disk(run: Run) -> None:
    """Leave up to 200 kB on the disk until all processes have ended."""
    ballast = run.place.files / "ballast"
    left = run.draw.randrange(200_000)
    with ballast.open("wb") as file:
        for attempt in range(10):  # the run may take some of it meanwhile
            file.truncate(0)
            try:
                os.posix_fallocate(file.fileno(), 0, max(shutil.disk_usage(run.place.files).free - left, 1))
                break
            except OSError:
                if attempt == 9:
                    raise
    try:
        run.wait_until(lambda: False)
    finally:
        ballast.unlink()


@fault("a data file unreadable for a while", STARTING, TRAINING)
def hide_a_file(run: Run) -> None:
    """Rename the text, or a file of the token store."""
    found = sorted(path for path in (run.place.files / "cache").rglob("*") if path.is_file())
    path = run.draw.choice([run.place.files / "text.txt", *found])
    hidden = run.place.files / "hidden"
    with contextlib.suppress(FileNotFoundError):  # of a store that is being built
        path.rename(hidden)
        time.sleep(run.draw.uniform(1, 4))
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.rename(path)


@fault("another number of processes", TRAINING, SAVING, ends=True)
def change_processes(run: Run) -> None:
    run.send(run.draw.choice((signal.SIGTERM, signal.SIGKILL)), [*range(run.processes)])
    run.wait_until(lambda: False)
    run.check_end()
    run.processes = run.draw.choice([number for number in (1, 2, 4) if number != run.processes])
