"""Profiles of single steps, for TensorBoard."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from etils import epath

from jaxlm.errors import UserError
from jaxlm.paths import write_whole
from jaxlm.training.program import TrainState
from jaxlm.types import Report


@contextlib.contextmanager
def profiled(steps: str, folder: epath.Path, report: Report) -> Iterator[Callable[[int, TrainState], None]]:
    """Yield a function to call before every step, with the step and the newest state.

    It traces the steps FIRST:LAST on process 0, and writes the profile into the run's plugins/profile/, where
    TensorBoard's profile plugin looks for it, also in a bucket.
    """
    first, last = map(int, (steps or "0:-1").split(":"))  # no step is 0
    trace = contextlib.ExitStack()

    def start() -> None:
        local = trace.enter_context(tempfile.TemporaryDirectory())
        trace.callback(copy, Path(local))
        trace.enter_context(jax.profiler.trace(local))
        trace.callback(report, f"Steps {first:,} to {last:,} are profiled: tensorboard --logdir {folder}")

    def copy(local: Path) -> None:
        try:
            for file in filter(Path.is_file, local.rglob("*")):
                write_whole(folder / file.relative_to(local).as_posix(), file.read_bytes())
        except UserError as error:  # a profile is not worth a run
            report(f"The profile is lost: {error}")

    def before(step: int, state: TrainState) -> None:
        if jax.process_index() == 0 and step in (first, last + 1):
            jax.block_until_ready(state)
            start() if step == first else trace.close()

    with trace:
        yield before
