"""Loading of trained models: from a run folder or from a Transformers folder."""

from __future__ import annotations

import dataclasses
import os

import jax

from jaxlm.config.experiment import Experiment
from jaxlm.config.presets import load_config, load_preset
from jaxlm.errors import UserError
from jaxlm.objectives.base import PretrainedModel
from jaxlm.paths import any_path, local_folder, run_path
from jaxlm.runs.folder import RunFolder
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.metrics import best_step, evaluations
from jaxlm.types import Report


def load_model(path: str | os.PathLike[str]) -> PretrainedModel:
    """Load the newest checkpoint of a run folder, a Transformers folder or one of vectors, onto the default device.

    Raises:
        UserError: The folder is neither.
    """
    folder = any_path(path)
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run folder or a Transformers folder.")
    if (folder / "checkpoints").is_dir():
        return load_run(path)
    inside = [*folder.glob("*/checkpoints"), *folder.glob("*/*/checkpoints")]  # of a sweep, of several seeds
    if inside and not (folder / "config.json").is_file():
        runs = ", ".join(sorted(str(checkpoints.parent) for checkpoints in inside))
        raise UserError(f"{path} is no run but holds runs: {runs}; give one of them.")
    folder = local_folder(path, "Transformers folders")
    from jaxlm.huggingface.families import reader_of  # not needed to train
    from jaxlm.huggingface.folder import import_folder

    imported = (reader_of(folder) or import_folder)(folder)
    # Otherwise every call of a jitted function would copy them.
    return dataclasses.replace(imported, params=jax.device_put(imported.params), path=str(path))


def load_run(path: str | os.PathLike[str]) -> PretrainedModel:
    """Load the newest undamaged checkpoint of a run folder, or the best one (see `TrainConfig.uses_best`)."""
    folder = run_path(path)
    experiment, run = load_config(folder / "config.json"), RunFolder.read(folder)  # in this order: links are refused
    if run.tokenizer_folder is None:
        raise UserError(f"{folder} has no checkpoint yet; run `jaxlm pretrain` or `jaxlm finetune` until one is saved.")
    tokenizer = Tokenizer.load(run.tokenizer_folder)
    if run.is_imported:  # `bind` may refuse it for training: a T5 without sentinels can only generate
        objective = dataclasses.replace(experiment.objective, vocabulary=tokenizer.vocabulary)
    else:
        objective = experiment.objective.bind(tokenizer.vocabulary, experiment.data.length)
    # The attention kernel was chosen for the machine that trained the model.
    objective = dataclasses.replace(objective, model=objective.model.with_execution(attention="auto"))
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    try:
        t = experiment.train
        figures = evaluations(folder, t.criterion) if t.uses_best else {}
        kept = {step: figures[step] for step in checkpoints.steps() if step in figures}
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        params, step = checkpoints.restore_params(shapes, step=best_step(kept, t.criterion) if kept else None)
    finally:
        checkpoints.close()
    fresh = () if step else tuple(run.metadata.get("fresh", ()))
    return PretrainedModel(objective, params, tokenizer, fresh, str(path), step)


def load_teacher(path: str) -> PretrainedModel:
    """Load a model on the host, without parameters that its folder lacks."""
    model = load_model(path)
    params = {name: tree for name, tree in model.params.items() if name not in model.fresh}
    return dataclasses.replace(model, params=jax.device_get(params))


def vocabulary_of(config: str, experiment: Experiment, report: Report = print) -> Vocabulary | None:
    """Return the vocabulary of a run folder, or of the data that flags name for a preset; None if they name none.

    Args:
        config: the preset or run folder.
        experiment: the resolved configuration.
        report: receives progress messages, since a vocabulary may have to be trained first, as in pretraining.
    """
    run, data = RunFolder.read(config), experiment.data
    if run.tokenizer_folder is None:
        is_named = data != dataclasses.replace(load_preset(config).data, length=data.length)
        return data.prepare_tokenizer(report, experiment.objective.symbols).vocabulary if is_named else None
    return dataclasses.replace(Tokenizer.load(run.tokenizer_folder).vocabulary, preserve_rows=run.is_imported)
