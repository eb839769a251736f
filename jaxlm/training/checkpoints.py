"""Asynchronous Orbax checkpoints: the newest and the best are kept, damaged ones are skipped."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxlm import __version__
from jaxlm.errors import UserError, outage
from jaxlm.parallel.checksums import checksums, digest
from jaxlm.parallel.hosts import from_main, is_of_processes, is_true_of_any, log, main_first, run_with_timeout
from jaxlm.paths import absolute, in_bucket, is_outage, without_queries
from jaxlm.training.metrics import best_step
from jaxlm.training.program import TrainState
from jaxlm.types import Report

SAVE_SECONDS, SLOWEST = 600, 50_000_000
"""Seconds after which a save is given up, or those that its bytes take at so many a second if that is longer. The
processes of a run wait so long for one whose part has failed."""
_OPTIONAL = ("memory", "average")
"""Fields of a state that are saved only if they have arrays."""
SPARE_BYTES = 1 << 20  # for the few dozen small files beside the arrays


class _NewestAndBest:
    """Orbax preservation policy: keep the newest checkpoints and the best one.

    Orbax's own policy reads metrics from the checkpoints and fails if one is damaged.
    """

    def __init__(self, keep: int, criterion: str) -> None:
        self.keep, self.criterion = keep, criterion
        self.history: Mapping[int, float] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]  # in order of saving
        history = {step: self.history[step] for step in steps if step in self.history}
        best = best_step(history, self.criterion) if history else None
        return [step == best or step in steps[-self.keep:] for step in steps]


class Checkpoints:
    """The checkpoints/ folder of a run.

    A checkpoint holds the TrainState and, as JSON, its metadata: the run's metadata, the sums of metrics that are not
    logged yet, a checksum of every array, and a SHA-256 digest of all these.
    """

    def __init__(
        self, folder: epath.Path, keep: int = 3, read_only: bool = False, criterion: str = "loss", size: int = 0
    ) -> None:
        """Open the folder, and create it unless `read_only`.

        The `keep` newest checkpoints, of some `size` bytes, are kept, and the best one by the figure `criterion`.
        """
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a dozen lines per save
        self.folder, self._policy = absolute(epath.Path(folder)), _NewestAndBest(keep, criterion)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            enable_async_checkpointing=not read_only,
            async_options=ocp.AsyncOptions(timeout_secs=max(SAVE_SECONDS, size // SLOWEST)),
            read_only=read_only,
            create=not read_only,
        )
        try:
            if not read_only:  # Orbax's own `cleanup_tmp_directories` removes what the other processes list meanwhile
                main_first(self._remove_unfinished, "remove unfinished checkpoints", everywhere=False)
            self.manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise UserError(f"cannot open {self.folder}: {error.strerror or _first_line(error)}.") from error
        # Orbax asks for its records, also from a thread of its own, and jax counts the steps that it is asked for: a
        # later signal would stop the processes at a step that is past.
        self.manager.reached_preemption = lambda step: False

    def _remove_unfinished(self) -> None:
        """Remove the checkpoints that a killed process was writing."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            step = path.name.partition(".orbax-checkpoint-tmp")[0]
            if step.isdecimal() and path.is_dir() and not ocp.utils.is_checkpoint_finalized(path):
                path.rmtree()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        return sorted(self.manager.all_steps())

    def save(self, state: TrainState, step: int, metadata: dict[str, Any], history: Mapping[int, float] = {}) -> None:
        """Start to write in the background, after waiting for a save that is still under way.

        `history` has the criterion's figure of every step that was evaluated.

        Raises:
            FloatingPointError: The state holds a number that is not finite; nothing was written.
            UserError: This checkpoint cannot be written, or with several processes the one before it.
        """
        item = _item(state)
        numbers, finite = checksums(item)
        if not finite:
            raise FloatingPointError(f"the parameters or the optimizer's state of step {step:,} are not finite")
        self._policy.history = history
        self._save(step, item, metadata | {"checksums": numbers})

    def save_params(self, params: Any, metadata: dict[str, Any]) -> None:
        """Write parameters without optimizer state as the checkpoint of step 0, for an imported run."""
        params = jax.tree.map(jax.numpy.asarray, params)
        numbers, _ = checksums({"params": params})
        self._save(0, {"params": params}, metadata | {"checksums": numbers})

    def _save(self, step: int, item: dict[str, Any], metadata: dict[str, Any]) -> None:
        metadata = metadata | {"jaxlm": __version__}
        metadata = metadata | {"digest": digest(metadata)}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(item), metadata=ocp.args.JsonSave(metadata))
        has_failed = self._previous_has_failed(step)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(item)) + SPARE_BYTES
        is_full = not in_bucket(self.folder) and shutil.disk_usage(self.folder).free < size
        if is_true_of_any(is_full):  # the others would wait for this process
            raise self._write_error("no space is left")
        with self._writing():
            if step in self.manager.all_steps():  # damaged: training was resumed from an earlier one
                self.manager.delete(step)
            # Without `force` Orbax skips steps below a damaged one.
            self.manager.save(step, args=args, force=True)
            if has_failed:  # a cause that lasts ends the run now
                self.manager.wait_until_finished()

    def _previous_has_failed(self, step: int) -> bool:
        """Wait for the save before that of `step`; of one process its failure is only told, since the next may pass."""
        if jax.process_count() > 1:  # `manager.save` raises it
            return False
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            log(f"The checkpoint before that of step {step:,} was not written ({_first_line(error)}).")
            with self._writing():
                with contextlib.suppress(OSError):  # a file may be written still; the next start removes it
                    self._remove_unfinished()
                self.manager.reload()  # Orbax has struck older checkpoints off its list, which are there
            return True
        return False

    def wait(self) -> None:
        """Block until everything is on disk; UserError where it cannot be written."""
        with self._writing():
            self.manager.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn the block's errors into UserErrors, except those of other processes."""
        try:
            yield
        except Exception as error:
            if is_of_processes(error):
                raise
            raise self._write_error(_first_line(error)) from error

    def _write_error(self, cause: str) -> UserError:
        return UserError(
            f"cannot write a checkpoint in {self.folder} ({cause}); free disk space or fix the cause, then run the "
            "same command to resume.", exit_code=1 if in_bucket(self.folder) else 2,  # most failures of a bucket pass
        )

    def restore(
        self, shapes: TrainState, shardings: TrainState, report: Report, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Return (state, metadata) of the newest checkpoint that can be read, or of `step`, on this run's mesh.

        None if only an imported, parameters-only checkpoint exists. Damaged checkpoints are reported; they stay until
        their step is saved again or newer checkpoints replace them.

        Raises:
            UserError: There are checkpoints of training and none can be read.
        """
        # Of process 0, since a network filesystem may show the others a checkpoint later.
        steps = from_main([each for each in reversed(self.steps()) if each > 0 and step in (None, each)])
        if not steps:
            return None
        item = _item(jax.tree.map(_abstract, shapes, shardings))
        _, restored, metadata = self._newest(steps, lambda step: item, report)
        lacking = {name: getattr(shapes, name) for name in _OPTIONAL}  # of no arrays: None or ()
        return TrainState(**lacking | restored), metadata

    def restore_params(
        self, shapes: Any, shardings: Any = None, step: int | None = None, report: Report = log, average: bool = False
    ) -> tuple[Any, int]:
        """Return (parameters, step) of the newest checkpoint that can be read, or of `step`.

        With `average` they are the moving average, which a checkpoint of step 0 does not have.
        """
        if shardings is None:
            device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: device, shapes)
        steps = from_main([step] if step is not None else self.steps()[::-1])
        if not steps:
            raise UserError(f"{self.folder} holds no checkpoint yet; run `jaxlm pretrain` until it has saved one.")
        item = jax.tree.map(_abstract, shapes, shardings)
        found, restored, _ = self._newest(
            steps, lambda step: {"average" if average and step else "params": item}, report
        )
        return next(iter(restored.values())), found

    def _newest(
        self, steps: list[int], item_of: Callable[[int], dict[str, Any]], report: Report
    ) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Return (step, arrays, metadata) of the first of `steps` that can be read and matches its checksums.

        It is read without `manager.restore`, which ends with a barrier: a process that has failed would not meet the
        others there.
        """
        self.wait()
        for step in steps:
            metadata, failure = self._attempt(lambda step=step: self._metadata(step))
            if not failure:
                found, failure = self._attempt(lambda step=step: self._arrays(step, item_of(step)))
            if not failure:  # all processes compute the checksums together
                expected = metadata["checksums"]
                wrong = [path for path, number in checksums(found)[0].items() if expected.get(path) != number]
                if not wrong:
                    return step, found, metadata
                failure = f"{wrong[0]} does not match its checksum"
            found = {}  # the next one may need its memory
            report(f"The checkpoint of step {step:,} cannot be read ({failure}); trying the previous one.")
        raise UserError(
            f"no checkpoint of step {', '.join(f'{step:,}' for step in steps)} in {self.folder} can be read "
            f"({failure}); fix the cause, restore a backup, or choose another --run-dir to start over."
        )

    def _attempt(self, action: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
        """Return (result, "") of an action that all processes run, or ({}, cause) if it fails on any of them.

        A bucket that cannot be read now has no damaged checkpoints: that ends all processes with exit code 1.
        """
        result, failure, is_out = {}, "", False
        try:
            result = action()
        except Exception as error:
            failure, is_out = _first_line(error), is_outage(error, self.folder)
        if is_true_of_any(is_out):
            raise outage(self.folder, failure or "by another process")
        return ({}, failure or "by another process") if is_true_of_any(bool(failure)) else (result, "")

    def _metadata(self, step: int) -> dict[str, Any]:
        metadata = json.loads((self.folder / str(step) / "metadata" / "metadata").read_bytes())
        if metadata.get("digest") != digest({name: value for name, value in metadata.items() if name != "digest"}):
            raise ValueError("its metadata does not match its digest")
        return metadata

    def _arrays(self, step: int, item: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays that `item` names."""
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
        return ocp.PyTreeCheckpointHandler().restore(self.folder / str(step) / "state", args=args)

    def close(self) -> None:
        """Wait for a save that is under way, and ignore its failure; call `wait` first where the save is needed."""

        def close() -> None:
            with contextlib.suppress(Exception):
                self.manager.close()

        run_with_timeout(close)


def _item(state: TrainState) -> dict[str, Any]:
    """Return what is saved of a state: recurrence memory and average only where there are any."""
    return {name: value for name, value in state._asdict().items() if name not in _OPTIONAL or jax.tree.leaves(value)}


def _abstract(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _first_line(error: Exception) -> str:
    """Return the cause of a failure, for one sentence: Orbax's errors have many lines."""
    if type(error) is Exception and error.__cause__:  # around a failed read, with the name of a method as its details
        error = error.__cause__
    text = without_queries(str(error).strip().partition("\n")[0])
    # TensorStore names paths first and the cause last.
    return (text if len(text) <= 200 else f"{text[:60]} … {text[-140:]}").rstrip(".") or type(error).__name__
