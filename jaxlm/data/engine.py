"""The local engine: processes of this machine, one a core, each making one shard after the other.

A job is a picklable function and the part that it makes a shard, or keys, of. The processes are started by themselves
and not forked or spawned from this one, which may be a notebook or hold a device.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import rich.progress

from jaxlm.data.parts import EXPANSION, Part
from jaxlm.errors import UserError
from jaxlm.paths import at_once
from jaxlm.types import Report

_ALONE = 1 << 25  # bytes of a text that one process reads before others have started
_MINUTE = 60.0  # seconds between two lines where there is no terminal


class Work(Protocol):
    """A function from a part to a folder of its own, such as `jaxlm.data.shards.Shards`."""

    def is_done(self, part: Part) -> bool:
        """Return whether the folder is complete."""
        ...

    def make(self, part: Part, progress: Callable[[int], None]) -> None:
        """Make the folder; `progress` is told the bytes of text that were read."""
        ...


Job = tuple[Work, Part]


def run_jobs(jobs: Sequence[Job], workers: int, title: str, report: Report) -> None:
    """Run the jobs that are not done.

    Args:
        jobs: the jobs.
        workers: number of processes; 0 for one a core. A small text is read by this process.
        title: what is done, for the progress.
        report: gets a line about the start, and one a minute where there is no terminal.

    Raises:
        UserError: a job fails; the others that have begun are finished first.
    """
    jobs = missing(jobs)
    size = sum(part.size for _, part in jobs)
    if not jobs:
        return
    workers = min(workers or _cores(), len(jobs)) if size >= _ALONE else 1
    report(f"{title} ({size / 1e6:,.1f} MB in {len(jobs):,} parts)")
    with _Progress(size, title, report) as progress:
        if workers == 1:
            for work, part in jobs:
                work.make(part, progress.of(part))
                progress.finish(part)
        else:
            _in_processes(jobs, workers, progress)


def jobs_of(works: Sequence[Work], parts: Sequence[Part]) -> list[Job]:
    """Return the jobs of parts, all of a part before those of the next one."""
    return [(work, part) for part in parts for work in works]


def missing(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that are not done."""
    done = at_once(lambda job: job[0].is_done(job[1]), jobs)
    return [job for job, is_done in zip(jobs, done, strict=True) if not is_done]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Progress:
    """Progress over the bytes of parts: a bar on a terminal, else a line a minute."""

    def __init__(self, size: int, title: str, report: Report) -> None:
        self._size, self._title, self._report = size, title, report
        self._read: dict[Part, float] = {}
        self._finished = 0
        self._lock = threading.Lock()
        self._start = self._told = time.monotonic()
        columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn(),
                   rich.progress.TransferSpeedColumn(), rich.progress.TimeRemainingColumn())
        self._bar = rich.progress.Progress(*columns, transient=True) if sys.stderr.isatty() else None

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._title.partition(" ")[0], total=self._size)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def of(self, part: Part) -> Callable[[int], None]:
        """Return what a part's progress is told to."""
        scale = 1 / EXPANSION if part.is_compressed else 1

        def told(size: int) -> None:
            with self._lock:
                self._read[part] = min(part.size, self._read.get(part, 0) + size * scale)
            self._show()

        return told

    def finish(self, part: Part) -> None:
        """Count a whole part."""
        with self._lock:
            self._read.pop(part, None)
            self._finished += part.size
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._told < (_MINUTE if self._bar is None else 0.2):
            return
        with self._lock:
            self._told, done = now, self._finished + sum(self._read.values())
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        speed = done / (now - self._start)
        left = (self._size - done) / max(speed, 1)
        self._report(f"{done / 1e6:,.0f} of {self._size / 1e6:,.0f} MB, {speed / 1e6:,.1f} MB/s, "
                     f"{left / 60:,.0f} min left")


def _in_processes(jobs: Sequence[Job], workers: int, progress: _Progress) -> None:
    """Run jobs in processes, the largest parts first."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in sorted(jobs, key=lambda job: -job[1].size):
        waiting.put(job)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            with _worker() as ask:
                while not errors:
                    work, part = waiting.get_nowait()
                    for size in ask((work, part)):
                        progress.of(part)(size)
                    progress.finish(part)
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, name="jaxlm-tokenize", daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _worker() -> Iterator[Callable[[Job], Iterator[int]]]:
    """Start a process; what it gives sends the process a job and yields what its progress is told."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlm.data.engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )

    def ask(job: Job) -> Iterator[int]:
        with contextlib.suppress(BrokenPipeError):  # the process has died, which the answer tells
            process.stdin.write(_packed(job))
            process.stdin.flush()
        for line in process.stdout:
            kind, value = _unpacked(line)
            if kind == "error":
                raise value
            if kind == "done":
                return
            yield value
        raise UserError(
            f"a process that tokenizes has ended with exit code {process.wait()}, perhaps for lack of memory; run "
            "again, which goes on, with fewer --data.workers."
        )

    try:
        yield ask
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()


def _packed(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


def _unpacked(line: bytes) -> Any:
    return pickle.loads(base64.b64decode(line))


def _serve() -> None:
    """Do the jobs of standard input, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin.buffer:
        told = [0, time.monotonic()]

        def progress(size: int, told: list[float] = told) -> None:
            told[0] += size
            if time.monotonic() - told[1] > 0.2:
                answers.write(_packed(("read", told[0])))
                told[:] = 0, time.monotonic()

        try:
            work, part = _unpacked(line)
            work.make(part, progress)
            answers.write(_packed(("done", None)))
        except Exception as error:
            answers.write(_packed(("error", error)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _serve()
