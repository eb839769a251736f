"""Resolution: a preset or a run folder, flags and a pretrained model become one configuration.

What a task leaves open until its rows are read, `jaxlm.runs.session` fills in.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import jax

from jaxlm.config.experiment import Experiment, Resolved, TrainConfig
from jaxlm.config.flags import override
from jaxlm.config.json import differences, flatten
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.fields import Setting, check_types, settings, with_value
from jaxlm.models.base import Model
from jaxlm.objectives.base import Objective, with_options
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.hosts import log, require_same, together
from jaxlm.paths import is_run_folder
from jaxlm.runs.folder import NO_RUN, RunFolder
from jaxlm.runs.load import load_model
from jaxlm.runs.session import set_up
from jaxlm.systems import is_foreign, system_of, task_of
from jaxlm.tasks.evaluate import Evaluation
from jaxlm.tasks.tables import TableData
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.optimizers import make_schedule

OF_VOCABULARY = ("data.vocab_size", "data.tokenizer_kind", "data.normalization")
"""Fields that say which vocabulary is trained, if none is given."""
OF_DECAY = ("train.steps", "optimizer.schedule", "optimizer.decay_share", "optimizer.warmup_steps",
            "optimizer.warmup_share")
"""Fields that `train.decay_steps` sets."""
OF_TEXT = ("data.source", "data.temperature", "data.deduplicate")
"""Fields that choose the text. A run that is resumed compares the text itself, a decay these."""


def resolve(
    config: str, flags: Sequence[str] = (), init_from: str | None = None, as_text: bool = False, command: str = "",
    pretrained: PretrainedModel | None = None,
) -> Resolved:
    """Resolve the configuration of a run.

    Args:
        config: A preset or a run folder.
        flags: Command-line arguments for the fields of the configuration, including the pretrained model's.
        init_from: Folder of the pretrained model, which replaces the configuration's model.
        as_text: Whether a decoder writes a task's answers, as T5 always does.
        command: Name of the command in `--help`.
        pretrained: The model of `init_from`, on the host, if it is loaded already.

    Raises:
        UserError: A flag is wrong, a value is out of range, or the pretrained model does not suit the configuration.
    """
    experiment, is_run = load_preset(config), is_run_folder(config)
    if init_from and pretrained is None:
        pretrained = load_model(init_from, "host")
        # On the host, from where each device of the mesh gets its shard.
        pretrained = dataclasses.replace(pretrained, params=jax.device_get(pretrained.params))
    if pretrained is not None and (is_causal := experiment.objective.is_causal) is not None:
        if any(phase.experiment.objective.is_causal is False for phase in experiment.phases):
            pretrained = pretrained.in_direction(False)  # of a later phase, which needs a mask symbol
        pretrained = pretrained.in_direction(is_causal)
    unchanged = dataclasses.replace(experiment, objective=_objective_of(experiment, pretrained, as_text))
    experiment = override(unchanged, list(flags), command)
    old, new = unchanged.train, experiment.train
    if new.epochs not in (0, old.epochs) and new.steps == old.steps and not is_run:
        experiment = with_value(experiment, "train.steps", None)  # in place of a preset's
    _require_one_duration(unchanged, experiment, is_run)
    if pretrained is not None:
        _require_same_weights(unchanged, experiment, pretrained.path, pretrained.objective.model)
        if experiment.train.phases == unchanged.train.phases != ():
            _require_weights_of_phase(experiment, pretrained.path)
        tokenizer = experiment.data.tokenizer
        if tokenizer not in ("", "auto") and Tokenizer.load(tokenizer) != pretrained.tokenizer:
            raise UserError(
                f"--init-from {init_from} has a tokenizer of its own, which its weights belong to; leave out "
                f"--data.tokenizer {tokenizer}."
            )
        is_decay = experiment.train.decay_steps and pretrained.step
        theirs = RunFolder.read(pretrained.path).experiment.data if is_decay else None
        for _, new in _changes(unchanged, experiment):
            if new.name in OF_VOCABULARY and getattr(theirs, new.name.removeprefix("data."), None) != new.value:
                raise UserError(f"--init-from {init_from} has a tokenizer of its own; leave out {_flag(new)}.")
    t = experiment.train
    if t.steps is None and not t.phases and (is_run or not t.epochs):  # `jaxlm.runs.session` computes them
        raise UserError("train.steps is None; give a number, train.phases, or for a new run train.epochs.")
    if experiment.train.decay_steps and (pretrained is not None or not is_run):
        experiment = _with_decay(experiment, pretrained, [new for _, new in _changes(unchanged, experiment)])
    experiment.validate()
    if pretrained is None and (given := experiment.data.tokenizer) not in ("", "auto"):
        for _, new in _changes(unchanged, experiment):
            if new.name in OF_VOCABULARY:
                log(f"--data.tokenizer {given} has a vocabulary already; {_flag(new)} changes nothing.")
    if experiment.train.phases == old.phases and not is_run:
        _remark_on_phases(unchanged, experiment)
    return Resolved(experiment, pretrained)


def _with_decay(experiment: Experiment, pretrained: PretrainedModel | None, flags: Sequence[Setting]) -> Experiment:
    """Return the configuration of a run of `train.decay_steps` after the checkpoint of another run, given `flags`."""
    t, optimizer, step = experiment.train, experiment.optimizer, pretrained.step if pretrained else 0
    run = RunFolder.read(pretrained.path) if step else NO_RUN
    if not step or len(run.named_steps) > 1:
        raise UserError("train.decay_steps goes on from a checkpoint of a run; give --init-from RUN or RUN@STEP.")
    phases = (*experiment.phases, *run.experiment.phases)
    if experiment.command != "pretrain" or any(phase.sets("optimizer.") for phase in phases):
        raise UserError(
            "train.decay_steps is for pretraining with one schedule; leave it out, or give the decay as a last phase."
        )
    of_run = {setting.name: setting.value for setting in settings(run.experiment)}
    # A run with a warm-up share keeps the steps that follow from it; its flags had None.
    as_given = of_run | ({"optimizer.warmup_steps": None} if optimizer.warmup_share else {})
    for flag in flags:  # those of the run itself are welcome
        if flag.name in OF_DECAY and flag.value not in (of_run[flag.name], as_given[flag.name]):
            wrong = "--train.epochs" if flag.name == "train.steps" and t.epochs else _flag(flag)
            raise UserError(f"train.decay_steps decides {flag.name}, with the run before; leave out {wrong}.")
    theirs, free = run.experiment.optimizer, ("schedule", "decay_", "final_share", "warmup_")
    for field in dataclasses.fields(theirs):
        old, new = getattr(theirs, field.name), getattr(optimizer, field.name)
        if old != new and not field.name.startswith(free):
            raise UserError(f"{pretrained.path} was trained with optimizer.{field.name} {old}; its decay needs it too.")
    ignored = ("optimizer", "train.decay_steps", *OF_VOCABULARY)  # the vocabulary is the checkpoint's
    if changed := differences(*(
        flatten(each, lambda s: (s.decides_result() or s.name in OF_TEXT) and not s.name.startswith(ignored))
        for each in (run.experiment, experiment)
    )):
        log(f"the decay of {pretrained.path} changes {'; '.join(changed)}; give that run's flags if that is not meant.")
    rate = float(make_schedule(theirs, run.experiment.train.steps)(step))
    if not math.isclose(rate, theirs.learning_rate, rel_tol=1e-3):
        raise UserError(
            f"the learning rate of {pretrained.path} is {rate:g} at step {step:,} and not at its peak of "
            f"{theirs.learning_rate:g}; name an earlier checkpoint as RUN@STEP, of a run with optimizer.schedule wsd."
        )
    experiment = with_value(experiment, "train.steps", step + t.decay_steps)
    decay = {"schedule": "wsd", "decay_share": t.decay_steps / (step + t.decay_steps)}
    # inverse-sqrt holds its peak where others rise to it.
    warmup = theirs.warmup_steps and min(theirs.warmup_steps, step)
    decay |= {"warmup_steps": warmup, "warmup_share": theirs.warmup_share}
    return dataclasses.replace(experiment, optimizer=dataclasses.replace(optimizer, **decay))


def _objective_of(experiment: Experiment, pretrained: PretrainedModel | None, as_text: bool) -> Objective:
    """Return the objective of a configuration with the pretrained model, if there is one.

    A task gets its text-to-text form with `as_text`, and for a model that has no other.
    """
    objective, model = experiment.objective, pretrained and pretrained.objective.model
    is_own = is_foreign(type(objective.model))
    extends = is_own and model is not None and isinstance(objective.model, type(model))
    if objective.needs_text_form(model, as_text):
        longest = objective.longest_text
        # A decoder's row holds the text and the answer.
        max_target = min(longest, experiment.data.length // 2) if as_text else longest
        objective = TextToText(kind=objective, max_target=max_target)
    elif model is not None and (extends or system_of(objective, model)):
        if extends:
            # A class of one's own on the pretrained model's keeps what it adds, with fresh parameters.
            sizes = {item.name: getattr(model, item.name) for item in dataclasses.fields(model)}
            model = dataclasses.replace(objective.model, **sizes)
            pretrained = dataclasses.replace(
                pretrained, objective=dataclasses.replace(pretrained.objective, model=model)
            )
        elif is_own:
            raise UserError(f"{pretrained.path} is a {type(model).__name__}, and objective.model, a "
                            f"{type(objective.model).__name__}, extends another class; leave out --init-from, or give "
                            "a model of that class.")
        # It may be of another family than the preset's; `with_pretrained_model` refuses those not registered.
        objective = dataclasses.replace(objective, model=with_options(model, objective.model))
    return objective if pretrained is None else objective.with_pretrained_model(pretrained)


def open_evaluation(
    path: str | os.PathLike[str], flags: Sequence[str] = (), mesh: Mapping[str, int] = {}
) -> Evaluation:
    """Open a fine-tuned model and rows, to evaluate it on a mesh (see `make_inference_mesh`).

    Its rows are those of a flag, else those of the run's `data.dev`, else those held out of the run's `data.source`.
    """
    pretrained = load_model(path, mesh)
    task = pretrained.objective
    if not task.scores_rows:
        raise UserError(
            f"{path} was pretrained as {type(task).__name__} and not fine-tuned for a task; use `jaxlm finetune`, "
            "--task FILE to evaluate it with prompts, or --vectors FILE for its text vectors."
        )
    run = RunFolder.read(path)
    stored = run.experiment or folder_experiment(pretrained)
    unchanged = dataclasses.replace(stored, objective=task, data=dataclasses.replace(stored.data, source="", dev=""))
    experiment = override(unchanged, list(flags), f"jaxlm evaluate {path}")
    for old, _ in _changes(unchanged, experiment):
        if not old.name.startswith(("data.", "objective.", "train.batch_size")):
            raise UserError(
                f"{_flag(old)} has no effect here; only --data.…, --objective.… and --train.batch-size have one."
            )
    _require_same_weights(unchanged, experiment, str(path))
    data = experiment.data
    if data.source and data.dev:
        raise UserError("--data.source and --data.dev both name the rows to evaluate on; give one of them.")
    dev = data.source or data.dev or stored.data.dev
    data = dataclasses.replace(data, source="" if dev else stored.data.source, dev=dev)
    for name in task.symbols:  # refused here, since `set_up` would add those that the model lacks
        pretrained.tokenizer.vocabulary.id(name)
    experiment = dataclasses.replace(experiment, data=data)
    session = set_up(Resolved(experiment, pretrained), load_model, run).without_data()
    rows = together(lambda: data.open(session.tokenizer), "all to read the rows")
    require_same({"rows": rows.fingerprint})
    if run.experiment is None and jax.process_index() == 0:
        columns = f"by the columns {', '.join(data.columns())}, and " if isinstance(data, TableData) else ""
        log(f"Rows are read {columns}up to {data.length:,} tokens of each.")
    if not dev and run.metadata.get("data") not in (None, rows.fingerprint):
        raise UserError(
            f"{data.source} is not divided as when {path} was trained on it, so rows that it has learnt from would be "
            "scored; give rows of their own with --data.source FILE."
        )
    return Evaluation(session.objective, pretrained.params, rows, data, experiment.train.batch_size)


def folder_experiment(pretrained: PretrainedModel) -> Experiment:
    """Return the configuration to evaluate a Transformers folder: its task, longest text and, if known, its rows."""
    task, found, length = pretrained.objective, dict(pretrained.settings.rows), pretrained.length or 512
    kind = task_of(task).rows
    rows = {f.name: found[f.name] for f in kind.format_fields() if f.name in found}
    data = kind(length=min(length, task.model.max_length or length), **rows)
    try:
        check_types(data)
    except UserError as error:
        raise UserError(f"{pretrained.path}: in config.json, jaxlm.rows.{error}") from error
    return Experiment(objective=task, data=data, train=TrainConfig(batch_size=32))


def require_command(experiment: Experiment, command: str, config: str) -> None:
    """Raise UserError unless `jaxlm COMMAND` trains the configuration, a task or pretraining."""
    if experiment.command != command:
        kind = "a task" if experiment.command == "finetune" else "pretraining"
        raise UserError(f"{config} is a configuration of {kind}; use `jaxlm {experiment.command}`.")


def _require_one_duration(unchanged: Experiment, experiment: Experiment, is_run: bool) -> None:
    """Raise UserError if both a number of steps and the epochs or the share that determine it are given."""
    for part, share, number in (("train", "epochs", "steps"), ("optimizer", "warmup_share", "warmup_steps")):
        old, new = getattr(unchanged, part), getattr(experiment, part)
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


def _remark_on_phases(unchanged: Experiment, experiment: Experiment) -> None:
    """Tell of each flag whose field some of a preset's phases set themselves."""
    phases = {str(number): phase.changes for number, phase in enumerate(experiment.train.phases, 1)}
    for _, new in _changes(unchanged, experiment):
        if own := {n: str(f[new.name]) for n, f in phases.items() if f.get(new.name, new.value) != new.value}:
            log(f"{_flag(new)} {new.value} leaves phase {', '.join(own)} of train.phases at "
                f"{', '.join(dict.fromkeys(own.values()))}; to change that too, give --train.phases.")


