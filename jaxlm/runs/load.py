"""Loading of trained models: from a run folder or from a Transformers folder."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxlm import hub
from jaxlm.config.experiment import Resolved
from jaxlm.config.json import flatten
from jaxlm.config.presets import load_config
from jaxlm.errors import UserError
from jaxlm.fields import Setting
from jaxlm.huggingface.families import reader_of
from jaxlm.huggingface.folder import import_folder
from jaxlm.objectives.base import Constants, Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import shard_params
from jaxlm.parallel.mesh import MeshConfig, Sizes, make_inference_mesh
from jaxlm.parallel.rules import shardings
from jaxlm.paths import any_path, local_folder, run_path
from jaxlm.runs.folder import RunFolder, split_steps
from jaxlm.runs.session import find_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.metrics import best_step, evaluations
from jaxlm.trees import leaves, path_string
from jaxlm.types import FolderSettings, Params


def load_model(path: str | os.PathLike[str], mesh: Sizes = None) -> PretrainedModel:
    """Load the newest checkpoint of a run folder, a Transformers folder or one of vectors.

    Args:
        path: The folder, RUN@STEPS (see `load_run`) or `hf:ORG/NAME[@REVISION]`.
        mesh: Axis sizes of the mesh that shards the parameters, see `make_inference_mesh`.

    Raises:
        UserError: The folder is neither.
    """
    path = hub.pin(os.fspath(path))
    folder = any_path(split_steps(hub.local(path))[0])
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run, RUN@STEP, RUN@last3 or a Transformers folder.")
    if (folder / "checkpoints").is_dir():
        return load_run(path, mesh)
    inside = [*folder.glob("*/checkpoints"), *folder.glob("*/*/checkpoints")]  # of a sweep, of several seeds
    if inside and not (folder / "config.json").is_file():
        runs = ", ".join(sorted(str(checkpoints.parent) for checkpoints in inside))
        raise UserError(f"{path} is no run but holds runs: {runs}; give one of them.")
    folder = local_folder(folder, "Transformers folders")
    imported = (reader_of(folder) or import_folder)(folder)
    params = imported.params
    if mesh != "host":  # every call of a jitted function would copy them from there
        rules = imported.objective.model.sharding_rules
        params = shard_params(params, make_inference_mesh(MeshConfig(), mesh), rules)
    return dataclasses.replace(imported, params=params, path=str(path))


def load_run(path: str | os.PathLike[str], mesh: Sizes = None) -> PretrainedModel:
    """Load the newest undamaged checkpoint of a run folder, or the best one (see `TrainConfig.uses_best`).

    Of RUN@STEP it is that of a step. Of several, as RUN@last3, the parameters are the mean, computed in float64. Each
    device reads its own shards.
    """
    folder = run_path(split_steps(path)[0])
    experiment, run = load_config(folder / "config.json"), RunFolder.read(path)  # in this order: links are refused
    if run.tokenizer_folder is None and run.saved_steps:
        raise UserError(f"{folder / 'tokenizer'} is missing; copy it from the run that the checkpoints come from.")
    if run.tokenizer_folder is None:
        raise UserError(f"{folder} has no checkpoint yet; run `jaxlm pretrain` or `jaxlm finetune` until one is saved.")
    tokenizer = find_tokenizer(Resolved(experiment), run)
    vocabulary = dataclasses.replace(tokenizer.vocabulary, preserve_rows=run.is_imported)
    objective = experiment.objective
    # The attention kernel is an option of training.
    objective = dataclasses.replace(objective, model=objective.model.with_execution(attention="auto"))
    if run.is_imported:
        objective = objective.bind_unchecked(vocabulary, load=load_model)
    else:
        objective = objective.bind(vocabulary, experiment.data.length, load=load_model)
    _require_one_function(path, [experiment.phase_at(step).experiment.objective for step in run.named_steps])
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    try:
        t = experiment.train
        history = evaluations(folder, t.criterion) if t.uses_best else {}
        kept = {step: history[step] for step in checkpoints.steps() if step in history}
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        best = best_step(kept, t.criterion) if kept else None
        placement = shardings(
            shapes, make_inference_mesh(experiment.mesh, mesh), objective.model.sharding_rules
        )
        restore = functools.partial(
            checkpoints.restore_params, shapes, placement, average=experiment.optimizer.average > 0
        )
        if len(run.named_steps) > 1:
            params, step = _mean(restore, run.named_steps)
        else:
            params, step = restore(step=run.named_steps[0] if run.named_steps else best)
    finally:
        checkpoints.close()
    if step:  # a phase may have changed the model's function, such as the base of its rotary positions
        phase = dataclasses.replace(experiment, objective=objective).phase_at(step)
        own, model = phase.experiment.objective, phase.experiment.objective.model.with_execution(attention="auto")
        objective = dataclasses.replace(own if "objective" in phase.changes else objective, model=model)
        found = leaves(params)
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        params = jax.tree_util.tree_map_with_path(lambda path, _: found[path_string(path)], shapes)
    chosen = dict(run.metadata.get("chosen", {}))
    if chosen.pop("step", step) == step and len(run.named_steps) < 2:  # chosen for these parameters
        # A value in the configuration is the user's own.
        unset = {name: value for name, value in chosen.items() if not getattr(objective, name)}
        objective = dataclasses.replace(objective, **unset)
    fresh = () if step else tuple(run.metadata.get("fresh", ()))
    settings = FolderSettings.from_json(run.metadata.get("settings", {}))
    length = experiment.longest_rows(step) if step else settings.length
    trained = objective.vector_settings(length)
    if settings.length and step and not trained and not objective.scores_rows:  # shorter rows do not unlearn long ones
        length = max(length, settings.length)
    settings = settings.after_training(trained, tokenizer.vocabulary.eos if step else -1)
    return PretrainedModel(objective, params, tokenizer, fresh, str(path), step, length, settings)


def _require_one_function(path: str | os.PathLike[str], named: Sequence[Objective]) -> None:
    """Raise UserError if steps whose mean is wanted have parameters of different functions."""
    functions = [(type(each), flatten(each, Setting.decides_weights)) for each in named]
    if any(function != functions[0] for function in functions):
        raise UserError(f"{path} names steps of phases with different objectives or models; name those of one phase.")


def _mean(restore: Callable[..., tuple[Params, int]], steps: Sequence[int]) -> tuple[Params, int]:
    """Return (the mean of the parameters of `steps`, the last step), computed in float64 on their devices.

    These hold 12 bytes a parameter, the sum and one checkpoint, and one array's share.
    """
    add = jax.jit(operator.add, donate_argnums=0)  # alone: fused with a share it would be rounded otherwise

    def share(leaf: jax.Array) -> jax.Array:
        return leaf.astype(np.float64) / len(steps)

    total, last = None, 0
    for step in steps:
        params, last = restore(step=step)  # read before 64 bits are on
        with jax.enable_x64(True):
            first = total is None
            total = jax.tree.map(share, params) if first else jax.tree.map(lambda t, x: add(t, share(x)), total, params)
        del params  # before the next one is read
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: leaf.astype(np.float32), total), last


def constant_arrays(objective: Objective, vocabulary: Vocabulary) -> Constants:
    """Return the constants of an objective (see `Objective.load_constants`), on the host."""
    return objective.load_constants(vocabulary, load_teacher)


def constant_shapes(objective: Objective, vocabulary: Vocabulary) -> Constants:
    """Return the shapes of `constant_arrays`."""
    return objective.constant_shapes(vocabulary, load_teacher)


def load_teacher(path: str) -> PretrainedModel:
    """Load a model on the host, without parameters that its folder lacks."""
    model = load_model(path)
    params = {name: tree for name, tree in model.params.items() if name not in model.fresh}
    return dataclasses.replace(model, params=jax.device_get(params))
