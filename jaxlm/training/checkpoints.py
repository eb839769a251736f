"""Asynchronous checkpoints through Orbax: the newest few and the best are kept, damaged ones are passed over."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxlm.errors import UserError
from jaxlm.training.step import TrainState

log = logging.getLogger("absl")
Report = Callable[[str], None]


class Checkpoints:
    """The checkpoints/ folder of a run. A checkpoint holds the TrainState and a small JSON of facts about the data."""

    def __init__(self, folder: Path, keep: int = 3, read_only: bool = False) -> None:
        log.setLevel(logging.ERROR)  # Orbax reports each save in a dozen lines.
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy([
                ocp.checkpoint_managers.LatestN(keep),
                ocp.checkpoint_managers.BestN(get_metric_fn=lambda metrics: metrics["eval_loss"], reverse=True, n=1,
                                   keep_checkpoints_without_metrics=False),
            ]),
            # A save that was killed leaves a temporary folder, which nothing mistakes for a checkpoint.
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return sorted(self.manager.all_steps())

    def save(self, state: TrainState, step: int, facts: dict[str, Any], eval_loss: float | None) -> None:
        """Starts to write in the background; waits for the save before it, if that is still under way."""
        if step in self.manager.all_steps():
            return
        try:
            self.manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), facts=ocp.args.JsonSave(facts)),
                metrics=None if eval_loss is None else {"eval_loss": eval_loss},
            )
        except Exception as error:
            raise self._write_error(step, error) from error

    def save_params(self, params: Any, facts: dict[str, Any]) -> None:
        """The checkpoint of step 0 of an imported run: parameters, and no optimizer state yet."""
        state = {"params": params}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        try:
            self.manager.save(0, args=args)
        except Exception as error:
            raise self._write_error(0, error) from error

    def wait(self) -> None:
        """Until everything is on disk."""
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._write_error(None, error) from error

    def restore(self, shapes: TrainState, layout: TrainState, report: Report) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint that can be read, laid out on this run's mesh, with its facts; None if there is none
        but an import's (step 0), which has parameters only.

        A damaged one is moved aside (nothing is deleted), reported, and the one before it is tried.
        """
        abstract = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, layout
        )
        for step in reversed(self.steps()):
            if step == 0:
                return None
            try:
                args = ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract._asdict()), facts=ocp.args.JsonRestore()
                )
                restored = self.manager.restore(step, args=args)
                return TrainState(**restored["state"]), restored["facts"]
            except Exception as error:
                self._set_aside(step, error, report)
        return None

    def restore_params(self, shapes: Any, layout: Any = None, step: int | None = None) -> tuple[Any, int]:
        """(parameters alone, their step) of the newest readable checkpoint, for export and inference."""
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        layout = layout if layout is not None else jax.tree.map(lambda _: sharding, shapes)
        abstract = jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, layout)
        failure: Exception | None = None
        for candidate in [step] if step is not None else reversed(self.steps()):
            try:
                args = ocp.args.PyTreeRestore(
                    item={"params": abstract},
                    restore_args=ocp.checkpoint_utils.construct_restore_args({"params": abstract}),
                    partial_restore=True,
                )
                with ocp.PyTreeCheckpointer() as reader:
                    restored = reader.restore(self.folder / str(candidate) / "state", args=args)
                return restored["params"], candidate
            except Exception as error:
                failure = error
        if failure is not None:
            raise UserError(f"no checkpoint in {self.folder} can be read: {_first_line(failure)}") from failure
        raise UserError(f"{self.folder} holds no checkpoint yet; run `jaxlm pretrain` until it has saved one.")

    def close(self) -> None:
        self.manager.close()

    def _set_aside(self, step: int, error: Exception, report: Report) -> None:
        source = self.folder / str(step)
        target = self.folder.parent / f"damaged-checkpoint-{step}"
        number = 0
        while target.exists():
            number += 1
            target = self.folder.parent / f"damaged-checkpoint-{step}.{number}"
        if jax.process_index() == 0:
            source.rename(target)
        self.manager.reload()
        report(
            f"The checkpoint of step {step} cannot be read ({_first_line(error)}); it is now {target}, and the one "
            "before it is taken."
        )

    def _write_error(self, step: int | None, error: Exception) -> Exception:
        text = str(error)
        if "No space left" in text or "ENOSPC" in text or "Disk quota" in text:
            which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            return UserError(
                f"no space is left to write {which} in {self.folder}; free some and run the same command to go on."
            )
        return error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return json.dumps(lines[0][:160])[1:-1]
