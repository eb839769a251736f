"""Wall time of a run by what it was spent on, and a watch that ends a run which no longer moves."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxlm.parallel.hosts import log

PREFIX = "time_"
"""Prefix of the names of phases in metrics.jsonl."""
TICK = 1.0
"""Seconds between two checks for progress."""


class Clock:
    """Wall time of a run per phase in seconds, accumulated over restarts, as this process measures it.

    `step` is useful work: steps that had not been computed before. `lost` are steps that an earlier start had computed
    after its last checkpoint. `data` is the wait for batches that came after the device had finished its work, an upper
    bound of the time that the device was idle. `compilation` includes the first step of each shape; `save` is what a
    checkpoint keeps the steps waiting. `startup` begins when the run folder is opened. The time between the last line
    of metrics of an earlier start and its end is unknown and left out.
    """

    def __init__(self) -> None:
        """Begin with `startup`."""
        self.seconds: Counter[str] = Counter()
        self.phase = "startup"
        self.lost_until = 0
        """Last step that an earlier start is known to have computed."""
        self.changes = 0
        """Number of calls of `switch`: it grows while the run makes progress."""
        self.longest = 0.0
        """Longest uninterrupted phase after the start-up, in seconds."""
        self._since = time.perf_counter()

    def resume(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add the seconds of the earlier starts, from the lines of metrics.jsonl."""
        if lines:
            self.lost_until = lines[-1]["step"]
            found = {name: value for name, value in lines[-1].items() if name.startswith(PREFIX)}
            self.seconds.update({name.removeprefix(PREFIX): value for name, value in found.items()})

    def switch(self, phase: str, ended: str | None = None) -> str:
        """Begin a phase and return the one that has ended, whose time counts as `ended` if that is given."""
        now, before = time.perf_counter(), ended or self.phase
        self.seconds[before] += now - self._since
        if before != "startup":
            self.longest = max(self.longest, now - self._since)
        self.phase, self._since = phase, now
        self.changes += 1
        return before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time of the block as `phase`."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def training_seconds(self) -> float:
        """Return the time of steps of any kind until now, without evaluations, checkpoints and steps that compile."""
        self.switch(self.phase)
        return sum(self.seconds[phase] for phase in ("step", "lost", "data"))

    def figures(self) -> dict[str, float]:
        """Return goodput, the share of `step`, and the seconds of every phase, for metrics.jsonl."""
        self.switch(self.phase)
        times = {f"{PREFIX}{phase}": round(seconds, 3) for phase, seconds in self.seconds.items()}
        return {"goodput": self.seconds["step"] / self.seconds.total()} | times

    def __str__(self) -> str:
        """Return the printed line: "Goodput 97.0 % of 100 s: step 97 s, startup 3 s"."""
        goodput = self.figures()["goodput"]
        parts = [f"{phase} {seconds:,.0f} s" for phase, seconds in self.seconds.most_common() if seconds >= 0.5]
        return f"Goodput {goodput:.1%} of {self.seconds.total():,.0f} s: {', '.join(parts)}"


@contextlib.contextmanager
def watchdog(clock: Clock, seconds: float) -> Iterator[None]:
    """Watchdog for the block: dump the stacks, then exit, if no phase of the clock ends within the limit.

    The limit is `seconds` for a step, ten times as long for compilation, evaluation and saving, and at least twice the
    longest phase so far. After it, the stacks of all threads are written to standard error; after twice the limit the
    process exits with 1, so that the launcher can restart it. Time in which the process itself was stopped does not
    count. With `seconds` 0 there is no watchdog.
    """
    ended = threading.Event()

    def watch() -> None:
        changes, idle, reported = -1, 0.0, False
        while not ended.wait(TICK):
            if changes != clock.changes:
                changes, idle, reported = clock.changes, 0.0, False
                continue
            idle += TICK
            limit = max(seconds * (1 if clock.phase in ("step", "lost", "data") else 10), 2 * clock.longest)
            what = f"process {jax.process_index()}: no progress for {idle:,.0f} s ({clock.phase})"
            if idle >= limit and not reported:
                reported = True
                log(f"{what}; it will end after {2 * limit:,.0f} (--train.stall-seconds). Its threads:")
                with contextlib.suppress(OSError):
                    faulthandler.dump_traceback(sys.__stderr__)
            if idle >= 2 * limit:
                log(f"{what}. This process ends; run the same command to go on.")
                os._exit(1)

    if seconds:
        threading.Thread(target=watch, name="jaxlm-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
