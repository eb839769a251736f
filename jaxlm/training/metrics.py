"""Metrics as sums with weights: added up, averaged, written to metrics.jsonl and TensorBoard, drawn as curves."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlm.errors import UserError
from jaxlm.objectives.base import Metrics

UNIGRAM_BASELINE = ("mlm_loss", "lm_loss", "generator_loss")
"""Losses of predicting tokens of the text, which its unigram entropy is a baseline for. T5's targets hold sentinels and
end symbols too."""


class Totals:
    """Running sums of metrics; `means()` empties them."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, metrics: Metrics) -> dict[str, tuple[float, float]]:
        """Adds metrics that are still on the device; blocks until they are there. Returns them as floats."""
        values = {name: (float(total), float(weight)) for name, (total, weight) in jax.device_get(metrics).items()}
        for name, (total, weight) in values.items():
            old_total, old_weight = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = old_total + total, old_weight + weight
        return values

    def peek(self) -> dict[str, float]:
        """sum / weight of each metric; those that never had weight are left out."""
        return {name: total / weight for name, (total, weight) in self.sums.items() if weight}

    def means(self) -> dict[str, float]:
        """The same, and begins anew."""
        result, self.sums = self.peek(), {}
        return result


def headline(objective: Any, means: dict[str, float]) -> str:
    """The metric that stands for the objective: `objective.headline`, or its first one that ends in "_loss"."""
    named = getattr(objective, "headline", None)
    return named or next((name for name in means if name.endswith("_loss") and name != "loss"), "loss")


class MetricsWriter:
    """One JSON object a line in metrics.jsonl, and the same figures as TensorBoard events."""

    def __init__(self, folder: Path, tensorboard: bool, after_step: int) -> None:
        """Lines after `after_step` (a run that was killed after its last checkpoint) are dropped: they are computed
        again, the same, by the resumed run."""
        self.path = folder / "metrics.jsonl"
        self.events = None
        try:
            if self.path.exists():
                kept = [line for line in read_metrics(folder) if line.get("step", 0) <= after_step]
                temporary = self.path.with_suffix(".tmp")
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
                temporary.replace(self.path)
            self.file = self.path.open("a", encoding="utf-8")
            if tensorboard:
                from tensorboardX import SummaryWriter

                _silence_full_disk()
                self.events = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)
        except OSError as error:
            raise self._error(error) from error

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line. JSON has no word for what is not finite: such values are left out."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        try:
            self.file.write(json.dumps({"step": step} | values) + "\n")
            self.file.flush()
        except OSError as error:
            raise self._error(error) from error
        if self.events is not None:
            for name, value in values.items():
                self.events.add_scalar(name, value, step)

    def _error(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror}; mend that and run the same command to go on.")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that did not fit has been reported already
            self.file.close()
        if self.events is not None:
            with contextlib.suppress(OSError):
                self.events.close()


def _silence_full_disk() -> None:
    """TensorBoard's events are written by a thread; when the disk is full, metrics.jsonl or the next checkpoint says so
    in a sentence, and the thread's traceback would only stand in the way."""
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, OSError):
            previous(args)

    threading.excepthook = hook


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut off is left out."""
    lines = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def last_evaluation(folder: Path, up_to: int | None = None) -> dict[str, float]:
    """The figures of the newest evaluation (not after step `up_to`), without their "eval_"; empty if there is none."""
    return dated_evaluation(folder, up_to)[1]


def dated_evaluation(folder: Path, up_to: int | None = None) -> tuple[int, dict[str, float]]:
    """(its step, the figures of `last_evaluation`); the step is 0 if there is none."""
    result: tuple[int, dict[str, float]] = 0, {}
    if (folder / "metrics.jsonl").exists():
        for line in read_metrics(folder):
            found = {key.removeprefix("eval_"): value for key, value in line.items() if key.startswith("eval_")}
            if found and (up_to is None or line["step"] <= up_to):
                result = line["step"], found
    return result


def draw_curves(folder: Path, report: Callable[[str], None], entropy: float | None = None) -> Path | None:
    """Draws every loss and accuracy of metrics.jsonl, training and held-out, into curves.png. The run is complete
    without them: where they cannot be written, `report` is told so and the result is None."""
    from matplotlib.figure import Figure  # not pyplot, which takes a second more to import

    lines = read_metrics(folder)
    names = [name for name in (lines[0] if lines else {}) if name.endswith(("loss", "accuracy", "precision", "recall"))]
    if not names:
        return None
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(6 * columns, 3.5 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for key, label, style in ((name, "training", "-"), (f"eval_{name}", "held out", "o-")):
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=label, markersize=3, linewidth=1)
        if entropy is not None and name in UNIGRAM_BASELINE:
            axis.axhline(entropy, color="grey", linestyle=":", label="unigram entropy")
        axis.set(title=name, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(names):]:
        axis.set_visible(False)
    figure.tight_layout()
    path = folder / "curves.png"
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        report(f"The curves are not drawn: cannot write {path}: {error.strerror}.")
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # half a picture would pass for a whole one
        return None
    return path
