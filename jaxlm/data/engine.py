"""The local engine: processes of this machine, one a core, each making one shard after the other.

A job is a picklable function and the part that it makes a shard, or keys, of. Each process is a command of its own, not
forked or spawned by `multiprocessing`: this process may be a notebook or hold a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.progress
from etils import epath

from jaxlm.data.arrays import FACTS
from jaxlm.data.parts import EXPANSION, Part
from jaxlm.errors import UserError
from jaxlm.paths import at_once, limit_waiting, new_folder
from jaxlm.types import Report

_ALONE = 1 << 25  # bytes of a text that one process reads before others have started
_ANSWER = 1 << 20  # bytes that a process reads between two answers
_MINUTE = 60.0  # seconds between two lines where there is no terminal
Progress = Callable[[int], None]
"""Gets the number of bytes of text that were read since the last call."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A picklable function from a part to a folder of arrays and facts, such as `jaxlm.data.shards.Shards`.

    Attributes:
        folder: where those folders are, under names that follow from what they depend on.
    """

    folder: str

    def depends_on(self, part: Part) -> list[Any]:
        """Return a JSON value of what the folder of a part depends on."""
        raise NotImplementedError

    def write(self, folder: epath.Path, part: Part, progress: Progress) -> None:
        """Write the arrays of a part, then its facts, into a new folder."""
        raise NotImplementedError

    def name(self, part: Part) -> str:
        """Return the name of the folder of a part."""
        return hashlib.sha256(json.dumps(self.depends_on(part)).encode()).hexdigest()[:24]

    def path(self, part: Part) -> epath.Path:
        """Return the folder of a part."""
        return epath.Path(self.folder) / self.name(part)

    def is_done(self, part: Part) -> bool:
        """Return whether the folder of a part is complete."""
        return (self.path(part) / FACTS).exists()

    def make(self, part: Part, progress: Progress = lambda size: None) -> None:
        """Make the folder of a part, unless it is complete.

        Raises:
            UserError: the part cannot be read, or the folder cannot be written.
        """
        if not self.is_done(part):  # else another process has made it, and may read it already
            with new_folder(self.path(part), FACTS) as folder:
                self.write(folder, part, progress)


Job = tuple[Work, Part]


def run_jobs(jobs: Sequence[Job], workers: int, title: str, report: Report) -> None:
    """Run the jobs that are not done in `workers` processes, or one a core for 0.

    This process alone reads a small text, or one with a reader that no other can import.
    `report` gets a line about the start, and one a minute where there is no terminal.

    Raises:
        UserError: a job fails; the others that have begun are finished first.
    """
    jobs = missing_jobs(jobs)
    size = sum(part.size for _, part in jobs)
    if not jobs:
        return
    workers = min(workers or _cores(), len(jobs)) if size >= _ALONE else 1
    readers = {type(part.reader).__module__ for _, part in jobs}
    if workers > 1 and any(module == "__main__" or module.endswith(".py") for module in readers):
        report("One process reads the text, since no other can import a reader of a preset or a notebook.")
        workers = 1
    report(f"{title} ({size / 1e6:,.1f} MB in {len(jobs):,} part{'s' * (len(jobs) > 1)})")
    progress = _Progress(size, title, report)
    with progress.bar:
        if workers == 1:
            for work, part in jobs:
                work.make(part, functools.partial(progress.add, part))
                progress.finish(part)
        else:
            _in_processes(jobs, workers, progress)


def jobs_of(works: Sequence[Work], parts: Sequence[Part]) -> list[Job]:
    """Return the jobs of parts, all of a part before those of the next one."""
    return [(work, part) for part in parts for work in works]


def missing_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that are not done."""
    done = at_once(lambda job: job[0].is_done(job[1]), jobs)
    return [job for job, is_done in zip(jobs, done, strict=True) if not is_done]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Progress:
    """Progress over the bytes of parts: a bar on a terminal, else a line a minute."""

    def __init__(self, size: int, title: str, report: Report) -> None:
        self._size, self._report = size, report
        self._read: dict[Part, float] = {}
        self._finished = 0
        self._lock = threading.Lock()
        self._start = self._last_shown = time.monotonic()
        columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn(),
                   rich.progress.TransferSpeedColumn(), rich.progress.TimeRemainingColumn())
        self.is_shown = sys.stderr.isatty()
        console = rich.console.Console(stderr=True)
        self.bar = rich.progress.Progress(*columns, console=console, transient=True, disable=not self.is_shown)
        self._task = self.bar.add_task(title.partition(" ")[0], total=size)

    def add(self, part: Part, size: int) -> None:
        """Count bytes of text of a part, at most its size."""
        with self._lock:
            read = self._read.get(part, 0) + size / (EXPANSION if part.is_compressed else 1)
            self._read[part] = min(part.size, read)
        self._show()

    def finish(self, part: Part) -> None:
        """Count a whole part."""
        with self._lock:
            self._read.pop(part, None)
            self._finished += part.size
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._last_shown < (0.2 if self.is_shown else _MINUTE):
            return
        with self._lock:
            self._last_shown, done = now, self._finished + sum(self._read.values())
        self.bar.update(self._task, completed=done)
        if self.is_shown:
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
                        progress.add(part, size)
                    progress.finish(part)
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, name="jaxlm-tokenize", daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, of a session that goes on
        errors.append(error)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _worker() -> Iterator[Callable[[Job], Iterator[int]]]:
    """Start a process, and give a function that sends it a job and yields the bytes that it has read meanwhile.

    Both talk in pickles over its pipes; none is ever read from a file.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxlm.data.engine"],  # -P: no module of the working folder
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
    )

    def ask(job: Job) -> Iterator[int]:
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            while isinstance(answer := pickle.load(process.stdout), int):
                yield answer
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"a process that tokenizes has ended with exit code {process.wait()}, perhaps for lack of memory; run "
                "again, which goes on, with fewer --data.workers."
            ) from error
        if answer is not None:
            raise answer

    try:
        yield ask
    finally:
        with contextlib.suppress(OSError):  # it has died with a job unread
            process.stdin.close()
        process.terminate()
        process.wait()


def _serve() -> None:
    """Do the jobs of standard input; answer on standard output with the bytes read, then with None or an error."""
    limit_waiting()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print
    waiting = 0

    def progress(size: int) -> None:
        nonlocal waiting
        waiting += size
        if waiting >= _ANSWER:
            answers.write(pickle.dumps(waiting))
            waiting = 0

    while True:
        work, part = pickle.load(sys.stdin.buffer)
        try:
            work.make(part, progress)
            answer = None
        except Exception as error:
            answer = error
        answers.write(pickle.dumps(answer))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        _serve()
