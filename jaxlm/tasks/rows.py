"""The configuration to evaluate a fine-tuned model with."""

from __future__ import annotations

from pathlib import Path

from jaxlm.config.experiment import Experiment
from jaxlm.config.presets import load_config
from jaxlm.systems import TASKS
from jaxlm.tasks.base import Task


def experiment_of(path: str | Path, task: Task) -> Experiment:
    """The configuration of a run, or of a Transformers folder: the task, and rows of its form."""
    config = Path(path) / "config.json"
    if (Path(path) / "checkpoints").is_dir():
        return load_config(config)
    length = getattr(task.model, "max_positions", 512)
    return Experiment(objective=task, data=dict(TASKS)[type(task)](length=min(length, 512)))
