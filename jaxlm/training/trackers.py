"""Trackers of metrics beside metrics.jsonl: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from jaxlm.errors import UserError, install
from jaxlm.parallel import hosts
from jaxlm.paths import cause, write_whole

SERVICES = ("wandb", "trackio")
"""Packages with the same functions `init`, `log` and `finish`."""


class Tracker:
    """Base class of trackers, which discards the metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def text(self, step: int, name: str, lines: list[str]) -> None:
        """Record lines of text, such as samples."""

    def flush(self) -> None:
        """Write buffered metrics to disk."""

    def close(self) -> None:
        """Close the tracker."""


class TensorBoard(Tracker):
    """Writer of TensorBoard event files."""

    def __init__(self, folder: Path, after_step: int) -> None:
        """Open a file in the folder; TensorBoard then hides what earlier files have of later steps."""
        from tensorboardX import SummaryWriter

        self._events = SummaryWriter(str(folder), purge_step=after_step + 1)
        # An error would end the writing thread, and training would wait for it as soon as its queue is full.
        writer = self._events.file_writer.event_writer._ev_writer
        for name in ("write_event", "flush"):
            setattr(writer, name, _ignoring_errors(getattr(writer, name)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def text(self, step: int, name: str, lines: list[str]) -> None:
        self._events.add_text(name, "\n\n".join(lines), step)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class Service(Tracker):
    """Weights & Biases or trackio, with the settings of their own variables (WANDB_MODE, TRACKIO_SPACE_ID, …).

    The run's name there is in tracker.json, so that a resumed run goes on in the same one. Weights & Biases keeps the
    first figures of steps that are computed again, which are the same. No login is read or written here.
    """

    def __init__(self, package: str, folder: epath.Path, config: Mapping[str, Any]) -> None:
        """Begin or resume the run."""
        path = folder / "tracker.json"
        if path.exists():
            name = json.loads(path.read_bytes())["name"]
        else:
            name = f"{folder.name}-{uuid.uuid4().hex[:8]}"
            write_whole(path, json.dumps({"name": name}).encode())
        self._package, self._has_failed = importlib.import_module(package), False
        by_id = {"id": name} if package == "wandb" else {}  # trackio resumes by name
        try:
            self._package.init(project="jaxlm", name=name, config=dict(config), resume="allow", **by_id)
        except Exception as error:  # each package has exceptions of its own
            raise UserError(
                f"{package} cannot start ({cause(error)}); log in, set WANDB_MODE=offline for wandb, or choose another "
                "--train.tracker."
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try("log", dict(values), step=step)

    def text(self, step: int, name: str, lines: list[str]) -> None:
        self._try("log", {name: "\n".join(lines)}, step=step)

    def close(self) -> None:
        self._try("finish")

    def _try(self, function: str, *args: Any, **kwargs: Any) -> None:
        """Call a function of the package; after a failure, call no more: metrics.jsonl is complete without them."""
        if self._has_failed:
            return
        try:
            getattr(self._package, function)(*args, **kwargs)
        except Exception as error:  # each package has exceptions of its own
            self._has_failed = True
            hosts.log(f"{self._package.__name__} gets no further metrics ({cause(error)}); see metrics.jsonl.")


def _ignoring_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that ends where the other raises OSError."""
    def call(*args: Any) -> None:
        with contextlib.suppress(OSError):
            function(*args)

    return call


def require_tracker(kind: str) -> None:
    """Raise UserError if the tracker's package is not installed."""
    if kind in SERVICES and importlib.util.find_spec(kind) is None:
        raise UserError(f"--train.tracker {kind} needs a package; {install(kind)}.")


def open_tracker(
    kind: str, folder: epath.Path, local: Path, after_step: int, config: Mapping[str, Any]
) -> Tracker:
    """Return a tracker."""
    if kind == "tensorboard":
        return TensorBoard(local, after_step)
    return Service(kind, folder, config) if kind in SERVICES else Tracker()
