"""Resolution: a preset or a run folder, flags and a pretrained model become one complete configuration.

`resolve` opens the pretrained model and applies the flags; `with_rows` fills in what a task leaves open until its rows
are read. Nothing changes the configuration afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence

import jax

from jaxlm.config.experiment import Experiment, Resolved, TrainConfig
from jaxlm.config.flags import override
from jaxlm.config.presets import load_config, load_preset
from jaxlm.data.labelled import LabelledData, LabelledSource
from jaxlm.errors import UserError
from jaxlm.fields import Setting, settings
from jaxlm.models.base import Model
from jaxlm.objectives.base import Objective, PretrainedModel, with_options
from jaxlm.parallel.hosts import main_first
from jaxlm.paths import any_path
from jaxlm.runs.folder import RunFolder
from jaxlm.runs.load import load_model
from jaxlm.systems import TASKS, system_of
from jaxlm.tasks.base import Task
from jaxlm.tasks.remarks import require_classes, row_remarks
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.tokenizer import Tokenizer


def resolve(
    config: str, flags: Sequence[str] = (), init_from: str | None = None, as_text: bool = False, program: str = "",
    pretrained: PretrainedModel | None = None,
) -> Resolved:
    """Resolve the configuration of a run.

    Args:
        config: A preset or a run folder.
        flags: Command-line arguments for the fields of the configuration, including the pretrained model's.
        init_from: Folder of the pretrained model, which replaces the configuration's model.
        as_text: Whether a decoder writes a task's answers, as T5 always does.
        program: Name of the command in `--help`.
        pretrained: The model of `init_from`, on the host, if it is loaded already.

    Raises:
        UserError: A flag is wrong, a value is out of range, or the pretrained model does not suit the configuration.
    """
    experiment, is_run = load_preset(config), (any_path(config) / "config.json").is_file()
    objective = experiment.objective
    if as_text:
        # A decoder's row holds the text and the answer.
        objective = _as_text(objective, experiment.data.length // 2)
    if init_from:
        if pretrained is None:
            pretrained = load_model(init_from)
            # On the host, from where each device of the mesh gets its shard.
            pretrained = dataclasses.replace(pretrained, params=jax.device_get(pretrained.params))
        model = pretrained.objective.model
        if isinstance(objective, Task) and model.writes_answers and not model.fine_tuning:
            objective = _as_text(objective)
        if system_of(objective, model):  # it may be of another family than the preset's
            objective = dataclasses.replace(objective, model=with_options(model, objective.model))
        objective = objective.with_pretrained_model(pretrained)
    preset = dataclasses.replace(experiment, objective=objective)
    experiment = override(preset, list(flags), program)
    _require_one_duration(preset, experiment, is_run)
    if pretrained is not None:
        _require_same_weights(preset, experiment, pretrained.path, "objective.model.")
        tokenizer = experiment.data.tokenizer
        if tokenizer not in ("", "auto") and Tokenizer.load(tokenizer) != pretrained.tokenizer:
            raise UserError(
                f"--init-from {init_from} has a tokenizer of its own, which its weights belong to; leave out "
                f"--data.tokenizer {tokenizer}."
            )
    if is_run or not isinstance(objective, Task):
        experiment = _with_steps(experiment)
    experiment.validate()
    return Resolved(experiment, pretrained)


def with_rows(
    resolved: Resolved, run_dir: str | os.PathLike[str] | None = None, report: Callable[[str], None] = print
) -> Resolved:
    """Resolve what depends on the rows of a task: special tokens, labels, number of steps and of warm-up steps.

    Pretraining, and a run of a task that is resumed, are returned as they are.

    Args:
        resolved: The result of `resolve`.
        run_dir: The run's folder; a run that has begun keeps its number of warm-up steps.
        report: Receives remarks about the rows and progress messages.

    Raises:
        UserError: There is no model, there are no rows, or training cannot use one of them.
    """
    experiment, pretrained = resolved
    task, data, train = experiment.objective, experiment.data, experiment.train
    if isinstance(task, Task) and task.model == Model():
        raise UserError("a task needs a trained model; pass --init-from RUN_OR_HF_DIR.")
    if pretrained is None or not isinstance(task, Task):
        return resolved
    if train.short_steps:
        raise UserError("train.short_steps is for pretraining; set it to 0.")
    tokenizer = pretrained.tokenizer.with_symbols(task.symbols)
    # One process prepares what has to be downloaded. Remarks about the good rows come before the error about bad ones.
    rows, error = main_first(lambda: _open_rows(data, tokenizer, report), "prepare the rows")
    if not rows.records["train"]:
        raise UserError("--data.source is empty; give a file of rows to train on.")
    if unlabelled := next((row for row in rows.records["held_out"] if not row.is_labelled), None):
        raise UserError(f"{unlabelled.place} has no label; fill it in, or remove the row from --data.dev.")
    labelled = rows.records["train"] + ([] if data.dev else rows.records["held_out"])
    task = task.with_labels(labelled, data.class_names())
    vocabulary = dataclasses.replace(tokenizer.vocabulary, preserve_rows=True)
    # The embedding gets rows for new special tokens.
    task = dataclasses.replace(task, model=task.model.for_vocabulary(vocabulary))
    bound = task.bind(vocabulary, data.length)
    examples = rows.examples("train", bound, data.length)
    if jax.process_index() == 0:
        for line in row_remarks(bound, rows.records["train"], examples, data.length):
            report(line)
    if error:
        raise error
    require_classes(task, labelled, data)
    warmup_steps = None
    if run_dir is not None and (run := RunFolder.read(run_dir)).has_begun:
        warmup_steps = run.experiment.optimizer.warmup_steps
    experiment = _with_steps(dataclasses.replace(experiment, objective=task), len(examples), warmup_steps)
    pretrained = dataclasses.replace(pretrained, tokenizer=tokenizer, params=task.from_pretrained(pretrained))
    return Resolved(experiment, pretrained)


def _open_rows(
    data: LabelledData, tokenizer: Tokenizer, report: Callable[[str], None]
) -> tuple[LabelledSource, UserError | None]:
    """Return the rows and no error; or the good rows and the error about the bad ones."""
    try:
        return data.open(tokenizer, report), None
    except UserError as error:
        return dataclasses.replace(data, skip_bad_rows=True).open(tokenizer, report), error  # raises any other again


def resolve_evaluation(path: str | os.PathLike[str], flags: Sequence[str] = ()) -> Resolved:
    """Resolve the evaluation of a fine-tuned model.

    Its rows are those of a flag, else those of the run's `data.dev`, else those held out of the run's `data.source`.

    Raises:
        UserError: The model is not fine-tuned, or a flag is wrong or changes nothing here.
    """
    pretrained = load_model(path)
    task = pretrained.objective
    if not isinstance(task, Task):
        raise UserError(
            f"{path} was pretrained as {type(task).__name__} and not fine-tuned for a task; use `jaxlm finetune`, or "
            "--task FILE to evaluate it with prompts."
        )
    stored = experiment_of(path, task)
    preset = dataclasses.replace(stored, objective=task, data=dataclasses.replace(stored.data, source="", dev=""))
    experiment = override(preset, list(flags), f"jaxlm evaluate {path}")
    for old, _ in _changes(preset, experiment):
        if not old.name.startswith(("data.", "objective.", "train.batch_size")):
            raise UserError(
                f"{_flag(old)} has no effect here; only --data.…, --objective.… and --train.batch-size have one."
            )
    _require_same_weights(preset, experiment, str(path))
    data = experiment.data
    if data.source and data.dev:
        raise UserError("--data.source and --data.dev both name the rows to evaluate on; give one of them.")
    dev = data.source or data.dev or stored.data.dev
    data = dataclasses.replace(data, source="" if dev else stored.data.source, dev=dev)
    if not dev and RunFolder.read(path).metadata.get("data") not in (None, data.open(pretrained.tokenizer).fingerprint):
        raise UserError(
            f"{data.source} is not divided as when {path} was trained on it, so rows that it has learnt from would be "
            "scored; give rows of their own with --data.source FILE."
        )
    task = experiment.objective.bind(task.vocabulary, data.length)
    return Resolved(dataclasses.replace(experiment, objective=task, data=data), pretrained)


def experiment_of(path: str | os.PathLike[str], task: Task) -> Experiment:
    """Return the configuration of a run, or one for a Transformers folder: the task with its default form of rows."""
    if (any_path(path) / "checkpoints").is_dir():
        return load_config(any_path(path) / "config.json")
    length = task.model.max_length or 512
    data = dict(TASKS)[type(task)](length=min(length, 512))
    return Experiment(objective=task, data=data, train=TrainConfig(batch_size=32))


def require_task(experiment: Experiment) -> None:
    """Raise UserError for a configuration of pretraining."""
    if not isinstance(experiment.objective, Task):
        raise UserError("the configuration is of pretraining, not of a task; choose a preset of configs/tasks.")


def _as_text(task: Objective, max_target: int | None = None) -> TextToText:
    """Return the text-to-text form of a task, whose answers have at most `max_target` tokens."""
    if not isinstance(task, Task):
        raise UserError("--as-text is only for tasks; choose a preset in configs/tasks, or leave it out.")
    longest = min(task.longest_text, max_target or task.longest_text)
    return task if isinstance(task, TextToText) else TextToText(kind=task, max_target=longest)


def _with_steps(experiment: Experiment, num_rows: int = 0, warmup_steps: int | None = None) -> Experiment:
    """Replace None in `train.steps`, by its epochs over `num_rows` rows, and in `optimizer.warmup_steps`."""
    train, optimizer = experiment.train, experiment.optimizer
    if train.steps is None:
        if not train.epochs * num_rows:
            raise UserError("train.steps is None; give a number, or for a task train.epochs.")
        train = dataclasses.replace(train, steps=math.ceil(train.epochs * num_rows / train.batch_size))
    if optimizer.warmup_steps is None:
        warmup_steps = round(optimizer.warmup_share * train.steps) if warmup_steps is None else warmup_steps
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup_steps)
    return dataclasses.replace(experiment, train=train, optimizer=optimizer)


def _require_one_duration(preset: Experiment, experiment: Experiment, is_run: bool) -> None:
    """Raise UserError if both a number of steps and the epochs or the share that determine it are given."""
    for part, share, number in (("train", "epochs", "steps"), ("optimizer", "warmup_share", "warmup_steps")):
        old, new = getattr(preset, part), getattr(experiment, part)
        # The steps of a run were resolved when it began; a flag for the steps overrides a preset's epochs.
        is_resolved = getattr(new, share) == getattr(old, share) and (is_run or getattr(old, number) is None)
        if getattr(new, share) and getattr(new, number) is not None and not is_resolved:
            advice = f"set {part}.{number} to None, or {part}.{share} to 0"
            if is_run:
                advice = f"give the new {part}.{number} as a number, since a run's was computed when it began"
            raise UserError(
                f"{part}.{share} {getattr(new, share)} and {part}.{number} {getattr(new, number)} are both given; "
                f"{advice}."
            )


def _require_same_weights(preset: Experiment, experiment: Experiment, path: str, prefix: str = "") -> None:
    """Raise UserError for a flag that changes a field on which the weights in the folder `path` depend."""
    for old, _ in _changes(preset, experiment):
        if old.decides_weights() and old.name.startswith(prefix):
            raise UserError(f"the weights of {path} were trained with {_flag(old)} {old.value}; leave the flag out.")


def _changes(old: Experiment, new: Experiment) -> list[tuple[Setting, Setting]]:
    """Return (old, new) for each field that flags have changed."""
    pairs = zip(settings(old), settings(new), strict=True)
    return [(a, b) for a, b in pairs if a.value != b.value and not dataclasses.is_dataclass(a.value)]


def _flag(setting: Setting) -> str:
    return f"--{setting.name.replace('_', '-')}"
