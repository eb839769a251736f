"""Experiment: the typed configuration tree, how a preset becomes one, and how a run folder keeps it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import runpy
import typing
from pathlib import Path
from typing import Any, Literal

from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.parallel.mesh import MeshConfig
from jaxlm.systems import CLASSES as OBJECTIVE_CLASSES


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which update, how large, and how that changes over the run."""

    name: Literal["adamw", "lamb", "adafactor"] = "adamw"
    """adamw (decoupled decay), lamb (for batches of thousands), adafactor (T5: factored second moments)."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    warmup_steps: int = 10_000
    """Steps over which the learning rate rises from 0 to its peak."""
    schedule: Literal["linear", "cosine", "inverse-sqrt", "constant"] = "linear"
    """After the warm-up: linear or cosine decay to final_share at the last step, 1/sqrt(step), or constant."""
    final_share: float = 0.0
    """Learning rate of the last step as a share of the peak (linear, cosine)."""
    b1: float = 0.9
    """Decay of the first moment (adamw, lamb)."""
    b2: float = 0.999
    """Decay of the second moment (adamw, lamb)."""
    eps: float = 1e-6
    """Added outside the square root (adamw, lamb)."""
    bias_correction: bool = True
    """Divide the moments by 1 - b^step (adamw, lamb). BERT and ELECTRA did without."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only: never on biases and norms."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and what is kept."""

    steps: int = 1_000_000
    """Optimizer steps in all."""
    batch_size: int = 256
    """Sequences in one optimizer step, over all devices."""
    short_steps: int = 0
    """Steps at the beginning whose rows have only `short_length` tokens, and batches as many more rows as give the same
    number of tokens: attention is learnt sooner over few tokens, and costs less (BERT did nine tenths of its steps at
    128 tokens and the rest at 512). Evaluation is always at `data.length`."""
    short_length: int = 16
    """Sequence length of those steps, special symbols included; it must divide `data.length`."""
    accumulate: int = 1
    """Parts in which a batch is computed one after another; saves activation memory."""
    seed: int = 0
    """Seed of everything random: initial weights, order of the text, corruption, dropout."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 1000
    """Steps between evaluations on held-out text; the last step always evaluates. 0: only at the end."""
    eval_batches: int = 32
    """Batches of held-out text in one evaluation, or as many as there are."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last step always saves. 0: only at the end."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept, besides the one with the best held-out loss."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. Presets in configs/ build one; flags override its fields."""

    objective: Any
    data: TextData = TextData()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()

    def validate(self) -> None:
        """UserError for the first value that cannot be meant."""
        check_choices(self)
        self.data.validate()
        t, o = self.train, self.optimizer
        for name in ("steps", "batch_size", "accumulate", "log_every", "eval_batches", "keep_checkpoints"):
            if getattr(t, name) < 1:
                raise UserError(f"train.{name} is {getattr(t, name)}; it must be at least 1.")
        for name in ("short_steps", "eval_every", "checkpoint_every"):
            if getattr(t, name) < 0:
                raise UserError(f"train.{name} is {getattr(t, name)}; it must be at least 0.")
        if not 0 <= t.seed < 2**32:
            raise UserError(f"train.seed is {t.seed}; it must lie between 0 and {2**32 - 1}.")
        if t.batch_size % t.accumulate:
            raise UserError(f"train.batch_size {t.batch_size} is not divisible by train.accumulate {t.accumulate}.")
        if t.short_steps and (t.short_length < 1 or self.data.length % t.short_length):
            raise UserError(
                f"train.short_length {t.short_length} does not divide data.length {self.data.length}; choose another "
                "one, or train.short_steps 0."
            )
        for name in ("learning_rate", "eps"):
            if not (getattr(o, name) > 0 and math.isfinite(getattr(o, name))):
                raise UserError(f"optimizer.{name} is {getattr(o, name)}; it must be above 0, and finite.")
        if o.warmup_steps < 0:
            raise UserError(f"optimizer.warmup_steps is {o.warmup_steps}; it must be at least 0.")
        for name in ("b1", "b2"):
            if not 0 <= getattr(o, name) < 1:
                raise UserError(f"optimizer.{name} is {getattr(o, name)}; it must be in [0, 1).")
        for name in ("weight_decay", "clip_norm", "final_share"):
            if not 0 <= getattr(o, name) < math.inf:
                raise UserError(f"optimizer.{name} is {getattr(o, name)}; it must be at least 0, and finite.")


