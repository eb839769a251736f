"""Fine-tuning: a task is trained, and its session opened to evaluate the trained model on the held-out rows."""

from __future__ import annotations

import dataclasses
import os

from jaxlm.config.experiment import Resolved
from jaxlm.objectives.base import PretrainedModel
from jaxlm.runs.load import load_run
from jaxlm.runs.pretrain import pretrain
from jaxlm.runs.session import Session
from jaxlm.types import Report


def finetune(resolved: Resolved, run_dir: str | os.PathLike[str], report: Report = print) -> Session | None:
    """Train a task, or finish its run, and return the session of its evaluation; None if no rows are held out.

    The session's `pretrained` is the model that `load_run` would read: the trained parameters from memory, or those of
    the best checkpoint (see `TrainConfig.uses_best`).

    Raises:
        UserError, Stopped: as `pretrain`.
    """
    session, program, state, figures = pretrain(resolved, run_dir, report)
    if not figures:
        return None
    data, uses_best = session.experiment.data, session.experiment.train.uses_best
    params = load_run(session.run.path).params if uses_best else program.local_params(state.params)
    # The attention kernel was chosen for training.
    task = dataclasses.replace(session.objective, model=session.objective.model.with_execution(attention="auto"))
    session = session.replace(objective=task, data=dataclasses.replace(data, source="") if data.dev else data)
    return dataclasses.replace(session, pretrained=PretrainedModel(task, params, session.tokenizer))
