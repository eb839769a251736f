"""What the user sees while training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_SECONDS = 5.0


class Progress:
    """Shows loss, accuracy, tokens/s, MFU where it is known, and the time left."""

    def __init__(self, steps: int, first: int, enabled: bool = True) -> None:
        self.steps, self.first = steps, first
        self.enabled = enabled
        self.timed: tuple[int, float] | None = None
        self.last_plain = 0.0
        self.bar: RichProgress | None = None
        if enabled and sys.stdout.isatty():
            self.bar = RichProgress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(), console=Console(),
            )
            self.task = self.bar.add_task("train", total=steps, completed=first, figures="compiling…")

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, step: int, means: dict[str, float]) -> None:
        """One logged step."""
        if not self.enabled:
            return
        figures = [f"loss {means['loss']:.3f}"]
        shares = {name.replace("_", " "): value for name, value in means.items() if name.endswith("accuracy")}
        figures += [f"{name} {value:.3f}" for name, value in shares.items()]
        figures.append(f"{means['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in means:
            figures.append(f"MFU {means['mfu']:.1%}")
        text = "  ".join(figures)
        if self.bar:
            self.bar.update(self.task, completed=step, figures=text)
            return
        now = time.perf_counter()
        if now - self.last_plain >= PLAIN_SECONDS or step in (self.first + 1, self.steps):
            self.last_plain = now
            left = ""
            if self.timed:  # the first step, which compiles, says nothing about the others
                seconds = (now - self.timed[1]) / (step - self.timed[0]) * (self.steps - step)
                left = f"  {_clock(seconds)} left"
            print(f"step {step:,}/{self.steps:,}  {text}{left}", flush=True)
        self.timed = self.timed or (step, now)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.enabled:
            return
        if self.bar:
            self.bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