def check_choices(config: Any, prefix: str = "") -> None:
    """UserError for a field that is none of the choices its type lists, here or in a dataclass inside. Flags are
    checked where they are read; a preset or a config.json can say anything."""
    types = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "vocabulary":
            check_choices(value, f"{name}.")
        elif typing.get_origin(types[field.name]) is Literal and value not in typing.get_args(types[field.name]):
            choices = [str(choice) for choice in typing.get_args(types[field.name])]
            raise UserError(f"{name} is {value!r}; it must be {', '.join(choices[:-1])} or {choices[-1]}.")


# The only classes that a configuration file may name; nothing in it is ever an import path.
CLASSES: dict[str, type] = {
    cls.__name__: cls for cls in (Experiment, TextData, OptimizerConfig, TrainConfig, MeshConfig, *OBJECTIVE_CLASSES)
}


def to_json(value: Any) -> Any:
    """A configuration as plain JSON values; dataclasses carry their class name under "type"."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "vocabulary"}
        return {"type": type(value).__name__} | fields
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any, where: str = "the configuration") -> Any:
    """The inverse of `to_json`; UserError for a class or a field that this version does not know."""
    if isinstance(value, list):
        return tuple(from_json(item, where) for item in value)
    if not isinstance(value, dict):
        return value
    cls = CLASSES.get(value.get("type", ""))
    if cls is None:
        raise UserError(f"{where} names a type {value.get('type')!r} that this version of jaxlm does not know.")
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(value) - known - {"type"})
    if unknown:
        raise UserError(
            f"{where} has a field {unknown[0]!r} that {cls.__name__} does not have in this version of jaxlm."
        )
    return cls(**{name: from_json(item, where) for name, item in value.items() if name != "type"})


def load_preset(path: str) -> Experiment:
    """Runs a preset (a Python file that sets `experiment`) and returns its Experiment.

    `bert_tiny` is found as configs/bert_tiny.py below the working directory; a folder of a run gives its configuration.
    """
    candidates = [Path(path), Path(f"{path}.py"), Path("configs") / f"{path}.py"]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        if (Path(path) / "config.json").is_file():
            return load_config(Path(path) / "config.json")
        given = Path(path).parent
        presets = {p.stem: p for folder in (Path("configs"), given) for p in sorted(folder.glob("*.py"))}
        close = [str(presets[name]) for name in difflib.get_close_matches(Path(path).stem, presets, n=3, cutoff=0.5)]
        # What else lies in the working directory is rarely a preset.
        folder = given if given != Path(".") and given.is_dir() else Path("configs")
        names = sorted(p.stem for p in folder.glob("*.py"))
        hint = f"did you mean {' or '.join(close)}?" if close else (
            f"{folder} has {', '.join(names)}." if names else "run it from the project's folder, where configs/ is."
        )
        raise UserError(f"there is no preset or run folder {path}; {hint}")
    try:
        experiment = runpy.run_path(str(found)).get("experiment")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the preset {found} cannot be run: {type(error).__name__}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise UserError(f"the preset {found} does not set `experiment` to a jaxlm Experiment.")
    return experiment


def load_config(path: os.PathLike[str] | str) -> Experiment:
    """The Experiment that a run folder's config.json holds."""
    try:
        value = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {Path(path).parent} is not a jaxlm run folder.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable as JSON ({error}); the run folder is damaged.") from None
    if isinstance(value, dict) and "type" not in value:
        raise UserError(
            f"{path} is no configuration of a jaxlm run"
            + (", but of a Transformers folder; `jaxlm import` makes a run of it." if "model_type" in value else ".")
        )
    experiment = from_json(value, str(path))
    if not isinstance(experiment, Experiment):
        raise UserError(f"{path} does not hold a jaxlm Experiment.")
    check_choices(experiment)
    return experiment


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """The fields in which two configurations differ, as "train.steps: 100 -> 200"."""
    if type(old) is type(new) and dataclasses.is_dataclass(old):
        return [
            line
            for f in dataclasses.fields(old) if f.name != "vocabulary"
            for line in differences(getattr(old, f.name), getattr(new, f.name), f"{prefix}{f.name}.")
        ]
    if dataclasses.is_dataclass(old) or dataclasses.is_dataclass(new):
        return [f"{prefix[:-1]}: {type(old).__name__} -> {type(new).__name__}"]
    return [] if old == new else [f"{prefix[:-1]}: {old} -> {new}"]
