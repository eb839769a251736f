"""Training metrics: accumulated, averaged, and written to metrics.jsonl and a tracker."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from etils import epath

from jaxlm.config.experiment import TrainConfig
from jaxlm.errors import UserError
from jaxlm.objectives.base import Terms
from jaxlm.paths import in_bucket, write_whole
from jaxlm.training.trackers import open_tracker

SYNC_SECONDS = 30.0
"""Least time between two copies of metrics into a bucket."""
SYNC_SHARE = 0.02
"""Largest share of the time that copying metrics may take."""


class Totals:
    """Running sums of terms, each with its weight."""

    def __init__(self, sums: Mapping[str, Any] | None = None, skipped_in_row: int = 0) -> None:
        """Begin with `sums`, a mapping from names to (total, weight), after some steps without an update."""
        self.skipped_in_row = skipped_in_row
        self.sums: dict[str, tuple[float, float]] = {name: tuple(pair) for name, pair in (sums or {}).items()}
        self._coefficients: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Return the arguments of a copy, for a checkpoint: the next steps add to the sums while it is written."""
        return {"unlogged": dict(self.sums), "skipped_in_row": self.skipped_in_row}

    def add(self, terms: Terms) -> None:
        """Add the terms of a step; blocks until the device has computed them."""
        for name, term in jax.device_get(terms).items():
            total, weight = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = total + float(term.total), weight + float(term.weight)
            self._coefficients[name] = float(term.coefficient)

    def peek(self) -> dict[str, float]:
        """Return the mean of each term with nonzero weight."""
        return {name: total / weight for name, (total, weight) in self.sums.items() if weight}

    def loss(self) -> float:
        """Return the loss of all added terms as one batch: Σ coefficient · total / weight."""
        return sum(self._coefficients[name] * mean for name, mean in self.peek().items())

    def means(self) -> dict[str, float]:
        """Return the means and reset the sums."""
        result, self.sums = self.peek(), {}
        return result


class MetricsWriter:
    """Writer of metrics.jsonl, one JSON object per line, and of the same figures to a tracker.

    A bucket's objects cannot be appended to. There this file and TensorBoard's events are written to a temporary folder
    and copied by `sync`: before every checkpoint, and from time to time (`SYNC_SECONDS`, `SYNC_SHARE`).
    """

    def __init__(
        self, folder: epath.Path, tracker: str, after_step: int, config: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Open metrics.jsonl, without damaged lines and without those of steps that will be computed again."""
        self.path, self.folder = folder / "metrics.jsonl", folder
        self._temporary = tempfile.TemporaryDirectory() if in_bucket(folder) else None
        local = Path(self._temporary.name if self._temporary else folder)
        self._next_sync = time.monotonic() + SYNC_SECONDS if self._temporary else math.inf
        try:
            if self.path.exists():
                kept = [json.dumps(line) + "\n" for line in read_metrics(folder) if line["step"] <= after_step]
                write_whole(local / self.path.name, "".join(kept).encode())
            self.file = (local / self.path.name).open("a", encoding="utf-8")
            self.tracker = open_tracker(tracker, folder, local, after_step, config)
        except OSError as error:
            raise self._error(error) from error

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one line, without values that are not finite: JSON cannot express them."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        try:
            self.file.write(json.dumps({"step": step} | values) + "\n")
            self.file.flush()
        except OSError as error:
            raise self._error(error) from error
        self.tracker.log(step, values)
        if time.monotonic() > self._next_sync:
            with contextlib.suppress(UserError):  # the next checkpoint tries again
                self.sync()

    def sync(self) -> None:
        """Copy the files into the bucket; on a disk, have the lines written to it."""
        if self._temporary is None:
            with contextlib.suppress(OSError, ValueError):  # closing has written them
                os.fsync(self.file.fileno())  # a network filesystem may keep them for long
            with contextlib.suppress(OSError):
                self.tracker.flush()
            return
        start = time.monotonic()
        self.tracker.flush()
        try:
            for file in Path(self._temporary.name).iterdir():
                write_whole(self.folder / file.name, file.read_bytes())
        finally:
            end = time.monotonic()
            self._next_sync = end + max(SYNC_SECONDS, (end - start) / SYNC_SHARE)

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"cannot write {self.path}: {error.strerror}; fix the cause, then run the same command to resume."
        )

    def close(self) -> None:
        """Close the file and the tracker, and copy what a bucket keeps."""
        with contextlib.suppress(OSError):  # `write` has reported it
            self.file.close()
        with contextlib.suppress(OSError):
            self.tracker.close()
        with contextlib.suppress(UserError):
            self.sync()
        if self._temporary is not None:
            self._temporary.cleanup()


def read_metrics(folder: epath.Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without damaged ones: a killed process leaves its last line unfinished."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            values = dict(json.loads(line))
            if "step" in values and all(isinstance(value, (int, float)) for value in values.values()):
                found.append(values)
    return found


def last_evaluation(folder: epath.Path, up_to: int | None = None) -> tuple[int, dict[str, float]]:
    """Return (step, figures without their prefix "eval_") of the newest evaluation up to `up_to`; (0, {}) if none."""
    for line in reversed(read_metrics(folder)):
        figures = {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
        if figures and (up_to is None or line["step"] <= up_to):
            return line["step"], figures
    return 0, {}


def evaluations(folder: epath.Path, name: str, up_to: int | None = None) -> dict[int, float]:
    """Return the held-out figure `name` of every evaluated step up to `up_to`."""
    lines = (line for line in read_metrics(folder) if f"eval_{name}" in line)
    return {line["step"]: line[f"eval_{name}"] for line in lines if up_to is None or line["step"] <= up_to}


def best_step(history: Mapping[int, float], name: str) -> int:
    """Return the first step with the best figure `name`: by its last word the lowest or the highest, never NaN."""
    sign = -1 if name.endswith(("loss", "bits_per_byte", "perplexity", "error", "mean_rank", "negative_cosine")) else 1
    return max(history, key=lambda step: -math.inf if math.isnan(history[step]) else sign * history[step])


def is_out_of_patience(history: Mapping[int, float], t: TrainConfig) -> bool:
    """Return whether none of the last `t.patience` evaluations was the best; never with patience 0."""
    if not t.patience or len(history) <= t.patience:
        return False
    return best_step(history, t.criterion) not in [*history][-t.patience:]
