"""Fine-tuning: a task is trained, and returned with the held-out rows for its evaluation."""

from __future__ import annotations

import dataclasses
import os

import jax

from jaxlm.config.experiment import Resolved
from jaxlm.errors import Stopped
from jaxlm.parallel.hosts import main_first
from jaxlm.runs.folder import write_metadata
from jaxlm.runs.load import load_run
from jaxlm.runs.pretrain import pretrain
from jaxlm.tasks.evaluate import Evaluation
from jaxlm.types import Report


def finetune(resolved: Resolved, run_dir: str | os.PathLike[str], report: Report = print) -> Evaluation | None:
    """Train a task, or finish its run, and return its evaluation; None if no rows are held out.

    The parameters are those that `load_run` would read: the trained ones from memory, or those of the best checkpoint
    (see `TrainConfig.uses_best`).

    Raises:
        UserError, Stopped: as `pretrain`.
    """
    session, _, state, _, metadata, signal = pretrain(resolved, run_dir, report)
    if signal:
        raise Stopped(signal)
    if not session.source.records["held_out"]:
        return None
    t = session.kept.train
    main_first(lambda: None, "close the metrics", everywhere=False)  # all choose the best step by them
    best = load_run(session.run.path, {}) if t.uses_best else None
    params, step = (best.params, best.step) if best else (state.eval_params, int(state.step))
    # The attention kernel was chosen for training.
    task = dataclasses.replace(session.objective, model=session.objective.model.with_execution(attention="auto"))
    evaluation = Evaluation(task, params, session.source, session.experiment.data, t.batch_size)
    chosen = task.choose(params, session.source, session.experiment.data.length, t.batch_size)
    if chosen and jax.process_index() == 0:
        write_metadata(session.run.path, metadata | {"chosen": chosen | {"step": step}})
        shown = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        report(f"Chosen on the {len(session.source.records['held_out']):,} held-out rows: {shown}")
    return evaluation._replace(task=dataclasses.replace(task, **chosen))
