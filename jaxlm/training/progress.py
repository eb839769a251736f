"""Progress of training on standard output: lines of metrics, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress display: loss, accuracies, learning rate, tokens per second, MFU if it is known, and the time left."""

    def __init__(self, steps: int, after_step: int, enabled: bool = True) -> None:
        """Create the bar if standard output is a terminal."""
        self.steps, self.after_step, self.enabled = steps, after_step, enabled
        self.first_shown: tuple[int, float] | None = None
        self.last_line = 0.0
        self.bar = RichProgress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[left]}"),
            expand=True, transient=True, disable=not enabled or not sys.stdout.isatty(),
        )
        self.task = self.bar.add_task("train", total=steps, completed=after_step, left="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._write(self.bar.stop)

    def show(self, step: int, means: dict[str, float]) -> None:
        """Show the metrics of a step: the first one, the last one, and one every few seconds between them."""
        if not self.enabled:
            return
        now, left = time.perf_counter(), ""
        if self.first_shown:  # the first step compiles, so its time says nothing about the others
            seconds = (now - self.first_shown[1]) / (step - self.first_shown[0]) * (self.steps - step)
            left = f"{datetime.timedelta(seconds=int(seconds))} left"
        self.bar.update(self.task, completed=step, left=left)
        if now - self.last_line >= SECONDS_BETWEEN_LINES or step in (self.after_step + 1, self.steps):
            self.last_line = now
            figures = [f"loss {means['loss']:.3f}"]
            figures += [f"{name.replace('_', ' ')} {means[name]:.3f}" for name in means if name.endswith("accuracy")]
            figures.append(f"learning rate {means['learning_rate']:.2e}")
            if "tokens_per_second" in means:
                figures.append(f"{means['tokens_per_second']:,.0f} tokens/s")
            if "mfu" in means:
                figures.append(f"MFU {means['mfu']:.1%}")
            if left and self.bar.disable:
                figures.append(left)
            self.note(f"step {step:,}/{self.steps:,}  " + "  ".join(figures))
        self.first_shown = self.first_shown or (step, now)

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.enabled:
            self._write(self.bar.console.print, text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def _write(self, write: Callable[..., None], *args: Any, **options: Any) -> None:
        """Call a function that writes; where terminal or reader are gone, show nothing more: the run goes on."""
        try:
            write(*args, **options)
        except (OSError, SystemExit):  # rich answers a closed pipe with the latter
            self.enabled = False
            with contextlib.suppress(OSError, ValueError):  # the command's last lines go nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