def _require_same_weights(unchanged: Experiment, experiment: Experiment, path: str, begun: Model | None = None) -> None:
    """Raise UserError for a flag that changes a field on which the weights in the folder `path` depend.

    With `begun`, the model there that training begins with, only for the fields which that has.
    """
    for old, _ in _changes(unchanged, experiment):
        is_fixed = old.needs_weights()
        if begun is not None:  # training may change what is kept
            is_models, name = old.name.startswith("objective.model."), old.name.split(".")[-1]
            is_fixed = is_models and old.decides_weights() and any(hasattr(m, name) for m in (begun, begun.text_model))
        if is_fixed:
            raise UserError(f"the weights of {path} were trained with {_flag(old)} {old.value}; leave the flag out.")


def _require_weights_of_phase(experiment: Experiment, path: str) -> None:
    """Raise UserError if a preset's first phase, which is made for fresh weights, changes what those of `path` need."""
    own = {setting.name: setting.value for setting in settings(experiment)}
    for new in settings(experiment.phases[0].experiment):
        is_models = new.name.startswith("objective.model.") and new.needs_weights()
        is_models &= new.name != "objective.model.is_causal"  # as the phase's objective needs
        if is_models and new.value != own.get(new.name, new.value):
            raise UserError(
                f"the first phase of the configuration has {new.name} {new.value}, and the weights of {path} were "
                f"trained with {own[new.name]}; add --train.phases= to leave out its phases, or give your own there."
            )


def _changes(old: Experiment, new: Experiment) -> list[tuple[Setting, Setting]]:
    """Return (old, new) for each field that flags have changed."""
    pairs = zip(settings(old), settings(new), strict=True)
    return [(a, b) for a, b in pairs if a.value != b.value and not dataclasses.is_dataclass(a.value)]


def _flag(setting: Setting) -> str:
    return f"--{setting.name.replace('_', '-')}"
